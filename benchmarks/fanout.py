"""Many engines at once: how soon the last has the weights mapped, and what that costs in memory.

Engines are processes that have nothing but the client imported (some of them torch as well) and are
connected. All are told one moment at which to begin. Sessions by the thousand are held by a few
processes that speak both channels by hand.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

import zmq

from benchmarks.checkpoints import equal_tensors, write_checkpoint
from benchmarks.common import CORES, GIB, MIB, Result, Table, at_most, main, spread
from benchmarks.processes import (
    Broker,
    Worker,
    folder,
    memory_of,
    proportional_bytes,
    work,
)
from benchmarks.talkers import Talker
from engine_client import Checkpoint, EngineClient

MODULE = "benchmarks.fanout"
ENGINES = (1, 4, 16, 64, 128)
WITH_TORCH = 16
JUDGED = 64
TENSORS = 1000
SESSIONS = 1000
PROCESS_SESSIONS = 200
BEGIN_AFTER = 0.2
SLAB = "weight-broker-slab"


# --- the other half: engines ---------------------------------------------------------------------


class Attaching:
    """An engine that maps a checkpoint when it is told to."""

    def __init__(self, directory: str, checkpoint: str, *, torch: bool) -> None:
        if torch:
            import torch as imported

            imported.zeros(1)
        self._with_torch = torch
        self._checkpoint = Checkpoint(checkpoint)
        self._client = EngineClient("simulated", directory=directory)
        self._weights: Any = None
        self._tensors: Any = None

    def attach(self, at: float) -> dict[str, float]:
        """Map at this moment: when that was done, and the processor time it took."""
        time.sleep(max(0.0, at - time.monotonic()))
        began = time.process_time()
        self._weights = self._client.acquire(self._checkpoint)
        if self._with_torch:
            self._tensors = self._weights.tensors()
        return {"done": time.monotonic(), "cpu": time.process_time() - began}

    def touch(self) -> int:
        """Read a byte of every page."""
        return sum(bytes(self._weights.slab_memory()[::4096]))

    def release(self) -> None:
        self._tensors = None
        self._weights.release()
        self._weights = None


class Holding:
    """A process with many sessions, each with a lease."""

    def __init__(self, directory: str, checkpoint: str) -> None:
        self._context = zmq.Context()
        self._directory = directory
        self._checkpoint = checkpoint
        self._talkers: list[Talker] = []

    def connect(self, sessions: int) -> None:
        address = f"{self._directory}/default.zmq"
        for _ in range(sessions):
            talker = Talker(self._context, address, self._directory)
            talker.hold(self._checkpoint)
            self._talkers.append(talker)


def be_worker(kind: str, directory: str, checkpoint: str) -> None:
    if kind == "holding":
        work({"connect": Holding(directory, checkpoint).connect})
        return
    engine = Attaching(directory, checkpoint, torch=kind == "torch")
    work({"attach": engine.attach, "touch": engine.touch, "release": engine.release})


# --- measuring -----------------------------------------------------------------------------------


class Node:
    """A broker with one resident checkpoint, and engines beside it."""

    def __init__(self, opened: ExitStack, nbytes: int) -> None:
        self._opened = opened
        self.directory = opened.enter_context(folder())
        tensors = equal_tensors(TENSORS, nbytes)
        self.checkpoint = write_checkpoint(self.directory / "m", tensors)
        self.broker = opened.enter_context(Broker(self.directory))
        with EngineClient("simulated", directory=self.directory) as client:
            weights = client.acquire(Checkpoint(self.checkpoint))
            self.slab_bytes = weights.nbytes
            weights.release()

    def workers(self, kind: str, count: int) -> list[Worker]:
        arguments = (kind, str(self.directory), str(self.checkpoint))
        return [self._opened.enter_context(Worker(MODULE, *arguments)) for _ in range(count)]

    def attach(self, workers: list[Worker]) -> dict[str, float]:
        """All at once: seconds until the last had it mapped, processor seconds of both sides."""
        broker = self.broker.cpu_seconds()
        at = time.monotonic() + BEGIN_AFTER
        for worker in workers:
            worker.tell("attach", at=at)
        answers = [worker.answer() for worker in workers]
        return {
            "last": max(answer["done"] for answer in answers) - at,
            "cpu": sum(answer["cpu"] for answer in answers),
            "broker": self.broker.cpu_seconds() - broker,
        }


def told(workers: list[Worker], command: str) -> None:
    for worker in workers:
        worker.tell(command)
    for worker in workers:
        worker.answer()


def attach_rounds(node: Node, workers: list[Worker], rounds: int) -> list[dict[str, float]]:
    runs = []
    for number in range(rounds + 1):
        run = node.attach(workers)
        told(workers, "release")
        if number:  # the first warms up
            runs.append(run)
    return runs


def measure(quick: bool) -> Result:
    result = Result("fanout")
    rounds, nbytes = (2, 64 * MIB) if quick else (7, GIB)
    runs: dict[str, list[dict[str, float]]] = {}
    counts = [count for count in ENGINES if not quick or count <= 16]
    judged = JUDGED if JUDGED in counts else counts[-1]
    for count in counts:
        with ExitStack() as opened:
            node = Node(opened, nbytes)
            workers = node.workers("plain", count)
            runs[str(count)] = attach_rounds(node, workers, rounds)
            if count == judged:
                _tell_memory(result, node, workers)
    with ExitStack() as opened:
        node = Node(opened, nbytes)
        workers = node.workers("torch", 2 if quick else WITH_TORCH)
        runs[f"{len(workers)}, with torch"] = attach_rounds(node, workers, rounds)
    _tell_times(result, runs, str(judged), nbytes)
    _sessions(result, 100 if quick else SESSIONS)
    return result


def _tell_times(
    result: Result, runs: dict[str, list[dict[str, float]]], judged: str, nbytes: int
) -> None:
    table = Table(
        f"Engines that map {nbytes / GIB:.3g} GiB, {TENSORS} tensors, at the same moment",
        ["engines", "last mapped, ms", "x of own time", "x of all time", "own, ms", "broker's, ms"],
    )
    for name, times in runs.items():
        last = spread([run["last"] * 1e3 for run in times])
        beside = spread([run["last"] / (run["cpu"] / CORES) for run in times])
        both = spread([run["last"] / ((run["cpu"] + run["broker"]) / CORES) for run in times])
        own, broker = (spread([run[key] * 1e3 for run in times]) for key in ("cpu", "broker"))
        ratios = [f"{ratio.median:.2f}" for ratio in (beside, both)]
        table.add(name, f"{last:.0f}", *ratios, f"{own.median:.0f}", f"{broker.median:.0f}")
        if name == judged:
            what = f"{name} engines: last mapped, beside their own processor time on {CORES} cores"
            result.goals.append(at_most(1.3, beside.median, what))
    table.notes.append(
        "Own time is the engines' processor time together, over the cores; all time has the "
        "broker's in it, which they wait for. Engines with torch also make all tensors."
    )
    result.tables.append(table)
    result.figures["last"] = {
        name: spread([run["last"] for run in times]).median for name, times in runs.items()
    }


def _tell_memory(result: Result, node: Node, workers: list[Worker]) -> None:
    """Copies of the weights, and page tables, with every page touched by every engine."""
    nbytes = node.slab_bytes
    before = sum(memory_of(worker.pid)["VmPTE"] for worker in workers)
    node.attach(workers)
    told(workers, "touch")
    tables = sum(memory_of(worker.pid)["VmPTE"] for worker in workers) - before
    copies = sum(proportional_bytes(worker.pid, SLAB) for worker in workers) / nbytes
    told(workers, "release")
    each = tables / len(workers) / (nbytes / GIB) / MIB
    table = Table(
        f"{len(workers)} engines that have touched every page of {nbytes / GIB:.3g} GiB",
        ["what", "measured"],
    )
    table.add("copies of the weights, by proportional set size", f"{copies:.4f}")
    table.add("page tables, MiB for each GiB and engine", f"{each:.2f}")
    result.tables.append(table)
    result.goals += [
        at_most(1.001, copies, f"{len(workers)} engines: copies of the weights", "copies"),
        at_most(3, each, f"{len(workers)} engines: page tables for each GiB and engine", "MiB"),
    ]


def _sessions(result: Result, count: int) -> None:
    with ExitStack() as opened:
        node = Node(opened, 16 * MIB)
        each = min(count, PROCESS_SESSIONS)
        workers = node.workers("holding", count // each)
        for worker in workers:
            worker.ask("connect", sessions=1)  # what the first of each costs is not what grows
        before = _resident(node.broker)
        began = time.monotonic()
        for worker in workers:
            worker.tell("connect", sessions=each)
        for worker in workers:
            worker.answer()
        seconds = time.monotonic() - began
        grown = {name: size - before[name] for name, size in _resident(node.broker).items()}
    table = Table(f"{count} sessions, each with a lease", ["what", "measured"])
    table.add("until all had their lease, s", f"{seconds:.2f}")
    for name, size in grown.items():
        table.add(f"{name}: memory for each, kB", f"{size / count / 1000:.1f}")
    result.tables.append(table)
    per_session = sum(grown.values()) / count / 1000
    what = f"{count} sessions: broker's memory for each, both processes"
    result.goals.append(at_most(100, per_session, what, "kB"))


def _resident(broker: Broker) -> dict[str, int]:
    pids = {"server": broker.server, "keeper": broker.keeper}
    return {name: memory_of(pid)["VmRSS"] for name, pid in pids.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        be_worker(*sys.argv[2:])
    else:
        main("fanout", measure)
