"""From a checkpoint's file to a slab: the loader beside memcpy, `load_file` and `dd`.

The bytes lie in tensors of 32 MiB in one file. Page cache warm (and warmed before every run) except
where it says cold. Everything runs in this process, with as many threads on each side.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy
from blake3 import blake3

from benchmarks.checkpoints import write_checkpoint
from benchmarks.common import (
    GIB,
    MIB,
    Goal,
    Result,
    Spread,
    Table,
    at_least,
    main,
    spread,
    take_turns,
)
from benchmarks.processes import folder
from broker.checkpoints import reading
from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.plan import plan_checkpoint
from broker.devices.base import PIECE_BYTES
from broker.devices.simulated import SimulatedDevice
from broker.loader.checkpoint import RING_BUFFERS_PER_THREAD

TENSOR_BYTES = 32 * MIB
PIECE = MIB
THREADS = (1, 2)
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
Load = Callable[[int], None]
"""Fills the slab of this descriptor."""
Rates = dict[str, list[float]]
"""GB/s of every run."""


# --- ways to load --------------------------------------------------------------------------------


def load(folder_: Path, threads: int, slab: int, *, digest: bool = True) -> None:
    """A loader process's own work, planning included; without a digest, as none ever does it."""
    undigested = mock.patch.object(reading, "chunk_digest", return_value=bytes(32))
    with open_checkpoint(str(folder_)) as opened:
        plan = plan_checkpoint(opened.folder, None, opened.path)
        buffers = RING_BUFFERS_PER_THREAD * threads
        device = SimulatedDevice()
        with device.open_writer(slab, plan.manifest.nbytes, buffers=buffers) as writer:
            arguments = (plan, opened.folder, writer, threads, lambda _done, _total: None)
            if digest:
                reading.load_pieces(*arguments)
            else:
                with undigested:
                    reading.load_pieces(*arguments)


class Mapped:
    """Memory mapped from a file or slab, its page tables filled in: the least that memcpy can cost.

    Not closed: what is read through it may not be gone before the process is.
    """

    def __init__(self, descriptor: int, nbytes: int, protection: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.view = memoryview(mmap.mmap(descriptor, nbytes, flags, protection))
        self.address = int(numpy.frombuffer(self.view, dtype=numpy.uint8).ctypes.data)


def copy_mapped(
    source: Mapped, target: Mapped | None, threads: int, slab: int, *, digest: bool
) -> None:
    """memcpy from mapped file to mapped slab, in pieces, each digested before.

    Args:
        target: None: mapped now, and its page tables are filled in as it is written.
    """
    size = len(source.view)
    fresh = None if target is not None else mmap.mmap(slab, size)
    at = target.address if target is not None else _address(fresh)

    def work(first: int) -> None:
        for start in range(first * PIECE, size, threads * PIECE):
            piece = source.view[start : start + PIECE]
            if digest:
                blake3(piece).digest()
            _memmove(at + start, source.address + start, len(piece))

    _in_threads(work, threads)
    if fresh is not None:
        fresh.close()


def _address(mapping: mmap.mmap | None) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))  # type: ignore[arg-type]


def _in_threads(work: Callable[[int], None], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, range(threads)):
            pass


def load_file_and_copy(path: Path, threads: int, slab: int) -> None:
    """What an engine would do to fill shared memory: `load_file`, then each tensor's `copy_`."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(threads)
    target = torch.frombuffer(mmap.mmap(slab, os.fstat(slab).st_size), dtype=torch.uint8)
    at = 0
    for tensor in load_file(path).values():
        target[at : at + tensor.nbytes].copy_(tensor.view(torch.uint8).view(-1))
        at += tensor.nbytes


def digest_only(folder_: Path, threads: int, _slab: int) -> None:
    """What a loader does to find out whether the bytes are resident already."""
    with open_checkpoint(str(folder_)) as opened:
        plan = plan_checkpoint(opened.folder, None, opened.path)
        reading.hash_pieces(plan, opened.folder, threads, lambda _done, _total: None)


def cases(path: Path, source: Mapped, target: Mapped | None) -> dict[str, Load]:
    table: dict[str, Load] = {}
    for threads in THREADS:
        for digest in (False, True):
            words = ", digest" if digest else ""
            table[f"loader{words}, {threads}"] = partial(load, path.parent, threads, digest=digest)
            table[f"memcpy{words}, {threads}"] = partial(
                copy_mapped, source, target, threads, digest=digest
            )
        table[f"load_file and copy, {threads}"] = partial(load_file_and_copy, path, threads)
        table[f"loader, only digest, {threads}"] = partial(digest_only, path.parent, threads)
    return table


# --- measuring -----------------------------------------------------------------------------------


def measure(quick: bool) -> Result:
    result = Result("load")
    nbytes = 128 * MIB if quick else GIB
    rounds = 2 if quick else 9
    with folder() as directory:
        count = nbytes // TENSOR_BYTES
        tensors = [(f"layers.{at}.weight", "bfloat16", (4096, 4096)) for at in range(count)]
        path = write_checkpoint(directory / "m", tensors, random=True) / "model.safetensors"
        fresh = _rates(path, nbytes, rounds, fresh=True)
        there = _rates(path, nbytes, min(rounds, 7), fresh=False)
        cold = _cold(path, nbytes, min(rounds, 7))
    size = f"{nbytes / GIB:.3g} GiB"
    result.tables += [
        _table(f"{size} into fresh memory, page cache warm", fresh, "memcpy"),
        _table(f"{size} into pages that are there, page cache warm", there, "memcpy"),
        _table(f"{size}, nothing in the page cache, into fresh memory", cold, "dd iflag=direct"),
    ]
    result.goals += [*_fresh_goals(fresh), *_there_goals(there), *_cold_goals(cold)]
    result.left_out.append(
        "copies to a GPU: there is none here; scripts/gpu_speed.py measures them"
    )
    result.figures = {
        name: {case: spread(rates).median for case, rates in runs.items()}
        for name, runs in (("fresh", fresh), ("there", there), ("cold", cold))
    }
    return result


def _rates(path: Path, nbytes: int, rounds: int, *, fresh: bool) -> Rates:
    device = SimulatedDevice()
    room = nbytes + 16 * MIB
    kept = device.create(room)
    with path.open("rb") as file:
        source = Mapped(file.fileno(), path.stat().st_size, mmap.PROT_READ)
    target = None if fresh else Mapped(kept, room, mmap.PROT_READ | mmap.PROT_WRITE)

    def run(fill: Load) -> float:
        _warm(path)
        slab = device.create(room) if fresh else kept
        rate = _timed(fill, slab, nbytes)
        if fresh:
            os.close(slab)
        return rate

    try:
        fills = {name: partial(run, fill) for name, fill in cases(path, source, target).items()}
        return take_turns(fills, rounds)
    finally:
        os.close(kept)


def _timed(fill: Load, slab: int, nbytes: int) -> float:
    began = time.perf_counter()
    fill(slab)
    return nbytes / (time.perf_counter() - began) / 1e9


def _warm(path: Path) -> None:
    buffer = bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _cold(path: Path, nbytes: int, rounds: int) -> Rates:
    device = SimulatedDevice()

    def ours(threads: int, *, digest: bool) -> float:
        slab = device.create(nbytes + 16 * MIB)
        _forget(path)
        rate = _timed(partial(load, path.parent, threads, digest=digest), slab, nbytes)
        os.close(slab)
        return rate

    fills: dict[str, Callable[[], float]] = {}
    for threads in THREADS:
        fills[f"loader, {threads}"] = partial(ours, threads, digest=False)
        fills[f"loader, digest, {threads}"] = partial(ours, threads, digest=True)
        fills[f"dd iflag=direct, {threads}"] = partial(_dd, path, threads, nbytes)
    return take_turns(fills, rounds)


def _forget(path: Path) -> None:
    """Push the file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _dd(path: Path, streams: int, nbytes: int) -> float:
    """So many at once, each a share of the file, in pieces of 1 MiB."""
    _forget(path)
    pieces = nbytes // MIB // streams
    command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct", "status=none"]
    began = time.perf_counter()
    running = [
        subprocess.Popen([*command, f"skip={number * pieces}", f"count={pieces}"])
        for number in range(streams)
    ]
    codes = [process.wait() for process in running]
    seconds = time.perf_counter() - began
    if any(codes):
        raise RuntimeError("dd iflag=direct failed: the file system has no direct reads")
    return nbytes / seconds / 1e9


# --- telling -------------------------------------------------------------------------------------


def _table(title: str, runs: Rates, baseline: str) -> Table:
    table = Table(title, ["threads last", "GB/s", f"x of {baseline}, equal threads"])
    for name, rates in runs.items():
        threads = name.rpartition(", ")[2]
        beside = _ratio(runs, name, f"{baseline}, {threads}")
        table.add(name, f"{spread(rates):.2f}", f"{beside.median:.2f}")
    table.notes.append("Ratios are medians of the rounds' ratios; the digest is BLAKE3.")
    return table


def _ratio(runs: Rates, one: str, other: str) -> Spread:
    return spread([a / b for a, b in zip(runs[one], runs[other], strict=True)])


def _goal(runs: Rates, bound: float, one: str, other: str, where: str) -> Goal:
    return at_least(bound, _ratio(runs, one, other).median, f"{where}: {one} beside {other}")


def _fresh_goals(runs: Rates) -> Iterator[Goal]:
    for words in ("", ", digest"):
        yield _goal(runs, 1.7, f"loader{words}, 1", "memcpy, 1", "fresh")
        yield _goal(runs, 2.2, f"loader{words}, 1", "load_file and copy, 1", "fresh")
        yield _goal(runs, 1.3, f"loader{words}, 2", "load_file and copy, 2", "fresh")


def _there_goals(runs: Rates) -> Iterator[Goal]:
    for threads in THREADS:
        for words, bound in (("", 0.88), (", digest", 0.6)):
            yield _goal(
                runs, bound, f"loader{words}, {threads}", f"memcpy, {threads}", "pages there"
            )


def _cold_goals(runs: Rates) -> Iterator[Goal]:
    for threads in THREADS:
        for words in ("", ", digest"):
            one, other = f"loader{words}, {threads}", f"dd iflag=direct, {threads}"
            yield _goal(runs, 1.0, one, other, "cold")


if __name__ == "__main__":
    main("load", measure)
