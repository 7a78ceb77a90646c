"""How costs grow: exponents fitted over tensors, bytes, engines and sets.

An exponent is the slope of a straight line through the logarithms of medians: 1 is in proportion,
0 does not grow at all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from benchmarks.attach import total
from benchmarks.attach_methods import MODULE as METHODS
from benchmarks.attach_methods import Times
from benchmarks.checkpoints import equal_tensors, write_checkpoint
from benchmarks.common import GIB, MIB, Result, Table, at_most, main, spread, take_turns
from benchmarks.fanout import Node, attach_rounds
from benchmarks.load_methods import load
from benchmarks.processes import Broker, Worker, folder, memory_of, work
from broker.devices.simulated import SimulatedDevice
from broker.weights import WeightKey
from engine_client import Checkpoint, EngineClient

MODULE = "benchmarks.growth"
TENSORS = (1000, 3162, 10_000, 31_623, 100_000)
TENSOR_BYTES = 512
BYTES = (64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, GIB)
LOAD_TENSOR_BYTES = 4 * MIB
ENGINES = (4, 8, 16, 32, 64)
SETS = (100, 316, 1000, 3162)
SIZES = (16 * MIB, 128 * MIB, GIB)
OTHERS = (1, 10, 100, 1000)
MOST = 1.05
NOTHING = 0.1
"""An exponent up to this counts as constant: twice as much of the one, 7 % more of the other."""
Points = Mapping[int, float]


def exponent(points: Points) -> float:
    """The slope of log(seconds) over log(size)."""
    sizes, values = numpy.log(list(points)), numpy.log(list(points.values()))
    return float(numpy.polyfit(sizes, values, 1)[0])


# --- what grows ----------------------------------------------------------------------------------


def attach_by_tensors(rounds: int, counts: tuple[int, ...]) -> Points:
    """Seconds to map and bind."""
    return _attached(
        {count: equal_tensors(count, count * TENSOR_BYTES) for count in counts}, rounds
    )


def attach_by_bytes(rounds: int, sizes: tuple[int, ...]) -> Points:
    """Seconds to map and bind 1,000 tensors of so many bytes in all."""
    return _attached({size: equal_tensors(1000, size) for size in sizes}, rounds)


def _attached(checkpoints: dict[int, Any], rounds: int) -> Points:
    with folder() as directory, ExitStack() as opened:
        opened.enter_context(Broker(directory))
        cases: dict[str, Callable[[], Times]] = {}
        for size, tensors in checkpoints.items():
            checkpoint = write_checkpoint(directory / str(size), tensors)
            with EngineClient("simulated", directory=directory) as client:
                client.acquire(Checkpoint(checkpoint)).release()
            worker = opened.enter_context(Worker(METHODS, "ours", str(checkpoint), str(directory)))
            cases[str(size)] = partial(worker.ask, "attach", bind=True)
        runs = take_turns(cases, rounds)
    return {int(size): total(times).median for size, times in runs.items()}


def load_by_tensors(rounds: int, counts: tuple[int, ...]) -> Points:
    """Processor seconds to plan, read and digest tensors of 512 bytes into a fresh slab."""
    return _loaded({count: equal_tensors(count, count * TENSOR_BYTES) for count in counts}, rounds)


def load_by_bytes(rounds: int, sizes: tuple[int, ...]) -> Points:
    """The same, tensors of 4 MiB."""
    return _loaded({s: equal_tensors(s // LOAD_TENSOR_BYTES, s) for s in sizes}, rounds)


def _loaded(checkpoints: dict[int, Any], rounds: int) -> Points:
    with folder() as directory:
        cases = {
            str(size): partial(_load, write_checkpoint(directory / str(size), tensors))
            for size, tensors in checkpoints.items()
        }
        runs = take_turns(cases, rounds)
    return {int(size): spread(seconds).median for size, seconds in runs.items()}


def _load(checkpoint: Path) -> float:
    device = SimulatedDevice()
    size = (checkpoint / "model.safetensors").stat().st_size
    slab = device.create(2 * size // 4096 * 4096 + 16 * MIB)
    began = time.process_time()
    load(checkpoint, 1, slab)
    seconds = time.process_time() - began
    os.close(slab)
    return seconds


def last_by_engines(rounds: int, counts: tuple[int, ...]) -> Points:
    """Seconds until the last of so many engines that begin at once has mapped."""
    points = {}
    with ExitStack() as opened:
        node = Node(opened, 64 * MIB)
        workers = node.workers("plain", max(counts))
        for count in counts:
            runs = attach_rounds(node, workers[:count], rounds)
            points[count] = spread([run["last"] for run in runs]).median
    return points


def attach_by_others(rounds: int, counts: tuple[int, ...]) -> Points:
    """Seconds to map for one engine while so many others hold leases."""
    points = {}
    with ExitStack() as opened:
        node = Node(opened, 16 * MIB)
        engine = node.workers("plain", 1)
        held = 0
        while held < max(counts):
            more = min(count for count in counts if count > held) - held
            for begin in range(0, more, 200):
                [holder] = node.workers("holding", 1)
                holder.ask("connect", sessions=min(200, more - begin))
            held += more
            runs = attach_rounds(node, engine, rounds)
            points[held] = spread([run["last"] for run in runs]).median
    return points


def publish_sets(directory: str, counts: list[int]) -> dict[str, Any]:
    """In a worker: seconds until so many sets were published, and to map one of them then."""
    import torch

    tensors = {"weight": torch.ones(256)}
    published: dict[str, float] = {}
    mapped: dict[str, float] = {}
    with EngineClient("simulated", directory=directory) as client:
        spent = 0.0
        for number in range(1, max(counts) + 1):
            key = WeightKey(device=client.device_uuid, name=f"set{number}")
            began = time.perf_counter()
            client.publish(key, tensors | {"number": torch.tensor(number)}).release()
            spent += time.perf_counter() - began
            if number in counts:
                published[str(number)] = spent
                mapped[str(number)] = _map_some(client, number)
    return {"published": published, "mapped": mapped}


def _map_some(client: EngineClient, count: int, tries: int = 50) -> float:
    took = []
    for number in range(tries):
        began = time.perf_counter()
        client.acquire(f"set{1 + number * 7919 % count}").release()
        took.append(time.perf_counter() - began)
    return spread(took).median


def by_sets(counts: tuple[int, ...]) -> tuple[Points, Points, float]:
    """Seconds to publish so many sets, to map one beside them, and bytes of the broker for each."""
    with folder() as directory, Broker(directory) as broker:
        pids = (broker.keeper, broker.server)
        before = sum(memory_of(pid)["VmRSS"] for pid in pids)
        with Worker(MODULE) as worker:
            told = worker.ask("publish", directory=str(directory), counts=list(counts))
        grown = sum(memory_of(pid)["VmRSS"] for pid in pids) - before
    published, mapped = (
        {int(count): seconds for count, seconds in told[what].items()}
        for what in ("published", "mapped")
    )
    return published, mapped, grown / max(counts)


# --- telling -------------------------------------------------------------------------------------


def measure(quick: bool) -> Result:
    result = Result("growth")
    table = Table("Exponents", ["seconds to …", "over", "from", "to", "exponent"])
    rounds = 2 if quick else 7

    def tell(what: str, over: str, points: Points, most: float) -> None:
        slope = exponent(points)
        first, last = min(points), max(points)
        shown = [f"{size}: {points[size] * 1e3:.2f} ms" for size in (first, last)]
        table.add(what, over, *shown, f"{slope:.2f}")
        result.goals.append(at_most(most, slope, f"{what}, over {over}", ""))
        result.figures[f"{what}, over {over}"] = {str(size): at for size, at in points.items()}

    def few(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes[:2] if quick else sizes

    tell("map and bind", "tensors", attach_by_tensors(rounds, few(TENSORS)), MOST)
    tell("map and bind 1,000 tensors", "bytes", attach_by_bytes(rounds, few(SIZES)), NOTHING)
    tell("load (processor time)", "tensors", load_by_tensors(rounds, few(TENSORS)), MOST)
    tell("load (processor time)", "bytes", load_by_bytes(rounds, few(BYTES)), MOST)
    tell("last of all mapped", "engines", last_by_engines(rounds, few(ENGINES)), MOST)
    tell("map", "engines that hold leases", attach_by_others(5 * rounds, few(OTHERS)), NOTHING)
    published, mapped, each = by_sets(few(SETS))
    tell("publish them all", "sets held", published, MOST)
    tell("map one", "sets held", mapped, MOST)
    table.notes.append(f"Each set held takes {each / 1000:.1f} kB of the broker's own memory.")
    result.tables.append(table)
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work({"publish": publish_sets})
    else:
        main("growth", measure)
