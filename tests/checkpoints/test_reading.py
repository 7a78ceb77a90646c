"""Reading a planned checkpoint, with everything that can go wrong on the way."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from broker.checkpoints.exact import read_exactly
from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.identity import stamp_files
from broker.checkpoints.plan import plan_checkpoint
from broker.checkpoints.reading import LoadResult, hash_pieces, load_pieces
from broker.devices.base import (
    PIECE_BYTES,
    DeviceError,
    DeviceOutOfMemory,
    Segment,
    SlabWriter,
    StagingBuffer,
)
from broker.errors import LoadFailed, OverBudget
from tests.checkpoints.loading import ObservedWriter, fill, load, quietly
from tests.support.safetensors_files import (
    INDEX,
    SINGLE,
    shard_name,
    stored,
    write_file,
    write_index,
    write_shards,
)

BIG = stored("big", "U8", (3 * PIECE_BYTES + 7,))
TENSORS = [stored("first"), BIG, *(stored(f"t{n}", "BF16", (3,)) for n in range(3000)), stored("z")]


def load_with(
    folder: Path,
    action: Callable[[], None],
    *,
    at: int = 1,
    threads: int = 1,
    progress: Callable[[int, int], None] = quietly,
) -> LoadResult:
    """Plan, then load while `action` happens after the `at`-th piece."""
    with open_checkpoint(folder) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, checkpoint.only, checkpoint.path)
        result, _ = fill(
            plan, checkpoint.folder, threads, progress, lambda w: ObservedWriter(w, at, action)
        )
        return result


def fail(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_arrives(threads: int, tmp_path: Path) -> None:
    """Tensors larger and smaller than a piece arrive whole, by any number of threads."""
    write_file(tmp_path / SINGLE, TENSORS)
    loaded = load(tmp_path, threads=threads)
    assert {name: data for name, (_, _, data) in loaded.tensors().items()} == {
        tensor.name: tensor.data for tensor in TENSORS
    }
    assert loaded.result.nbytes == sum(len(tensor.data) for tensor in TENSORS)


def test_padding_between_slots_is_zero(tmp_path: Path) -> None:
    """Within a piece, no byte of an earlier piece is left in the padding."""
    tensors = [BIG, *(stored(f"t{n}", "U8", (5,)) for n in range(100))]
    loaded = load(write_file(tmp_path / SINGLE, tensors))
    start, end = len(BIG.data), loaded.plan.manifest.nbytes
    used = sum(len(tensor.data) for tensor in tensors[1:])
    assert loaded.memory[start:end].count(0) >= end - start - used


def test_stamps_are_those_of_the_client(tmp_path: Path) -> None:
    """What the loader records is what an engine finds by itself."""
    write_shards(tmp_path, [[stored("a")], [stored("b")]])
    result = load(tmp_path).result
    with open_checkpoint(tmp_path) as checkpoint:
        assert stamp_files(checkpoint.folder, checkpoint.files, checkpoint.path) == result.stamps
    assert result.stamps[0].name == INDEX


def test_hashing_finds_what_loading_finds(tmp_path: Path) -> None:
    """Without a slab: the same identity, stamps and bytes read."""
    write_file(tmp_path / SINGLE, TENSORS)
    loaded = load(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert hash_pieces(loaded.plan, checkpoint.folder, 2, quietly) == loaded.result


def test_tensors_left_out_are_not_read(tmp_path: Path) -> None:
    """Where the index takes a tensor from another shard, its bytes here are skipped."""
    one, two = shard_name(1, 2), shard_name(2, 2)
    write_shards(tmp_path, [[stored("a"), BIG, stored("c")], [stored("big", seed=3)]])
    write_index(tmp_path, {"a": one, "c": one, "big": two})
    loaded = load(tmp_path)
    assert loaded.result.nbytes == 48
    assert loaded.tensors()["c"][2] == stored("c").data
    assert loaded.tensors()["big"][2] == stored("big", seed=3).data


# --- progress -----------------------------------------------------------------------------------


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress is told by the calling thread, grows, and ends with everything."""
    write_file(tmp_path / SINGLE, TENSORS)
    told: list[tuple[int, int, int]] = []
    load_with(tmp_path, lambda: None, progress=lambda *p: told.append((*p, threading.get_ident())))
    total = sum(len(tensor.data) for tensor in TENSORS)
    assert told[-1] == (total, total, threading.get_ident())
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {ident for _, _, ident in told} == {threading.get_ident()}


def test_progress_is_told_while_a_piece_is_slow(tmp_path: Path) -> None:
    """A device that takes its time does not silence the progress."""
    write_file(tmp_path / SINGLE, TENSORS)
    told = threading.Event()

    def progress(done: int, total: int) -> None:
        if done < total:
            told.set()

    load_with(tmp_path, lambda: _require(told.wait(20)), progress=progress)
    assert told.is_set()


def _require(happened: bool) -> None:
    if not happened:
        raise TimeoutError("no progress was told")


def test_an_error_of_progress_ends_the_load(tmp_path: Path) -> None:
    """A load whose listener is gone stops, and the error is the listener's."""
    write_file(tmp_path / SINGLE, TENSORS)

    def progress(done: int, total: int) -> None:
        raise ConnectionError("nobody listens")

    with pytest.raises(ConnectionError, match="nobody listens"):
        load_with(tmp_path, lambda: None, threads=2, progress=progress)


# --- faults -------------------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    """Other bytes in place, size and mtime as before: only ctime tells."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"new!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [overwrite, replace, append, Path.unlink])
@pytest.mark.parametrize("name", [shard_name(1, 2), shard_name(2, 2), INDEX])
def test_a_file_that_changes_meanwhile(
    name: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    """A file written or replaced during the load fails it, whichever file it is."""
    write_shards(tmp_path, [TENSORS[:2], TENSORS[2:]])
    with pytest.raises(LoadFailed) as caught:
        load_with(tmp_path, lambda: change(tmp_path / name))
    assert caught.value.reason == "changed"
    assert caught.value.file == name
    assert str(tmp_path) in caught.value.sentence


@pytest.mark.parametrize("change", [overwrite, replace, append])
def test_a_file_that_changes_between_plan_and_load(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    """What is loaded is what was planned with."""
    path = write_file(tmp_path / SINGLE, TENSORS)
    with open_checkpoint(tmp_path) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, checkpoint.only, checkpoint.path)
        change(path)
        with pytest.raises(LoadFailed) as caught:
            hash_pieces(plan, checkpoint.folder, 1, quietly)
    assert caught.value.reason == "changed"


def test_a_file_that_vanishes_between_plan_and_load(tmp_path: Path) -> None:
    """A file removed in between is missing."""
    path = write_file(tmp_path / SINGLE, TENSORS)
    with open_checkpoint(tmp_path) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, checkpoint.only, checkpoint.path)
        path.unlink()
        with pytest.raises(LoadFailed) as caught:
            hash_pieces(plan, checkpoint.folder, 1, quietly)
    assert caught.value.reason == "missing_shard"


def test_a_file_cut_short_meanwhile(tmp_path: Path) -> None:
    """A file truncated while it is read fails the load by file and tensor, with no SIGBUS."""
    path = write_file(tmp_path / SINGLE, TENSORS)
    with pytest.raises(LoadFailed) as caught:
        load_with(tmp_path, lambda: os.truncate(path, 300_000))
    assert caught.value.reason == "truncated"
    assert (caught.value.file, caught.value.tensor) == (SINGLE, "big")


class FailingDisk:
    """Reads nothing: the system says why."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls = 0

    def preadv(self, *arguments: object) -> int:
        self.calls += 1
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_failing_disk(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input error names file, tensor and the system's words; other threads stop at once."""
    write_file(tmp_path / SINGLE, [stored(f"t{n}", "U8", (PIECE_BYTES,)) for n in range(20)])
    disk = FailingDisk(code)
    monkeypatch.setattr(os, "preadv", disk.preadv)
    with pytest.raises(LoadFailed) as caught:
        load(tmp_path, threads=2)
    assert caught.value.reason == "unreadable"
    assert caught.value.file == SINGLE
    assert os.strerror(code) in caught.value.sentence
    assert disk.calls <= 2


class MeanDisk:
    """Reads a few bytes at a time, as some network file systems do."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._preadv = os.preadv

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        left, some = self._nbytes, []
        for view in views:
            some.append(view[:left])
            left -= len(some[-1])
            if not left:
                break
        return self._preadv(descriptor, some, offset)


@pytest.mark.parametrize("nbytes", [1, 5, 16, 1000])
def test_short_reads_are_continued(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes a read returns, every byte finds its place."""
    tensors = [stored(f"t{n}", "U8", (n + 1,)) for n in range(40)]
    write_file(tmp_path / SINGLE, tensors)
    monkeypatch.setattr(os, "preadv", MeanDisk(nbytes).preadv)
    found = load(tmp_path).tensors()
    assert {name: data for name, (_, _, data) in found.items()} == {
        tensor.name: tensor.data for tensor in tensors
    }


def test_more_views_than_one_call_takes(tmp_path: Path) -> None:
    """preadv takes 1,024 buffers; the rest is read by further calls."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 20)
    buffer = bytearray(5120)
    views = [memoryview(buffer)[at : at + 1] for at in range(5120)]
    with path.open("rb") as file:
        read_exactly(file.fileno(), views, 0, file="file", tensor="t")
    assert buffer == path.read_bytes()


def test_a_device_out_of_memory(tmp_path: Path) -> None:
    """Running out of device memory is over-budget, with what was needed."""
    write_file(tmp_path / SINGLE, TENSORS)
    with pytest.raises(OverBudget, match="out of memory") as caught:
        load_with(tmp_path, fail(DeviceOutOfMemory("no pages left")), threads=2)
    assert caught.value.requested > len(BIG.data)
    assert "no pages left" in caught.value.sentence


def test_a_device_that_fails(tmp_path: Path) -> None:
    """Another failure of the device is told with the device's words."""
    write_file(tmp_path / SINGLE, TENSORS)
    with pytest.raises(LoadFailed, match="lost its mind") as caught:
        load_with(tmp_path, fail(DeviceError("cuMemcpy: lost its mind")), threads=2)
    assert caught.value.reason == "device"


class CountingWriter(SlabWriter):
    """A ring that knows how many of its buffers are out, and refuses the second piece."""

    def __init__(self, buffers: int) -> None:
        self._free = threading.Semaphore(buffers)
        self._lock = threading.Lock()
        self.out = 0
        self.pieces = 0

    def buffer(self) -> StagingBuffer:
        self._free.acquire()
        with self._lock:
            self.out += 1
        buffer = StagingBuffer()
        buffer.view = memoryview(bytearray(PIECE_BYTES))
        return buffer

    def submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        with self._lock:
            self.out -= 1
            self.pieces += 1
            refused = self.pieces == 2
        self._free.release()
        if refused:
            raise DeviceError("second piece refused")

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("buffers", [1, 4])
def test_every_buffer_comes_back(buffers: int, tmp_path: Path) -> None:
    """After an error no buffer is kept, and no thread waits for one."""
    write_file(tmp_path / SINGLE, [stored(f"t{n}", "U8", (PIECE_BYTES,)) for n in range(30)])
    writer = CountingWriter(buffers)
    with open_checkpoint(tmp_path) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, checkpoint.only, checkpoint.path)
        with pytest.raises(LoadFailed):
            load_pieces(plan, checkpoint.folder, writer, 4, quietly)
    assert writer.out == 0


def test_nothing_is_left_open(tmp_path: Path) -> None:
    """Descriptors are closed after a load that failed as after one that did not."""
    write_shards(tmp_path, [TENSORS[:2], TENSORS[2:]])
    before = len(list(Path("/proc/self/fd").iterdir()))
    load(tmp_path)
    with pytest.raises(LoadFailed):
        load_with(tmp_path, fail(DeviceError("x")))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
