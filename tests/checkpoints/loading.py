"""Loading a checkpoint into a simulated slab within a test, without broker or client."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.plan import CheckpointPlan, plan_checkpoint
from broker.checkpoints.reading import LoadResult, load_pieces
from broker.devices.base import Segment, SlabWriter, StagingBuffer
from broker.devices.simulated import SimulatedDevice
from broker.weights import align_up, tensor_nbytes, validate_manifest
from broker.wire import Conversion


def quietly(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@dataclass
class Loaded:
    """A checkpoint in a slab: `memory` is a copy of it."""

    plan: CheckpointPlan
    result: LoadResult
    memory: bytes

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """torch dtype, torch shape and bytes of each tensor, as the manifest finds them."""
        found = {}
        for group in self.plan.manifest.groups:
            nbytes = tensor_nbytes(group.dtype, group.shape)
            for name, at in zip(group.names, group.offsets, strict=True):
                found[name] = (group.dtype, tuple(group.shape), self.memory[at : at + nbytes])
        return found


def plan_of(path: Path | str, conversion: Conversion | None = None) -> CheckpointPlan:
    with open_checkpoint(path) as checkpoint:
        return plan_checkpoint(checkpoint.folder, checkpoint.only, checkpoint.path, conversion)


def load(path: Path | str, *, threads: int = 2, conversion: Conversion | None = None) -> Loaded:
    """Plan and load; the slab is full of ones before, so that nothing is right by accident."""
    with open_checkpoint(path) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, checkpoint.only, checkpoint.path, conversion)
        result, memory = fill(plan, checkpoint.folder, threads)
        return Loaded(plan, result, memory)


def fill(
    plan: CheckpointPlan,
    folder: int,
    threads: int = 2,
    progress: Callable[[int, int], None] = quietly,
    wrap: Callable[[SlabWriter], SlabWriter] = lambda writer: writer,
) -> tuple[LoadResult, bytes]:
    device = SimulatedDevice()
    granularity = device.properties.granularity
    nbytes = max(align_up(plan.manifest.nbytes, granularity), granularity)
    validate_manifest(plan.manifest, nbytes)
    slab = device.create(nbytes)
    try:
        os.pwrite(slab, b"\xff" * nbytes, 0)
        with device.open_writer(slab, nbytes, buffers=threads) as writer:
            result = load_pieces(plan, folder, wrap(writer), threads, progress)
        return result, os.pread(slab, nbytes, 0)
    finally:
        os.close(slab)


class ObservedWriter(SlabWriter):
    """Passes everything on, and does something beside at the n-th piece."""

    def __init__(self, inner: SlabWriter, at: int, action: Callable[[], None]) -> None:
        self.inner = inner
        self._submitted = 0
        self._lock = threading.Lock()
        self._at = at
        self._action = action

    def buffer(self) -> StagingBuffer:
        return self.inner.buffer()

    def submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        with self._lock:
            self._submitted += 1
            number = self._submitted
        self.inner.submit(buffer, segments)
        if number == self._at:
            self._action()

    def close(self) -> None:
        self.inner.close()
