"""Is sharing a checkpoint's tensors right for the way it is quantised? Asked before any is loaded.

The broker keeps tensors exactly as the checkpoint stores them, and engines bind exactly those. That
gives right numbers only if the stored tensors are all that the method needs, in the form its
kernels need. Most methods are not like that: they repack tensors for a kernel after loading, fuse
their scales into a number kept in a Python object, or quantise full-precision weights while they
load. Binding the stored tensors in place of the result gives wrong numbers or none, and repacking
them in place would spoil them for every other engine. So there is an allowlist, each method on it
has a predicate over its configuration, and everything else is refused.

On the list:

- no quantisation at all;
- "fp8" with `weight_block_size` and dynamic activation scales: each block's scale is a stored
  tensor beside its weights and both are used as they are. Without blocks there is one scale a
  tensor, which engines fuse across q/k/v and requantise the weights for; static activation scales
  are reduced to numbers outside any tensor; `dequantize` asks for other tensors than are stored;
  `expert_dtype` "fp4" packs two values a byte, which kernels want in an order of their own.

Imports nothing but the standard library and the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from broker.errors import UnsupportedQuantForIPCError, UsageError

Where = Literal["broker", "engine"]

Predicate = Callable[[Mapping[str, Any]], str]
"""From a method's configuration to why sharing is not right, as a clause; "" if it is right."""

_CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where config.json keeps it; the second is what llm-compressor wrote first."""


def check_ipc_quant_support(quantization_config: object, *, where: Where) -> str:
    """Make sure that sharing the stored tensors gives right numbers for this method.

    Does no I/O. Both sides ask: the engine before it sends a request, the broker's loader because
    it trusts no engine.

    Args:
        quantization_config: what `quantization_config_in` found in the checkpoint's config.json;
            `None` or an empty mapping for an unquantised checkpoint. Anything else than a mapping
            is refused, since it comes from a file.
        where: which side asks; it starts the sentence.

    Returns:
        The method's name for `WeightKey.quantization`, "" for an unquantised checkpoint.

    Raises:
        UnsupportedQuantForIPCError: it would not, or might not; with `where` and `method`.
    """
    if quantization_config is None or quantization_config == {}:
        return ""
    if not isinstance(quantization_config, Mapping):
        kind = type(quantization_config).__name__
        raise _refusal(where, "unknown", f"its configuration is a {kind}, not a mapping")
    method = _method_of(quantization_config)
    if not method:
        raise _refusal(where, "unknown", "its configuration names no quant_method")
    predicate = _PREDICATES.get(method)
    if predicate is None:
        raise _refusal(where, method, _WHY_NOT.get(method, _NOT_KNOWN))
    doubt = _doubt(predicate, quantization_config)
    if doubt:
        raise _refusal(where, method, doubt)
    return method


def register_ipc_quantization(method: str, predicate: Predicate) -> None:
    """Add a method to the allowlist of this process, for one whose tensors are known to suffice.

    The predicate is called with the checkpoint's quantization_config, whose values may be
    anything that JSON can hold; it returns "" or why sharing would not be right. What it raises
    counts as a refusal. Register on both sides: engines and loaders are processes of their own.

    Raises:
        UsageError: no name was given, or the method is on the list already.
    """
    name = method.strip().lower()
    if not name:
        raise UsageError("a quantisation method is registered under a name, and none was given")
    if name in _PREDICATES:
        raise UsageError(f"the quantisation method {name!r} is registered already", method=name)
    _PREDICATES[name] = predicate


def quantization_config_in(config: Mapping[str, Any]) -> object:
    """The quantisation part of a config.json, `None` if there is none.

    Models of several parts may keep it in one of them (`text_config`, …), so each is looked at. It
    is returned as it is, for `check_ipc_quant_support` to judge.
    """
    for part in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        for key in _CONFIG_KEYS:
            if part.get(key) not in (None, {}):
                return part[key]
    return None


def _method_of(config: Mapping[str, Any]) -> str:
    """The method's name in lower case, at most 64 characters of it; "" if there is none."""
    # bitsandbytes' first configurations name no method; these keys win over a name elsewhere too.
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return "bitsandbytes"
    method = config.get("quant_method")
    return method.strip().lower()[:64] if isinstance(method, str) else ""


def _doubt(predicate: Predicate, config: Mapping[str, Any]) -> str:
    try:
        return predicate(config)
    except Exception as error:  # noqa: BLE001 - a predicate that stumbles over a file's contents
        return f"its configuration could not be judged ({type(error).__name__}: {error})"


def _refusal(where: Where, method: str, reason: str) -> UnsupportedQuantForIPCError:
    shown = method if method.isprintable() else ascii(method)
    return UnsupportedQuantForIPCError(
        f"[weight-broker:{where}] found quantisation {shown}: {reason}; sharing the stored tensors "
        "could give wrong numbers; load this checkpoint the ordinary way in each engine, or use "
        "one that is unquantised or fp8 with weight_block_size",
        where=where,
        method=method,
    )


def _doubt_about_fp8(config: Mapping[str, Any]) -> str:
    block = config.get("weight_block_size")
    if block is None:
        return "without weight_block_size its scales are fused and its weights requantised on load"
    if not _is_block_size(block):
        return f"weight_block_size must be two positive integers, not {_short(block)}"
    for key, wanted, why in _FP8_DEMANDS:
        value = config.get(key)
        if value not in (None, *wanted):
            return f"{key} is {_short(value)}: {why}"
    return ""


_FP8_DEMANDS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("activation_scheme", ("dynamic",), "the activation scales become numbers outside any tensor"),
    ("fmt", ("e4m3",), "only e4m3 weights are known to be used as they are stored"),
    ("dequantize", (False,), "the tensors an engine uses are then not the stored ones"),
    ("expert_dtype", ("fp8",), "packed experts are reordered for their kernel on load"),
)
"""Keys of the configuration, what they may be where present, why nothing else."""


def _is_block_size(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)
    )


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


_PREDICATES: dict[str, Predicate] = {"fp8": _doubt_about_fp8}

_REPACKED = "its tensors are repacked for a kernel after loading"
_STATEFUL = "part of its state lives in Python objects made while loading, not in tensors"
_SEVERAL = "it stands for several formats, of which some are converted while loading"
_NOT_KNOWN = "it is not known to need nothing but the stored tensors as they are"
_WHY_NOT: dict[str, str] = {
    "gptq": _REPACKED,
    "awq": _REPACKED,
    "auto-round": _REPACKED,
    "higgs": _REPACKED,
    "mxfp4": _REPACKED,
    "bitsandbytes": _STATEFUL,
    "hqq": _STATEFUL,
    "quanto": _STATEFUL,
    "torchao": _STATEFUL,
    "fbgemm_fp8": _STATEFUL,
    "compressed-tensors": _SEVERAL,
    "modelopt": _SEVERAL,
    "quark": _SEVERAL,
}
"""What is known to stand in the way, for methods people will ask about."""
