"""Numbers in another dtype: bit for bit what torch makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from broker.checkpoints.conversion import convert
from broker.weights import CONVERTIBLE

UNSIGNED: dict[str, type[np.unsignedinteger[Any]]] = {
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float32": np.uint32,
    "float64": np.uint64,
}
MANY = 200_000
_rng = np.random.default_rng(0)


def bits_to_try(dtype: str) -> npt.NDArray[Any]:
    """All of a dtype of 16 bits; else random bits, ordinary weights, NaNs, and every number that
    lies between two neighbours of the 16-bit dtypes, with what lies just beside it."""
    if UNSIGNED[dtype] is np.uint16:
        return np.arange(1 << 16, dtype=np.uint16)
    singles = single_bits()
    if dtype == "float32":
        return singles
    wide = torch.from_numpy(singles.view(np.float32)).double().numpy().view(np.uint64)
    return np.concatenate([wide, _rng.integers(0, 1 << 63, MANY, dtype=np.uint64)])


def single_bits() -> npt.NDArray[Any]:
    of_bfloat16 = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    # Thirteen bits of a float32 are too many for a float16, whose exponent counts from 112 less.
    of_float16 = (np.arange(1 << 15, dtype=np.uint32) << np.uint32(13)) + np.uint32(0x3800_1000)
    of_subnormals = np.ldexp(np.arange(4096, dtype=np.float32) + np.float32(0.5), -24)
    between = np.concatenate([of_bfloat16, of_float16, of_subnormals.view(np.uint32)])
    nans = np.uint32(0x7F80_0001) + np.arange(4096, dtype=np.uint32) * np.uint32(1023)
    weights = (_rng.standard_normal(MANY) * 10.0 ** _rng.integers(-8, 5, MANY)).astype(np.float32)
    noise = _rng.integers(0, 1 << 32, MANY, dtype=np.uint32)
    positive = np.concatenate([between, between + np.uint32(1), between - np.uint32(1), nans])
    both = np.concatenate([positive, positive ^ np.uint32(1 << 31)])
    return np.concatenate([both, weights.view(np.uint32), noise])


def torch_bits(bits: npt.NDArray[Any], stored: str, dtype: str) -> npt.NDArray[Any]:
    source = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, stored))
    return source.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(UNSIGNED[dtype])


@pytest.mark.parametrize(("stored", "dtype"), list(itertools.permutations(CONVERTIBLE, 2)))
def test_as_torch_does(stored: str, dtype: str) -> None:
    """Each bit of each number is torch's: rounding, subnormals, infinities, NaNs."""
    bits = bits_to_try(stored)
    written = np.full(len(bits), 0xA5, UNSIGNED[dtype])
    convert(bits.data.cast("B"), stored, written.data.cast("B"), dtype)
    expected = torch_bits(bits, stored, dtype)
    wrong = np.flatnonzero(written != expected)
    shown = [(hex(bits[n]), hex(expected[n]), hex(written[n])) for n in wrong[:5]]
    assert not wrong.size, f"{wrong.size} numbers differ: {shown}"


def test_numbers_at_odd_addresses() -> None:
    """A buffer of one byte more, read and written from its second byte on, gives the same."""
    bits = bits_to_try("float32")
    source = memoryview(b"." + bits.tobytes())[1:]
    written = memoryview(bytearray(1 + 2 * len(bits)))[1:]
    with np.errstate(all="raise"):  # nor does it disturb what the caller has set
        convert(source, "float32", written, "bfloat16")
    assert bytes(written) == torch_bits(bits, "float32", "bfloat16").tobytes()
