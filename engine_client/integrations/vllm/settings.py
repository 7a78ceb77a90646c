"""Everything that the weights of one engine rank depend on, as plain data.

Reads vLLM's configuration objects, imports none of vLLM: what only a running vLLM can say (ranks,
versions, the device) comes in as `Surroundings`. Whatever is in these settings is in the key, so
two engines that differ in any of it never share. When in doubt a setting is in: the price of one
too many is a second copy, of one too few wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_client.integrations.vllm.options import Stage
from engine_client.integrations.vllm.plain import canonical

LAYOUT_VERSION = 1
"""Of what this plugin publishes. Another one is another format: old sets are not mapped."""

_OF_PLACES = frozenset({"_name_or_path", "transformers_version"})
"""Of a model's configuration: where it was found and who wrote it say nothing of the weights."""

_MODEL_FIELDS = (
    "dtype",
    "quantization",
    "quantization_config",
    "revision",
    "code_revision",
    "trust_remote_code",
    "runner_type",
    "convert_type",
    "model_impl",
    "model_class_overrides",
    "word_embeddings_untied_by_checkpoint",
)
_MULTIMODAL_FIELDS = (
    "language_model_only",
    "limit_per_prompt",
    "mm_encoder_only",
    "mm_encoder_tp_mode",
    "mm_encoder_attn_backend",
)
_PARALLEL_FIELDS = ("enable_expert_parallel", "expert_placement_strategy")
_CACHE_FIELDS = ("cache_dtype", "kv_cache_dtype_skip_layers")

_OF_ONE_ENGINE = (
    *("VLLM_DP_", "VLLM_RAY_", "RAY_", "VLLM_NIXL_", "VLLM_P2P_", "VLLM_EC_", "VLLM_MOONCAKE_"),
    *("MOONCAKE_", "VLLM_LOOPBACK_IP", "VLLM_CPU_OMP_", "VLLM_CPU_NUM_", "VLLM_PROCESS_NAME_"),
)
"""Beginnings of variables that say where one engine runs, not what it makes of weights."""


@dataclass(frozen=True)
class Surroundings:
    """What a running vLLM says of this rank.

    Attributes:
        vllm, torch: versions.
        layout: rank and size of every parallel group, e.g. {"tp_rank": 0, "tp_size": 2}.
        device: platform, name and compute capability.
        environment: vLLM's environment variables that its compiled code depends on.
    """

    vllm: str
    torch: str
    layout: Mapping[str, int]
    device: Mapping[str, Any]
    environment: Mapping[str, Any]


def settings_of(
    vllm_config: Any, model_config: Any, surroundings: Surroundings, stage: Stage
) -> dict[str, Any]:
    """The settings of one rank's weights. Call it before loading, which changes configurations.

    Args:
        model_config: the target's or the draft's.

    Raises:
        UsageError: one of them is an object that cannot be written down.
    """
    found = {
        "plugin": LAYOUT_VERSION,
        "stage": stage,
        "role": role_of(vllm_config, model_config),
        "vllm": surroundings.vllm,
        "torch": surroundings.torch,
        "layout": dict(surroundings.layout),
        "device": dict(surroundings.device),
        "model": _fields(model_config, _MODEL_FIELDS),
        "config": _model_settings(model_config.hf_config),
        "multimodal": _fields(model_config.multimodal_config, _MULTIMODAL_FIELDS),
        "parallel": _fields(vllm_config.parallel_config, _PARALLEL_FIELDS),
        "lora": vllm_config.lora_config is not None,
        "additional": vllm_config.additional_config,
    }
    if stage == "processed":
        found["kernels"] = vllm_config.kernel_config
        found["attention"] = vllm_config.attention_config
        found["cache"] = _fields(vllm_config.cache_config, _CACHE_FIELDS)
        found["environment"] = {
            name: value
            for name, value in surroundings.environment.items()
            if not name.startswith(_OF_ONE_ENGINE)
        }
    return {name: canonical(value, f"vLLM's setting {name}") for name, value in found.items()}


def role_of(vllm_config: Any, model_config: Any) -> str:
    """ "draft" for the model of speculative decoding, else "target"."""
    speculative = vllm_config.speculative_config
    is_draft = speculative is not None and model_config is speculative.draft_model_config
    return "draft" if is_draft else "target"


def quantization_of(model_config: Any) -> str:
    """The quantisation method's name for the key, "" if there is none."""
    return str(model_config.quantization or "")


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the named fields that this version of vLLM has; nothing of no configuration."""
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _model_settings(config: Any) -> Any:
    """A model's own configuration without what only says where it lies, in all its parts."""
    return _without_places(config.to_dict())


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(v) for key, v in value.items() if key not in _OF_PLACES}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value]
    return value
