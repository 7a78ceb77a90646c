"""Options of the library's `from_pretrained` that make no sense with shared weights, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.errors import UsageError

_ELSEWHERE = "the weights are where the client's device is"
_LOCAL = (
    "path has to be a folder of this machine; download the checkpoint first and name its folder"
)
_FILES = "the broker loads the safetensors files that lie in the folder"
_SPLIT = "the model is mapped whole; an engine that splits one publishes its own shards"
_QUANTISED = (
    "weights that are quantised while they are loaded are the engine's own: build the model "
    "privately and share it with client.get_or_publish"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_buffers"), _ELSEWHERE),
    **dict.fromkeys(("cache_dir", "force_download", "proxies", "token", "revision"), _LOCAL),
    "code_revision": _LOCAL,
    **dict.fromkeys(("subfolder", "variant", "gguf_file", "state_dict"), _FILES),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), _SPLIT),
    "quantization_config": _QUANTISED,
    "trust_remote_code": (
        "code that comes with a checkpoint is not run from here; import its class yourself and "
        "pass it as model_class"
    ),
    "ignore_mismatched_sizes": "weights that do not fit are never replaced by random ones",
    "output_loading_info": "weights that are missing or do not fit are an error, which lists them",
    **dict.fromkeys(
        ("adapter_kwargs", "adapter_name"),
        "adapters are loaded beside shared weights, with model.load_adapter",
    ),
    **dict.fromkeys(
        ("use_kernels", "kernel_config", "fusion_config", "allow_all_kernels"),
        "kernels that replace layers may want their weights in another form",
    ),
}
"""Option → why it cannot be used. One that is None or False says nothing and is let through."""

READING = frozenset(
    {"use_safetensors", "weights_only", "local_files_only", "disable_mmap", "low_cpu_mem_usage"}
)
"""Options about how files are read: the broker's loader reads them, in its own way."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the library is to get.

    Raises:
        UsageError: one of them cannot be used with shared weights; names it and says why.
    """
    for name, why in REFUSED.items():
        if options.get(name) not in (None, False):
            raise UsageError(f"from_pretrained: {name} cannot be used with shared weights: {why}")
    if options.get("use_safetensors") is False:
        raise UsageError("from_pretrained: only safetensors are loaded, never pickled weights")
    return {
        name: value
        for name, value in options.items()
        if name not in REFUSED and name not in READING
    }
