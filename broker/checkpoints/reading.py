"""Reading a planned checkpoint: every byte once, digested on its way from the file to the slab.

Each thread takes the next piece, reads it into a staging buffer, digests its chunks while they are
still in the core's cache and hands the buffer to the device's writer. Nothing is staged as a whole
tensor, and nothing but the writer's ring is held, whatever the checkpoint's size. Which calls and
how many threads: docs/decisions/0001-how-bytes-reach-the-slab.md.

Imports neither zmq nor torch.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass

from broker.checkpoints.exact import read_exactly
from broker.checkpoints.faults import load_failed, quoted, told_of
from broker.checkpoints.files import open_regular
from broker.checkpoints.identity import (
    DIGEST_BYTES,
    Row,
    chunk_digest,
    content_identity,
    tensor_digest,
)
from broker.checkpoints.pieces import Piece, chunk_views, count_chunks
from broker.checkpoints.plan import CheckpointPlan
from broker.checkpoints.stability import require_unchanged
from broker.devices.base import (
    PIECE_BYTES,
    DeviceError,
    DeviceOutOfMemory,
    Segment,
    SlabWriter,
    StagingBuffer,
)
from broker.errors import OverBudget
from broker.wire import FileStamp

PROGRESS_SECONDS = 0.25
"""DESIGN section 3: at most four progress messages a second."""

_ZEROS = memoryview(bytes(PIECE_BYTES))

Progress = Callable[[int, int], None]
Convert = Callable[[memoryview, str, memoryview, str], None]


@dataclass(frozen=True)
class LoadResult:
    """What was read.

    Attributes:
        checkpoint: content identity, "blake3:…".
        stamps: of every file, the index first; as they were before, during and after reading.
        nbytes: bytes read.
    """

    checkpoint: str
    stamps: list[FileStamp]
    nbytes: int


def load_pieces(
    plan: CheckpointPlan, folder: int, writer: SlabWriter, threads: int, progress: Progress
) -> LoadResult:
    """Copy the planned weights into a slab of `plan.manifest.nbytes` or more, and digest them.

    Blocks until everything is read and submitted; the bytes have arrived when `writer.close`
    returns, which is the caller's to call. Give the writer at least one buffer a thread. `folder`
    is borrowed. `progress(done, total)` in bytes is called by this thread, four times a second at
    most, and once at the end; what it raises ends the load.

    Raises:
        LoadFailed: a file ended early ("truncated"), cannot be read ("unreadable"), is not what was
            planned with or did not stay so ("changed"); the device failed ("device").
        OverBudget: the device ran out of memory.
        The first error ends all threads. The slab's contents are then undefined.
    """
    with told_of(plan.path), ExitStack() as opened:
        descriptors = _open_files(plan, folder, opened)
        run = _Run(plan, descriptors, writer)
        run.finish(threads, progress)
        for descriptor, planned in zip(descriptors, plan.stamps, strict=True):
            require_unchanged(descriptor, planned)
    return LoadResult(_identity(plan, run.digests), plan.stamps, plan.total_bytes)


def hash_pieces(plan: CheckpointPlan, folder: int, threads: int, progress: Progress) -> LoadResult:
    """`load_pieces` without a slab: the same result, or the same errors, copying nothing."""
    return load_pieces(plan, folder, _Nowhere(threads), threads, progress)


def _open_files(plan: CheckpointPlan, folder: int, opened: ExitStack) -> list[int]:
    """Every file of the checkpoint, the index first, each still as it was planned with."""
    descriptors = []
    for planned in plan.stamps:
        descriptor = open_regular(folder, planned.name)
        opened.callback(os.close, descriptor)
        require_unchanged(descriptor, planned)
        # What is not in the page cache is then read ahead in larger steps (posix_fadvise(2)).
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        descriptors.append(descriptor)
    return descriptors


class _Run:
    """One pass over all pieces by several threads."""

    def __init__(self, plan: CheckpointPlan, descriptors: list[int], writer: SlabWriter) -> None:
        self.plan = plan
        self.digests = bytearray(DIGEST_BYTES * plan.layout.chunks)
        self._shards = descriptors[len(descriptors) - len(plan.shards) :]
        self._writer = writer
        self._taken = 0
        self._lock = threading.Lock()
        self._done = 0
        self._stopped = False
        self._convert = _conversion(plan)
        self._scratch = threading.local()

    def finish(self, threads: int, progress: Progress) -> None:
        """Read all pieces, or raise the first error once every thread has stopped."""
        total = self.plan.total_bytes
        with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
            pending = {pool.submit(self._work) for _ in range(threads)}
            try:
                while pending:
                    pending = _pending(pending)
                    progress(self._done, total)
            finally:
                self._stopped = True

    def _work(self) -> None:
        pieces = self.plan.pieces
        try:
            while not self._stopped and (number := self._take()) < len(pieces):
                self._copy(pieces[number])
                with self._lock:
                    self._done += pieces[number].nbytes
        except BaseException:
            self._stopped = True  # the others read no further piece in vain
            raise

    def _take(self) -> int:
        with self._lock:
            number = self._taken
            self._taken += 1
        return number

    def _copy(self, piece: Piece) -> None:
        buffer = self._writer.buffer()
        segments: list[Segment] = []
        try:
            self._read(piece, buffer.view)
            segments.append(Segment(0, piece.image, piece.slab))
        finally:
            self._submit(buffer, segments)

    def _read(self, piece: Piece, buffer: memoryview) -> None:
        views = chunk_views(self.plan.layout, piece, buffer)
        tensor = self.plan.layout.tensors[piece.tensor]
        if tensor.stored:
            scratch = self._room_for(piece.nbytes)
            self._read_file(piece, [scratch], tensor.name)
            self._convert(scratch, tensor.stored, views[0], tensor.dtype)
        else:
            if piece.image != piece.nbytes:
                # Slots are padded; what the buffer held before has no business in the padding.
                buffer[: piece.image] = _ZEROS[: piece.image]
            self._read_file(piece, views.copy(), tensor.name)
        start = DIGEST_BYTES * piece.chunk
        end = start + DIGEST_BYTES * piece.chunks
        self.digests[start:end] = b"".join(map(chunk_digest, views))

    def _read_file(self, piece: Piece, views: list[memoryview], tensor: str) -> None:
        file = self.plan.shards[piece.file].name
        read_exactly(self._shards[piece.file], views, piece.offset, file=file, tensor=tensor)

    def _room_for(self, nbytes: int) -> memoryview:
        """Memory of this thread for what is converted: the same each time, its pages are there."""
        held: memoryview | None = getattr(self._scratch, "memory", None)
        if held is None or len(held) < nbytes:
            held = self._scratch.memory = memoryview(bytearray(nbytes))
        return held[:nbytes]

    def _submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        try:
            self._writer.submit(buffer, segments)
        except DeviceOutOfMemory as error:
            needed = self.plan.manifest.nbytes
            raise OverBudget(
                f"the device ran out of memory while {quoted(self.plan.path)} was copied into it "
                f"({needed} bytes are needed; {error}); evict other weights or use a larger device",
                requested=needed,
            ) from error
        except DeviceError as error:
            raise load_failed(
                "device",
                f"copying {quoted(self.plan.path)} to the device failed: {error}",
                file=self.plan.path,
            ) from error


def _conversion(plan: CheckpointPlan) -> Convert:
    if not plan.converts:
        return _never
    from broker.checkpoints.conversion import convert  # imports numpy, which most loads need not

    return convert


def _never(_source: memoryview, stored: str, _target: memoryview, dtype: str) -> None:
    raise ValueError(f"a plan that converts nothing has a tensor from {stored} to {dtype}")


def _pending(futures: set[Future[None]]) -> set[Future[None]]:
    """Those that are not done after a moment. Raises what a thread has raised."""
    done, pending = wait(futures, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return pending


def _identity(plan: CheckpointPlan, digests: bytearray) -> str:
    ties: dict[str, list[tuple[str, int]]] = {}
    for tensor, twin in plan.shared:
        ties.setdefault(twin, [(twin, 0)]).append((tensor.name, 0))
    return content_identity(_rows(plan, digests, set(ties)), ties.values())


def _rows(plan: CheckpointPlan, digests: bytearray, twins: set[str]) -> Iterator[Row]:
    at = 0
    known: dict[str, bytes] = {}
    for tensor in plan.layout.tensors:
        end = at + DIGEST_BYTES * count_chunks(tensor.nbytes)
        digest = tensor_digest(bytes(digests[at:end]))
        if tensor.name in twins:
            known[tensor.name] = digest
        yield tensor.name, tensor.dtype, tensor.shape, digest
        at = end
    for tensor in plan.empty:
        yield tensor.name, tensor.dtype, tensor.shape, tensor_digest(b"")
    for tensor, twin in plan.shared:
        yield tensor.name, tensor.dtype, tensor.shape, known[twin]


class _HostBuffer(StagingBuffer):
    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE_BYTES))


class _Nowhere(SlabWriter):
    """A writer whose slab nobody wants: for reading that is only digested."""

    def __init__(self, buffers: int) -> None:
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(_HostBuffer())

    def buffer(self) -> StagingBuffer:
        return self._free.get()

    def submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:  # noqa: ARG002
        self._free.put(buffer)

    def close(self) -> None:
        """Nothing is held."""
