"""What is asked of vLLM itself. Imports it; written against 0.32.0."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm.envs
from torch.nn import Module
from vllm.config.load import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from broker.errors import LoadFailed, UsageError
from engine_client.integrations.vllm.files import Files, look_at
from engine_client.integrations.vllm.options import LOAD_FORMAT, Options
from engine_client.integrations.vllm.settings import Surroundings

_GROUPS = ("tp", "pp", "dp", "pcp", "dcp", "ep")
_ONLY_MAPPED = "in mode map the weights cannot be written; use mode copy, or leave it out"


def surroundings() -> Surroundings:
    """Ranks, versions, device and environment of this process. vLLM's groups must exist."""
    return Surroundings(
        vllm=vllm.__version__,
        torch=torch.__version__,
        layout=_layout(),
        device=_device(),
        environment=vllm.envs.compile_factors(),
    )


def _layout() -> dict[str, int]:
    layout = {}
    for name in _GROUPS:
        group = _group(name)
        if group is not None:
            layout[f"{name}_rank"] = group.rank_in_group
            layout[f"{name}_size"] = group.world_size
    return layout


def _group(name: str) -> Any:
    """The rank's group, None if this model or this version of vLLM has no such."""
    get = getattr(parallel_state, f"get_{name}_group", None)
    try:
        return None if get is None else get()
    except AssertionError:  # vLLM's word for a group that was not made
        return None


def platform() -> str:
    """ "cuda", "rocm", "cpu", …"""
    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def _device() -> dict[str, Any]:
    capability = current_platform.get_device_capability()
    described = {
        "platform": platform(),
        "name": str(current_platform.get_device_name()),
        "capability": None if capability is None else list(capability),
    }
    if platform() == "cpu":
        described["instructions"] = torch.backends.cpu.get_cpu_capability()
    return described


def broker_device(options: Options) -> str:
    """What the client calls the device of this rank."""
    if options.device == "simulated" or not current_platform.is_cuda_alike():
        return options.device
    return f"cuda:{torch.accelerator.current_device_index()}"


def torch_device(vllm_config: Any) -> torch.device:
    return torch.device(vllm_config.load_config.device or vllm_config.device_config.device)


def local_ranks(vllm_config: Any) -> int:
    """Processes of this engine on this node, as far as tensor and pipeline ranks tell."""
    return max(1, int(vllm_config.parallel_config.local_world_size))


def require_suitable(vllm_config: Any, options: Options) -> None:
    """Refuse settings of vLLM that write to weights, or move them, after they were loaded.

    Raises:
        UsageError: names the setting.
    """
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        raise UsageError("vLLM's weight offloading moves weights to the host: it cannot be shared")
    if options.mode == "copy":
        return
    writers = {
        "--enable-sleep-mode": vllm_config.model_config.enable_sleep_mode,
        "--weight-transfer-config": vllm_config.weight_transfer_config is not None,
        "--enable-eplb": vllm_config.parallel_config.enable_eplb,
        "--enable-elastic-ep": vllm_config.parallel_config.enable_elastic_ep,
    }
    used = [name for name, is_used in writers.items() if is_used]
    if used:
        raise UsageError(f"{', '.join(used)} writes to weights: {_ONLY_MAPPED}")


def draft_config(vllm_config: Any) -> Any:
    """The draft model's configuration if it is loaded through this plugin as well, else None."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return None
    own = speculative.draft_load_config
    is_ours = own is None or own.load_format == LOAD_FORMAT
    return speculative.draft_model_config if is_ours else None


# --- loading as vLLM does ----------------------------------------------------------------------


def ordinary_loader(load_config: LoadConfig, load_format: str = "safetensors") -> Any:
    """vLLM's own loader. Of safetensors unless told otherwise: nothing else is shared."""
    plain = replace(load_config, load_format=load_format, model_loader_extra_config={})
    return DefaultModelLoader(plain)


def load_ordinarily(
    vllm_config: Any, model_config: Any, load_config: LoadConfig, prefix: str
) -> Module:
    """All of it, as without this plugin."""
    loader = ordinary_loader(load_config, "auto")
    model: Module = loader.load_model(
        vllm_config=vllm_config, model_config=model_config, prefix=prefix
    )
    return model


def find_files(model_config: Any, load_config: LoadConfig) -> Files:
    """The files that vLLM would load, downloaded first if they are not here. May block for long.

    Raises:
        LoadFailed, NotFound: there is no safetensors checkpoint that could be shared.
    """
    loader = ordinary_loader(load_config)
    try:
        folder, paths, _is_safetensors, _index = loader._prepare_weights(  # noqa: SLF001 - its choice
            model_config.model, None, model_config.revision, False, None
        )
    except RuntimeError as error:  # vLLM's word for "no such files"
        raise LoadFailed(
            f"{model_config.model} has no safetensors files, and only those are shared: {error}; "
            "load it the ordinary way (--load-format auto)",
            reason="no_weights",
            file=model_config.model,
        ) from error
    return look_at(folder, [Path(path).name for path in paths])


@contextmanager
def default_dtype(model_config: Any) -> Iterator[None]:
    """What vLLM builds, loads and processes within."""
    with set_default_torch_dtype(model_config.dtype):
        yield


def create(vllm_config: Any, model_config: Any, prefix: str) -> Module:
    """A model with the parameters that vLLM gives it, not loaded."""
    with torch_device(vllm_config):
        model: Module = initialize_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
    return model


def require_one_source(model: Module) -> None:
    """Refuse a model that reads weights from other places than its checkpoint.

    Raises:
        UsageError: it does.
    """
    for name in ("secondary_weights", "allow_patterns_overrides"):
        if getattr(model, name, None):
            raise UsageError(
                f"{type(model).__name__} chooses its weight files itself ({name}): no key could "
                "tell them apart; load it the ordinary way (--load-format auto)"
            )


def process(model: Module, model_config: Any, vllm_config: Any) -> None:
    """Let vLLM process loaded weights."""
    process_weights_after_loading(model, model_config, torch_device(vllm_config))


def process_again(model: Module, model_config: Any, vllm_config: Any) -> None:
    """Let vLLM build what it needs around weights that were processed already."""
    from vllm.model_executor.utils import weights_already_processed

    with weights_already_processed():
        process(model, model_config, vllm_config)


def forget_layers(vllm_config: Any, known: set[str]) -> None:
    """Let a model be created once more: vLLM keeps a list of layers and refuses a name it has."""
    compilation = vllm_config.compilation_config
    for name in set(compilation.static_forward_context) - known:
        del compilation.static_forward_context[name]
    compilation.static_all_moe_layers[:] = [
        name for name in compilation.static_all_moe_layers if name in known
    ]


def known_layers(vllm_config: Any) -> set[str]:
    return set(vllm_config.compilation_config.static_forward_context)


def tidy() -> None:
    """Give freed device memory back, which the broker or other engines may need."""
    gc.collect()
    torch.accelerator.empty_cache()
