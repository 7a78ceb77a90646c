"""For which modules of vLLM sharing gives right numbers. Asked before any weight is loaded.

vLLM gives each layer an object (`quant_method`) that makes its parameters and, after loading,
processes them; attention layers have a hook of their own for that. Each class of either kind has a
rule here or is refused by name. The rules were read in the source of vLLM 0.32.0:

- plain linear and embedding layers leave their weights as they are loaded, but for vLLM's CPU
  build, which replaces each by a packed one inside a closure;
- plain experts are reordered for a kernel, fp8 weights requantised and their scales fused, and
  both write to what was loaded while they do it;
- scales of the KV cache become buffers and numbers;
- latent attention (MLA) splits a projection into new parameters, and when it runs again it writes
  to those it finds.

Imports no vLLM: classes go by their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from broker.errors import UnsupportedQuantForIPCError, UsageError
from engine_client.integrations.vllm.options import Stage

_NAMES_SHOWN = 4
_HOOK = "process_weights_after_loading"

Doubt = Callable[[Any, Stage, str], str]
"""(method or module, stage, platform): why sharing is not right, as a clause, or ""."""


def _no_doubt(_method: Any, _stage: Stage, _platform: str) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """What is known of one class.

    Attributes:
        doubt: says for what the class cannot be shared.
        writes: its processing writes to the loaded tensors, so each engine needs private copies
            of them in the stage "loaded".
        rebuilt: attributes that it makes anew when it is told that its weights are processed
            already; they need not be carried.
    """

    doubt: Doubt = _no_doubt
    writes: bool = False
    rebuilt: tuple[str, ...] = ()


def register_vllm_class(name: str, rule: Rule) -> None:
    """Put a class on this process's list, or replace its rule.

    For a class that is known to be right: all of its state after processing is in parameters,
    buffers and plain attributes, or made again when vLLM tells it that weights are processed.

    Args:
        name: module and qualified name, e.g. "vllm.model_executor.layers.linear.…".
    """
    if "." not in name:
        raise UsageError(f"a class is registered under its full name, {name!r} has no module")
    _RULES[name] = rule


def check_classes(model: Module, stage: Stage, platform: str) -> None:
    """Refuse a model that has a module for which sharing is not known to be right.

    Args:
        model: its weights need not be loaded, nor real.
        platform: "cuda", "rocm" or "cpu".

    Raises:
        UnsupportedQuantForIPCError: names the modules, their class and the reason.
    """
    refused: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, what, name in _judged(model):
        reason = _reason(what, name, stage, platform)
        if reason:
            refused[name, reason].append(path or "the model itself")
    if refused:
        raise _refusal(stage, refused)


def writing_modules(model: Module) -> list[Module]:
    """The modules whose processing writes to their loaded tensors."""
    return [module for module in model.modules() if _rule_of(module).writes]


def rebuilt_attributes(model: Module) -> dict[str, tuple[str, ...]]:
    """By module path the attributes that need not be carried; only where there are any."""
    found = ((path, _rule_of(module).rebuilt) for path, module in model.named_modules())
    return {path: names for path, names in found if names}


def _judged(model: Module) -> Iterator[tuple[str, Any, str]]:
    """(path, object, class name) of everything that processes weights."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, _HOOK):
            yield path, method, _name_of(type(method))
        hook = _hook_of(module)
        if hook:
            yield path, module, hook


def _hook_of(module: Module) -> str:
    """The name of the class that gives a module its hook, or ""."""
    for kind in type(module).__mro__:
        if _HOOK in kind.__dict__:
            return _name_of(kind)
    return ""


def _rule_of(module: Module) -> Rule:
    method = getattr(module, "quant_method", None)
    return _RULES.get(_name_of(type(method)), Rule())


def _reason(what: Any, name: str, stage: Stage, platform: str) -> str:
    rule = _RULES.get(name)
    if rule is None:
        return "it is not known what its processing leaves outside of tensors"
    is_method = not isinstance(what, Module)
    if stage == "processed" and is_method:
        declared = getattr(what, "supports_pre_processed_weights", None)
        if declared is None:
            return "this version of vLLM cannot build on processed weights, 0.32.0 can"
        if not declared:
            return "vLLM says that it cannot build on processed weights"
    return rule.doubt(what, stage, platform)


def _refusal(
    stage: Stage, refused: dict[tuple[str, str], list[str]]
) -> UnsupportedQuantForIPCError:
    parts = [f"{_shown(paths)} ({name}: {reason})" for (name, reason), paths in refused.items()]
    instead = "use stage loaded, or " if stage == "processed" else ""
    return UnsupportedQuantForIPCError(
        f"[weight-broker:engine] stage {stage} cannot share these modules of vLLM: "
        f"{'; '.join(parts)}; {instead}load this model the ordinary way (--load-format auto)",
        where="engine",
        method=next(iter(refused))[0],
        modules=[path for paths in refused.values() for path in paths],
    )


def _shown(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
    return ", ".join(paths[:_NAMES_SHOWN]) + more


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _packed_on_cpu(_method: Any, stage: Stage, platform: str) -> str:
    if stage == "processed" and platform == "cpu":
        return "vLLM's CPU build replaces their weights by packed ones inside a closure"
    return ""


def _writes_again(_module: Any, stage: Stage, _platform: str) -> str:
    if stage == "processed":
        return "its hook runs again and writes to the parameters that it made the first time"
    return ""


_LAYERS = "vllm.model_executor.layers"
_RULES: dict[str, Rule] = {
    f"{_LAYERS}.linear.UnquantizedLinearMethod": Rule(_packed_on_cpu),
    f"{_LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod": Rule(_packed_on_cpu),
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": Rule(
        _packed_on_cpu, writes=True, rebuilt=("moe_kernel", "moe_quant_config")
    ),
    f"{_LAYERS}.quantization.fp8.Fp8LinearMethod": Rule(_packed_on_cpu, writes=True),
    f"{_LAYERS}.quantization.fp8.Fp8KVCacheMethod": Rule(writes=True),
    f"{_LAYERS}.quantization.kv_cache.BaseKVCacheMethod": Rule(writes=True),
    f"{_LAYERS}.attention.attention.Attention": Rule(),
    f"{_LAYERS}.attention.mm_encoder_attention.MMEncoderAttention": Rule(),
    f"{_LAYERS}.attention.mla_attention.MLAAttention": Rule(_writes_again),
}
