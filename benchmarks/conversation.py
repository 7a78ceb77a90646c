"""The broker's answers beside a bare pyzmq ROUTER that sends back frames of the same sizes.

Clients are stood for by eight processes at most; each has one request of every client of its own
under way. A warm cycle is what an engine says to map a checkpoint that is resident and to let go of
it: the folder's descriptor, `acquire`, `attach`, `release`. Three of them are answered, so the echo
gets three requests of those sizes for it, although descriptors cost more than bytes. What they cost
is shown beside it, without a goal: the same cycle with a server that decides nothing
(bare_exchange.py), the most that any broker in Python could reach.
"""

from __future__ import annotations

import array
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from benchmarks.checkpoints import equal_tensors, write_checkpoint
from benchmarks.common import (
    Result,
    Table,
    at_least,
    at_most,
    main,
    percentile,
    spread,
    take_turns,
)
from benchmarks.processes import ROOT, Broker, Worker, cpu_seconds, folder, work
from benchmarks.talkers import REQUEST_ID, Talker, cycle_requests
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from engine_client import Checkpoint, EngineClient

MODULE = "benchmarks.conversation"
CLIENTS = (1, 8, 64)
PROCESSES = 8
PING = [[REQUEST_ID, b"", b"ping", b""]]


# --- the other half: clients ---------------------------------------------------------------------


class Talking:
    """What a worker process is told: to connect, then to talk for a while, again and again."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._talkers: list[Talker] = []
        self._requests = itertools.count(1)

    def connect(self, clients: int, address: str, directory: str = "") -> int:
        self._talkers = [Talker(self._context, address, directory) for _ in range(clients)]
        return os.getpid()

    def ask(self, frames: list[list[str]], seconds: float) -> list[float]:
        """These requests in turn, for so long: how many seconds each answer took."""
        requests = [[frame.encode("latin-1") for frame in request] for request in frames]
        took = array.array("d")
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for request in requests:
                self._exchange(request, took)
        return list(took)

    def _next_id(self) -> bytes:
        return next(self._requests).to_bytes(len(REQUEST_ID), "big")

    def _exchange(self, request: list[bytes], took: array.array[float], first: bytes = b"") -> None:
        began = []
        for talker in self._talkers:
            began.append(time.perf_counter())
            talker.dealer.send_multipart([first or self._next_id(), *request[1:]])
        for talker, at in zip(self._talkers, began, strict=True):
            talker.receive()
            took.append(time.perf_counter() - at)

    def cycle(self, checkpoint: str, seconds: float) -> list[float]:
        """Warm cycles for so long: how many seconds each answer took."""
        with open_checkpoint(checkpoint) as opened:
            acquire, _attach, release = cycle_requests(describe_source(opened, None))
            took = array.array("d")
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                number = self._next_id()
                for talker in self._talkers:
                    talker.deliver(opened.folder, number)
                self._exchange(acquire, took, number)
                self._attach(took)
                self._exchange(release, took)
        return list(took)

    def _attach(self, took: array.array[float]) -> None:
        began = []
        for talker in self._talkers:
            began.append(time.perf_counter())
            talker.ask_attach()
        for talker, at in zip(self._talkers, began, strict=True):
            talker.take_attached()
            took.append(time.perf_counter() - at)


# --- the baseline --------------------------------------------------------------------------------


def echo(path: str, *sizes: str) -> None:
    """A bare ROUTER: every request back, with as many bytes as `word=bytes` says for its word."""
    router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    pairs = [size.split("=") for size in sizes]
    answers = {word.encode(): b"x" * int(nbytes) for word, nbytes in pairs}
    print("ready", flush=True)
    while True:
        routing, request, empty, word, _payload = router.recv_multipart()
        router.send_multipart([routing, request, empty, b"ok", answers[word]])


@contextmanager
def running(sizes: dict[str, int], *module: str) -> Iterator[int]:
    """A baseline's module, with arguments, in a process of its own: its pid."""
    words = [f"{word}={nbytes}" for word, nbytes in sizes.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", *module, *words], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None  # noqa: S101 - it was asked for
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- measuring -----------------------------------------------------------------------------------


class Side:
    """Clients in processes of their own, all of the broker or all of the echo."""

    def __init__(
        self,
        opened: ExitStack,
        pid: int,
        *,
        clients: int,
        address: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        self.pid = pid
        processes = min(clients, PROCESSES)
        self._workers = [opened.enter_context(Worker(MODULE)) for _ in range(processes)]
        for worker in self._workers:
            worker.ask(
                "connect",
                clients=clients // processes,
                address=str(address or f"{directory}/default.zmq"),
                directory=str(directory or ""),
            )

    def run(self, command: str, **arguments: Any) -> dict[str, float]:
        """Answers a second, 99th percentile in seconds, the server's processor time for each."""
        cpu = cpu_seconds(self.pid)
        began = time.perf_counter()
        for worker in self._workers:
            worker.tell(command, **arguments)
        took = [value for worker in self._workers for value in worker.answer()]
        seconds = time.perf_counter() - began
        return {
            "rate": len(took) / seconds,
            "p99": percentile(took, 0.99),
            "cpu": (cpu_seconds(self.pid) - cpu) / len(took),
        }


def measure(quick: bool) -> Result:
    result = Result("conversation")
    rounds, seconds = (2, 0.3) if quick else (9, 1.0)
    with folder() as directory, Broker(directory) as broker:
        checkpoint = write_checkpoint(directory / "m", equal_tensors(100, 1 << 20), random=True)
        with EngineClient("simulated", directory=directory) as client:
            client.acquire(Checkpoint(checkpoint)).release()
        answers = _answer_sizes(directory, checkpoint)
        bare = directory / "bare"
        bare.mkdir()
        with (
            running(answers, MODULE, "echo", f"{directory}/echo") as echo_pid,
            running(answers, "benchmarks.bare_exchange", str(bare)) as bare_pid,
        ):
            pids = {"broker": broker.server, "echo": echo_pid, "bare": bare_pid}
            runs = {
                clients: _compare(directory, pids, checkpoint, clients, rounds, seconds)
                for clients in CLIENTS
            }
    _tell(result, runs)
    return result


def _answer_sizes(directory: Path, checkpoint: Path) -> dict[str, int]:
    """Bytes of payload of the broker's answers, which the echo gives too."""
    talker = Talker(zmq.Context(), f"{directory}/default.zmq", str(directory))
    with open_checkpoint(str(checkpoint)) as opened:
        acquire, _, release = cycle_requests(describe_source(opened, None))
        talker.deliver(opened.folder)
    sizes = {}
    for word, request in (("ping", PING[0]), ("acquire", acquire), ("release", release)):
        talker.dealer.send_multipart(request)
        sizes[word] = len(talker.receive()[-1])
        if word == "acquire":
            talker.ask_attach()
            sizes["attach"] = talker.take_attached()
    talker.close()
    return sizes


def _compare(
    directory: Path,
    pids: dict[str, int],
    checkpoint: Path,
    clients: int,
    rounds: int,
    seconds: float,
) -> dict[str, list[dict[str, float]]]:
    with open_checkpoint(str(checkpoint)) as opened:
        requests = cycle_requests(describe_source(opened, None))
    with ExitStack() as opened_workers:
        side = partial(Side, opened_workers, clients=clients)
        ours = side(pids["broker"], directory=directory)
        theirs = side(pids["echo"], address=directory / "echo")
        bare = side(pids["bare"], directory=directory / "bare")
        cycles = {"checkpoint": str(checkpoint), "seconds": seconds}
        cases: dict[str, Callable[[], dict[str, float]]] = {
            "ping": partial(ours.run, "ask", frames=_text(PING), seconds=seconds),
            "echo of pings": partial(theirs.run, "ask", frames=_text(PING), seconds=seconds),
            "cycle": partial(ours.run, "cycle", **cycles),
            "bare cycle": partial(bare.run, "cycle", **cycles),
            "echo of cycles": partial(theirs.run, "ask", frames=_text(requests), seconds=seconds),
        }
        return take_turns(cases, rounds)


def _text(requests: list[list[bytes]]) -> list[list[str]]:
    return [[frame.decode("latin-1") for frame in request] for request in requests]


def _tell(result: Result, runs: dict[int, dict[str, list[dict[str, float]]]]) -> None:
    table = Table(
        "Answers by the broker and by a bare ROUTER",
        ["", "answers/s", "x of echo", "99 % within, ms", "x of echo", "server's us each"],
    )
    for clients, cases in runs.items():
        for what, bound in (("ping", 0.85), ("cycle", 0.7)):
            ours, theirs = cases[what], cases[f"echo of {what}s"]
            ratios = {}
            sides = [(what, ours), (f"echo of {what}s", theirs)]
            if what == "cycle":
                sides.insert(1, ("bare cycle", cases["bare cycle"]))
            for name, side in sides:
                rate, p99, cpu = (
                    spread([run[key] for run in side]) for key in ("rate", "p99", "cpu")
                )
                ratios = {
                    key: spread([a[key] / b[key] for a, b in zip(side, theirs, strict=True)])
                    for key in ("rate", "p99")
                }
                table.add(
                    f"{name}, {clients} clients",
                    f"{rate:.0f}",
                    f"{ratios['rate'].median:.2f}",
                    f"{p99.scaled(1e3):.2f}",
                    f"{ratios['p99'].median:.2f}",
                    f"{cpu.median * 1e6:.0f}",
                )
                if side is ours:
                    result.goals += [
                        at_least(bound, ratios["rate"].median, f"{what}, {clients} clients: rate"),
                        at_most(1.3, ratios["p99"].median, f"{what}, {clients} clients: 99 %"),
                    ]
        result.figures[str(clients)] = {
            name: spread([run["rate"] for run in side]).median for name, side in cases.items()
        }
    table.notes.append(
        "Ratios are medians of the rounds' ratios. The server's processor time is of all its "
        "threads, libzmq's included; the keeper's is not in it. Bare cycle: the same messages, "
        "descriptors and records with a server that decides nothing."
    )
    result.tables.append(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        talking = Talking()
        work({"connect": talking.connect, "ask": talking.ask, "cycle": talking.cycle})
    elif sys.argv[1:2] == ["echo"]:
        echo(*sys.argv[2:])
    else:
        main("conversation", measure)
