"""Floating-point numbers in another dtype than they are stored in. Needs numpy, no torch.

Every conversion rounds once, to nearest, ties to even, as `torch.Tensor.to` does for a contiguous
tensor on the CPU; from float64 to 16 bits it rounds twice, by way of float32, for torch does so too
(c10/util/BFloat16.h and Half.h take a float). Too large becomes infinite, and a NaN stays a NaN;
which of the many depends in torch itself on strides and processor, here it is what torch gives on
x86-64: tests/checkpoints/test_conversion.py compares bit by bit.

Integer arithmetic in place of numpy's own float16, which goes number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from broker.weights import ITEM_BYTES

Bits: TypeAlias = npt.NDArray[Any]

_BLOCK = 1 << 14
"""Numbers at a time: what is computed on the way stays in the core's cache, and in the heap."""

_u16, _u32, _f32 = np.uint16, np.uint32, np.float32

_QUIET_F32 = _u32(0x0040_0000)
_INF_F32 = _u32(0x7F80_0000)
_INF_F16 = _u32(0x7C00)
_QUIET_F16 = _u32(0x7E00)
_REBIAS = _u32((((15 - 127) << 23) + 0x0FFF) & 0xFFFF_FFFF)
"""Added to a float32's bits: the exponent as float16 counts it, and nearly half of what it cannot
hold; the lowest kept bit makes it half, so that ties go to even."""
_LEAST_NORMAL_F16 = _u32(0x3880_0000)
"""2**-14 as float32; below it float16 has a fixed step of 2**-24."""
_TOO_LARGE_F16 = _u32(0x477F_F000)
"""65520 as float32, from where on float16 rounds to infinity."""
_HALF = _f32(0.5)
"""Its neighbours in float32 are 2**-24 away: adding it rounds to float16's fixed step."""
_WIDEN = _f32(2.0**112)
"""Makes up for the exponent bias when a float16's bits are read as float32's."""
_NAN_BF16 = _u16(0x7FC0)
_NAN_BF16_VECTOR = _u16(0xFFFF)
"""What torch's vector code makes of a NaN of float32 or float64."""


def convert(source: memoryview, stored: str, target: memoryview, dtype: str) -> None:
    """Write numbers that are stored as one dtype into `target` as another.

    Args:
        source: whole numbers, at any address.
        stored, dtype: two different ones of float16, bfloat16, float32 and float64.
        target: writable, as many numbers.
    """
    read, write = _READ[stored], _WRITE[dtype]
    from_item, to_item = ITEM_BYTES[stored], ITEM_BYTES[dtype]
    with np.errstate(all="ignore"):  # overflow and NaN are results here
        for at in range(0, len(source) // from_item, _BLOCK):
            block = source[at * from_item : (at + _BLOCK) * from_item]
            write(read(block), stored, target[at * to_item : (at + _BLOCK) * to_item])


# --- reading: float64 as it is, everything else as float32, which holds it exactly ---------------


def _read_float16(source: memoryview) -> Bits:
    half = np.frombuffer(source, _u16)
    bits = (half & _u16(0x7FFF)).astype(_u32)
    bits <<= _u32(13)
    values = bits.view(_f32)
    values *= _WIDEN
    special = (half & _u16(0x7C00)) == _u16(0x7C00)
    if special.any():
        bits[special] |= _INF_F32
        bits[np.isnan(values)] |= _QUIET_F32
    bits |= (half & _u16(0x8000)).astype(_u32) << _u32(16)
    return values


def _read_bfloat16(source: memoryview) -> Bits:
    return (np.frombuffer(source, _u16).astype(_u32) << _u32(16)).view(_f32)


def _read_float32(source: memoryview) -> Bits:
    return np.frombuffer(source, _f32)


def _read_float64(source: memoryview) -> Bits:
    return np.frombuffer(source, np.float64)


# --- writing -------------------------------------------------------------------------------------


def _write_float64(values: Bits, stored: str, target: memoryview) -> None:  # noqa: ARG001
    np.frombuffer(target, np.float64)[:] = values


def _write_float32(values: Bits, stored: str, target: memoryview) -> None:  # noqa: ARG001
    np.frombuffer(target, _f32)[:] = values


def _write_float16(values: Bits, stored: str, target: memoryview) -> None:  # noqa: ARG001
    bits = values.astype(_f32, copy=False).view(_u32)
    size = bits & _u32(0x7FFF_FFFF)
    half = (size >> _u32(13)) & _u32(1)
    half += size
    half += _REBIAS
    half >>= _u32(13)
    small = size < _LEAST_NORMAL_F16
    if small.any():
        stepped = (size.view(_f32) + _HALF).view(_u32) - _HALF.view(_u32)
        np.copyto(half, stepped, where=small)
    large = size >= _TOO_LARGE_F16
    if large.any():
        half[large] = _INF_F16
        nans = size > _INF_F32
        half[nans] = _QUIET_F16 | ((size[nans] >> _u32(13)) & _u32(0x03FF))
    half |= (bits >> _u32(16)) & _u32(0x8000)
    np.frombuffer(target, _u16)[:] = half


def _write_bfloat16(values: Bits, stored: str, target: memoryview) -> None:
    single = values.astype(_f32, copy=False)
    bits = single.view(_u32)
    rounded = (bits >> _u32(16)) & _u32(1)
    rounded += bits
    rounded += _u32(0x7FFF)
    rounded >>= _u32(16)
    written = np.frombuffer(target, _u16)
    written[:] = rounded
    nans = np.isnan(single)
    if nans.any():
        written[nans] = _NAN_BF16 if stored == "float16" else _NAN_BF16_VECTOR


_READ: dict[str, Callable[[memoryview], Bits]] = {
    "float16": _read_float16,
    "bfloat16": _read_bfloat16,
    "float32": _read_float32,
    "float64": _read_float64,
}
_WRITE: dict[str, Callable[[Bits, str, memoryview], None]] = {
    "float16": _write_float16,
    "bfloat16": _write_bfloat16,
    "float32": _write_float32,
    "float64": _write_float64,
}
