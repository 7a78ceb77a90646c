"""Ways to load that are compared must all have done the whole work."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from benchmarks.common import MIB
from benchmarks.load_methods import BOTH_WAYS, Mapped, cases
from broker.devices.simulated import SimulatedDevice

BYTES = 3 * MIB + 4096
ROOM = BYTES + MIB
NO_LOADS = ("only digest", "only write")
NEEDS_TORCH = ("load_file",)


@pytest.fixture
def slab() -> Iterator[int]:
    descriptor = SimulatedDevice().create(ROOM)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("there", [False, True])
def test_every_way_brings_every_byte(tmp_path: Path, slab: int, there: bool) -> None:
    """After each way that is called a load, the slab holds all bytes of the weights."""
    path = write_checkpoint(tmp_path, [("w", "uint8", (BYTES,))], random=True) / "model.safetensors"
    weights = path.read_bytes()[-BYTES:]
    with path.open("rb") as file:
        source = Mapped(file.fileno(), path.stat().st_size, mmap.PROT_READ, filled=True)
    target = Mapped(slab, ROOM, BOTH_WAYS, filled=True) if there else None
    ways = cases(path, source, target)
    loads = [name for name in ways if not name.startswith((*NO_LOADS, *NEEDS_TORCH))]
    assert len(loads) == (12 if there else 8)
    for name in loads:
        os.pwrite(slab, bytes(ROOM), 0)
        ways[name](slab)
        assert weights in os.pread(slab, ROOM, 0), name
