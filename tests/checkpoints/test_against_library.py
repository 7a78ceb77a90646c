"""Our header reading beside the library's: what we accept, it accepts, and both read it alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from broker.checkpoints.header import DTYPES, read_header
from broker.checkpoints.second_opinion import require_library_agrees
from broker.errors import LoadFailed
from tests.checkpoints.test_header import FAULTS
from tests.checkpoints.test_header_json import MUTATIONS, mutated
from tests.support.safetensors_files import (
    BITS,
    SINGLE,
    entries,
    entry,
    header_text,
    stored,
    write_file,
    write_raw,
)

STRICTER = {
    "header begins with a space": "the format's text says it must begin with a brace",
    "tensor twice": "the library keeps the last of two equal keys, other readers the first",
    "tensor twice, once escaped": "the same",
    "extra field twice": "the same; nothing is ever read from it, but the header is not sound",
    "metadata's key twice": "the same",
    "entry is a list": "the format's text says an object",
    "dtype torch has not got": "the tensor could not be handed to anybody",
    "dimension above int64": "torch cannot have such a shape",
    "zero times huge": "torch cannot have such strides; the other order the library refuses too",
    "too many dimensions": "torch's operators take 64",
    "rows of half bytes": "torch packs pairs along a row; the library's torch layer refuses it too",
}
"""Faults of test_header.py that the library accepts, and why we do not."""

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def ours(path: Path) -> Tensors | None:
    """The format's dtype, torch's shape and the bytes of each tensor; None if refused."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        tensors = read_header(descriptor, path.name).tensors
        return {
            t.name: (t.dtype, t.shape, os.pread(descriptor, t.nbytes, t.offset)) for t in tensors
        }
    except LoadFailed:
        return None
    finally:
        os.close(descriptor)


def theirs(path: Path) -> Tensors | None:
    """The same from the library's decoder."""
    try:
        found = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError:
        return None
    return {name: in_torch_words(info) for name, info in found}


def in_torch_words(info: dict[str, Any]) -> tuple[str, tuple[int, ...], bytes]:
    shape = tuple(info["shape"])
    if info["dtype"] == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    return DTYPES[info["dtype"]][0], shape, bytes(info["data"])


@pytest.mark.parametrize("what", FAULTS)
def test_the_library_refuses_the_same_faults(what: str, tmp_path: Path) -> None:
    """Each fault we refuse the library refuses too, except those listed with their reasons."""
    _, text, data = FAULTS[what]
    path = write_raw(tmp_path / SINGLE, text, data)
    try:
        deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        accepts = True
    except SafetensorError:
        accepts = False
    assert accepts == (what in STRICTER)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_sees_what_we_say(dtype: str, tmp_path: Path) -> None:
    """The library's torch tensors have the dtype, shape and bytes that our header announces."""
    tensor = stored("t", dtype, (2, 4))
    path = write_file(tmp_path / SINGLE, [tensor])
    read = ours(path)
    assert read is not None
    with safe_open(path, framework="pt") as opened:
        seen = opened.get_tensor("t")
    assert seen.dtype == getattr(torch, read["t"][0])
    assert tuple(seen.shape) == read["t"][1]
    assert bytes(seen.contiguous().view(torch.uint8).flatten().tolist()) == read["t"][2]


def test_no_dtype_is_forgotten() -> None:
    """Of all dtypes of the format only those that torch lacks are missing."""
    assert set(BITS) - set(DTYPES) == {"F6_E2M3", "F6_E3M2"}


WELL_FORMED = [
    stored("a", shape=(2, 2)),
    stored("b.weight", "BF16", (3,)),
    stored("e", "F16", (0, 2)),
    stored("p", "F4", (2, 2)),
    stored("s", "I64", ()),
]
DATA = b"".join(tensor.data for tensor in WELL_FORMED)


@pytest.mark.parametrize("metadata", [None, "null", "{}", '{"format":"pt"}'])
def test_well_formed_files_are_read_alike(metadata: str | None, tmp_path: Path) -> None:
    """Names, dtypes, shapes and bytes are the library's."""
    path = write_file(tmp_path / SINGLE, WELL_FORMED, metadata)
    read = ours(path)
    assert read is not None
    assert read == theirs(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=3), extra=st.integers(-2, 2))
def test_what_we_accept_the_library_reads_alike(
    mutations: list[tuple[str, int, int]], extra: int, tmp_path: Path
) -> None:
    """A damaged header is refused with the documented error, or read as the library reads it."""
    text = mutated(header_text(entries(WELL_FORMED), '{"format":"pt"}'), mutations)
    data = (DATA + b"xx")[: len(DATA) + extra]
    path = write_raw(tmp_path / SINGLE, text, data)
    read = ours(path)
    if read is not None:
        assert read == theirs(path)


VALUES = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 1e3, 0.0, -0.0, True]),
    st.none(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([*BITS, "Q8", "f32"]),
    shape=st.lists(VALUES, max_size=4),
    begin=VALUES,
    end=VALUES,
    data=st.binary(max_size=32),
)
def test_any_shape_and_offsets(
    dtype: str, shape: list[object], begin: object, end: object, data: bytes, tmp_path: Path
) -> None:
    """Whatever dtype, shape and offsets claim, what we accept the library reads alike."""
    text = header_text([("w", entry(dtype, shape, begin, end))])
    path = write_raw(tmp_path / SINGLE, text, data)
    read = ours(path)
    if read is not None:
        assert read == theirs(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_any_well_formed_file(kinds: list[tuple[str, list[int]]], tmp_path: Path) -> None:
    """Every file of known dtypes and whole bytes in each row is accepted and read alike."""
    tensors = [
        stored(f"t{number}", dtype, (*shape, 2) if dtype == "F4" else shape)
        for number, (dtype, shape) in enumerate(kinds)
    ]
    path = write_file(tmp_path / SINGLE, tensors)
    read = ours(path)
    assert read is not None
    assert read == theirs(path)


def test_second_opinion_of_a_sound_file(tmp_path: Path) -> None:
    """The library says nothing of a file it can read."""
    path = write_file(tmp_path / SINGLE, WELL_FORMED)
    with path.open("rb") as file:
        require_library_agrees(file.fileno(), SINGLE)


def test_second_opinion_of_a_fault(tmp_path: Path) -> None:
    """What the library refuses is refused with its words and the file's name."""
    path = write_raw(tmp_path / SINGLE, b'{"w":1}')
    with path.open("rb") as file, pytest.raises(LoadFailed, match="library refuses") as caught:
        require_library_agrees(file.fileno(), SINGLE)
    assert caught.value.reason == "not_safetensors"
    assert caught.value.file == SINGLE


def test_second_opinion_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library needs numpy only after it has checked a header, so it checks without it."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    sound = write_file(tmp_path / SINGLE, WELL_FORMED)
    with sound.open("rb") as file:
        require_library_agrees(file.fileno(), SINGLE)
    fault = write_raw(tmp_path / "other.safetensors", b'{"w":1}')
    with fault.open("rb") as file, pytest.raises(LoadFailed):
        require_library_agrees(file.fileno(), SINGLE)


def test_second_opinion_costs_no_numpy(tmp_path: Path) -> None:
    """The library's check imports no numpy, and whoever wants it later can."""
    path = write_file(tmp_path / SINGLE, WELL_FORMED)
    script = (
        "import os, sys\n"
        "from broker.checkpoints.second_opinion import require_library_agrees\n"
        f"require_library_agrees(os.open({str(path)!r}, os.O_RDONLY), 'f')\n"
        "print('numpy' in sys.modules)\n"
        "import numpy\n"
        "print(numpy.arange(3).sum())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == ["False", "3"]
