"""From a checkpoint's file to a slab: the loader beside memcpy, `load_file` and `dd`.

The bytes lie in tensors of 32 MiB in one file. Page cache warm (and warmed before every run) except
where it says cold. Everything but `dd` runs in this process, with as many threads on each side.
"""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoints import write_checkpoint
from benchmarks.common import MIB, Goal, Result, Spread, Table, at_least, main, spread, take_turns
from benchmarks.load_methods import BOTH_WAYS, THREADS, Load, Mapped, cases, load
from benchmarks.processes import folder
from broker.devices.base import PIECE_BYTES
from broker.devices.simulated import SimulatedDevice

TENSOR_BYTES = 32 * MIB
LARGEST_BYTES = 10**9
"""With more, fresh memory is what the host of a virtual machine has to give first."""


class Run(NamedTuple):
    """One run.

    Attributes:
        rate: GB/s.
        processor: processor seconds a GB, those of the kernel and of children included.
    """

    rate: float
    processor: float


Runs = dict[str, list[Run]]


# --- measuring -----------------------------------------------------------------------------------


def measure(quick: bool) -> Result:
    result = Result("load")
    count = (128 * MIB if quick else LARGEST_BYTES) // TENSOR_BYTES
    rounds, nbytes = 2 if quick else 9, count * TENSOR_BYTES
    with folder() as directory:
        tensors = [(f"layers.{at}.weight", "bfloat16", (4096, 4096)) for at in range(count)]
        path = write_checkpoint(directory / "m", tensors, random=True) / "model.safetensors"
        fresh = _warm_runs(path, nbytes, rounds, fresh=True)
        there = _warm_runs(path, nbytes, min(rounds, 7), fresh=False)
        cold = _cold_runs(path, nbytes, min(rounds, 7))
    size = f"{nbytes / 1e9:.2g} GB"
    result.tables += [
        _table(
            f"{size} into fresh memory, page cache warm", fresh, ("memcpy", "load_file and copy")
        ),
        _table(f"{size} into pages that are there, page cache warm", there, ("memcpy",)),
        _table(f"{size}, nothing in the page cache, into fresh memory", cold, ("dd iflag=direct",)),
        _floors(fresh, there),
    ]
    result.goals += [*_fresh_goals(fresh), *_there_goals(there), *_cold_goals(cold)]
    result.left_out.append(
        "copies to a GPU: there is none here; scripts/gpu_speed.py measures them"
    )
    result.figures = {
        name: {case: _median(runs, case) for case in runs}
        for name, runs in (("fresh", fresh), ("there", there), ("cold", cold))
    }
    return result


def _warm_runs(path: Path, nbytes: int, rounds: int, *, fresh: bool) -> Runs:
    """Each run into a slab of its own, or all into one whose pages and page tables are there."""
    room = nbytes + 16 * MIB
    device = SimulatedDevice()
    kept = device.create(room)
    with path.open("rb") as file:
        source = Mapped(file.fileno(), path.stat().st_size, mmap.PROT_READ, filled=True)
    target = None if fresh else Mapped(kept, room, BOTH_WAYS, filled=True)

    def run(fill: Load) -> Run:
        slab = device.create(room) if fresh else os.dup(kept)
        _warm(path)
        try:
            return _measured(partial(fill, slab), nbytes)
        finally:
            os.close(slab)

    try:
        fills = {name: partial(run, fill) for name, fill in cases(path, source, target).items()}
        return take_turns(fills, rounds)
    finally:
        os.close(kept)


def _cold_runs(path: Path, nbytes: int, rounds: int) -> Runs:
    device = SimulatedDevice()

    def ours(threads: int, *, digest: bool) -> Run:
        slab = device.create(nbytes + 16 * MIB)
        _forget(path)
        try:
            return _measured(partial(load, path.parent, threads, slab, digest=digest), nbytes)
        finally:
            os.close(slab)

    def theirs(threads: int) -> Run:
        _forget(path)
        return _measured(partial(_dd, path, threads), nbytes)

    fills: dict[str, Callable[[], Run]] = {}
    for threads in THREADS:
        fills[f"loader, {threads}"] = partial(ours, threads, digest=False)
        fills[f"loader, digest, {threads}"] = partial(ours, threads, digest=True)
        fills[f"dd iflag=direct, {threads}"] = partial(theirs, threads)
    return take_turns(fills, rounds)


def _measured(work: Callable[[], None], nbytes: int) -> Run:
    began, processor = time.perf_counter(), _processor_seconds()
    work()
    seconds = time.perf_counter() - began
    return Run(nbytes / seconds / 1e9, (_processor_seconds() - processor) / nbytes * 1e9)


def _processor_seconds() -> float:
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def _warm(path: Path) -> None:
    buffer = bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(path: Path) -> None:
    """Push the file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _dd(path: Path, streams: int) -> None:
    """So many at once, each a share of the file, in pieces of 1 MiB."""
    share = -(-path.stat().st_size // MIB // streams)
    command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct", "status=none"]
    running = [
        subprocess.Popen([*command, f"skip={number * share}", f"count={share}"])
        for number in range(streams)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("dd iflag=direct failed: the file system has no direct reads")


# --- telling -------------------------------------------------------------------------------------


def _table(title: str, runs: Runs, baselines: Sequence[str]) -> Table:
    beside = [f"x of {baseline}" for baseline in baselines]
    table = Table(title, ["threads last", "GB/s", "processor s/GB", *beside])
    for name in runs:
        threads = name.rpartition(", ")[2]
        ratios = [_ratio(runs, name, f"{other}, {threads}").median for other in baselines]
        processor = spread([run.processor for run in runs[name]]).median
        cells = [f"{ratio:.2f}" for ratio in ratios]
        table.add(name, f"{spread(_rates(runs, name)):.2f}", f"{processor:.2f}", *cells)
    table.notes.append(
        "Ratios are medians of the rounds' ratios, threads equal; the digest is BLAKE3."
    )
    return table


def _floors(fresh: Runs, there: Runs) -> Table:
    """What one thread cannot beat that reads and digests a byte, then writes it."""
    columns = ["one thread", "GB/s", "x of memcpy", "x of load_file and copy"]
    table = Table("Parts of the loader's work, each measured alone, one after the other", columns)
    for where, runs in (("fresh memory", fresh), ("pages that are there", there)):
        digest, write = _median(runs, "only digest, 1"), _median(runs, "only write, 1")
        for what, rate in (
            ("only write", write),
            ("digest, write", 1 / (1 / digest + 1 / write)),
            ("only digest", digest),
        ):
            others = (_median(runs, name) for name in ("memcpy, 1", "load_file and copy, 1"))
            table.add(f"{where}: {what}", f"{rate:.2f}", *(f"{rate / x:.2f}" for x in others))
    return table


def _rates(runs: Runs, name: str) -> list[float]:
    return [run.rate for run in runs[name]]


def _median(runs: Runs, name: str) -> float:
    return spread(_rates(runs, name)).median


def _ratio(runs: Runs, one: str, other: str) -> Spread:
    pairs = zip(_rates(runs, one), _rates(runs, other), strict=True)
    return spread([a / b for a, b in pairs])


def _goal(runs: Runs, bound: float, one: str, other: str, where: str) -> Goal:
    return at_least(bound, _ratio(runs, one, other).median, f"{where}: {one} beside {other}")


def _fresh_goals(runs: Runs) -> Iterator[Goal]:
    for words in ("", ", digest"):
        yield _goal(runs, 1.7, f"loader{words}, 1", "memcpy, 1", "fresh")
        yield _goal(runs, 2.2, f"loader{words}, 1", "load_file and copy, 1", "fresh")
        yield _goal(runs, 1.3, f"loader{words}, 2", "load_file and copy, 2", "fresh")


def _there_goals(runs: Runs) -> Iterator[Goal]:
    for threads in THREADS:
        for words, bound in (("", 0.88), (", digest", 0.6)):
            yield _goal(
                runs, bound, f"loader{words}, {threads}", f"memcpy, {threads}", "pages there"
            )


def _cold_goals(runs: Runs) -> Iterator[Goal]:
    for threads in THREADS:
        for words in ("", ", digest"):
            one, other = f"loader{words}, {threads}", f"dd iflag=direct, {threads}"
            yield _goal(runs, 1.0, one, other, "cold")


if __name__ == "__main__":
    main("load", measure)
