"""One broker, its engines and checkpoints, and whether books, kernel and engines agree."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.campaign import kernel
from tests.campaign.asking import ask_status
from tests.campaign.content import write_checkpoint
from tests.campaign.engines import Engine, Outcome
from tests.campaign.relay import Relay
from tests.support.clock import SCALE
from tests.support.processes import LOADER_FAULTS, ROOT, Lines

START_SECONDS = 60.0
SETTLE_SECONDS = 20.0
"""How long the books may take to be right again on a machine that has other things to do."""
SIZES = (1 << 16, 1 << 17, 1 << 18, 3 << 18)
LINES = ("line-a", "line-b", "line-c")
CHECKPOINTS = 5
SLOTS = 3
"""Weight sets that an engine holds at most."""


class Lost(Exception):
    """Something was lost, or is not what it must be; the campaign ends with it."""


class World:
    """Everything a round of a campaign works on.

    Args:
        directory: short, empty, its own.
        engines: how many there are at any time.
    """

    def __init__(
        self,
        context: ForkServerContext,
        directory: Path,
        rng: random.Random,
        engines: int = 6,
        memory_limit: str = "8m",
    ) -> None:
        self.context = context
        self.rng = rng
        self.directory = directory / "b"
        self.directory.mkdir(mode=0o700)
        self.log = directory / "broker.log"
        self.loader_order = directory / "loader-order"
        self.tags: dict[str, str] = {}
        self.published: dict[str, set[str]] = {name: set() for name in LINES}
        self.held: dict[int, dict[int, dict[str, Any]]] = {}
        self.stopped: list[int] = []
        self.children: list[int] = []
        self.outcomes: list[Outcome] = []
        self.brokers_started = 0
        self.engines: list[Engine] = []
        self.wanted = engines
        self._memory_limit = memory_limit
        self._numbers = 0
        self.engines_started = 0
        self.start_broker()
        self.relay = Relay(directory / "r", self.directory)
        for i in range(CHECKPOINTS):
            self.rewrite(str(directory / f"c{i}"))
        self.fill_up()

    # --- the broker -----------------------------------------------------------------------

    def start_broker(self) -> None:
        with self.log.open("a") as log:
            self.broker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "broker", "serve", "--device", "simulated"),
                    *("--dir", str(self.directory), "--memory-limit", self._memory_limit),
                    *("--limit", "restart_seconds=0"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{LOADER_FAULTS}{os.pathsep}{ROOT}",
                    "WEIGHT_BROKER_TEST_LOADER": str(self.loader_order),
                },
                text=True,
            )
        assert self.broker.stdout is not None
        Lines(self.broker.stdout).next(START_SECONDS, "the broker")
        self.keeper = self.broker.pid
        self.canaries = set(kernel.slabs(self.keeper))
        self.brokers_started += 1

    def server(self) -> int:
        """The server's pid; 0 while there is none."""
        for pid in kernel.children(self.keeper):
            if kernel.state(pid) not in ("Z", "X", ""):
                return pid
        return 0

    def status(self) -> dict[str, Any]:
        return ask_status(self.directory)

    # --- engines and checkpoints ----------------------------------------------------------

    def fill_up(self) -> None:
        """As many engines as there are to be, every third behind the relay."""
        self.engines = [engine for engine in self.engines if engine.is_alive]
        while len(self.engines) < self.wanted:
            behind = self.engines_started % 3 == 2
            self.engines_started += 1
            self.relay.refresh()
            directory = self.relay.directory if behind else self.directory
            engine = Engine(self.context, str(directory))
            engine.session = engine.ask("connect")
            self.engines.append(engine)
        for engine in self.engines:
            if not engine.session:
                self.relay.refresh()
                engine.session = engine.ask("connect")

    def rewrite(self, path: str) -> str:
        """Put other weights into a checkpoint; their tag."""
        self._numbers += 1
        tag = f"{Path(path).name}:{self._numbers}"
        write_checkpoint(Path(path), tag, self.rng.choice(SIZES))
        self.tags[path] = tag
        return tag

    def new_tag(self, name: str) -> str:
        self._numbers += 1
        return f"{name}:{self._numbers}"

    def new_slot(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- waiting --------------------------------------------------------------------------

    def wait_for_answers(self, seconds: float = 60.0) -> None:
        """Wait until every question has its outcome (in `outcomes`), or its engine has died.

        Raises:
            Lost: a living engine has had no answer for so long.
        """
        limit = time.monotonic() + seconds * SCALE
        while True:
            for engine in self.engines:
                if engine.is_alive:
                    self.outcomes += engine.pump()
                if not engine.is_alive and engine.asked:
                    engine.gone()
            waiting = [engine for engine in self.engines if engine.asked]
            if not waiting:
                return
            for engine in waiting:
                if kernel.state(engine.pid) == "T":  # it stopped itself only now
                    engine.signal(signal.SIGCONT)
            if time.monotonic() > limit:
                said = [(engine.pid, list(engine.asked.values())) for engine in waiting]
                raise Lost(f"no answer in {seconds * SCALE} s: {said}")
            time.sleep(0.003)

    def check(self) -> None:
        """Raise `Lost` unless everything is right, now or in a moment."""
        limit = time.monotonic() + SETTLE_SECONDS * SCALE
        while True:
            problems = self._problems()
            if not problems:
                return
            if time.monotonic() > limit:
                raise Lost("\n".join(problems))
            time.sleep(0.01)

    def _problems(self) -> list[str]:
        living = [engine for engine in self.engines if engine.is_alive]
        report = self.status()
        held = kernel.slabs(self.keeper)
        for canary in self.canaries:
            held.pop(canary, None)
        problems = [*_books(report), *self._slabs(report, held), *self._processes(report, living)]
        if problems:
            return problems
        for engine in living:
            engine.tell("check")
        checked = {}
        for engine, outcome in self._checks(living):
            if outcome.kind != "ok":
                raise Lost(f"engine {engine.pid}: {outcome.kind} {outcome.sentence}")
            checked[engine] = outcome.value
        for engine in living:
            problems += _engine(engine, checked.get(engine, {}), report, held)
        self.held = {engine.pid: value for engine, value in checked.items()}
        return problems

    def _checks(self, living: list[Engine]) -> list[tuple[Engine, Outcome]]:
        limit = time.monotonic() + SETTLE_SECONDS * SCALE
        found = []
        while any(engine.asked for engine in living):
            found += [(engine, outcome) for engine in living for outcome in engine.pump()]
            dead = [engine.pid for engine in living if not engine.is_alive]
            if dead:
                raise Lost(f"engines {dead} have died of themselves")
            if time.monotonic() > limit:
                raise Lost("an engine did not come to read its own weights")
            time.sleep(0.001)
        return found

    def _slabs(self, report: dict[str, Any], held: dict[int, int]) -> list[str]:
        server = kernel.slabs(report["broker"]["pid"])
        theirs = {slab: n for slab, n in server.items() if slab not in self.canaries}
        booked = sorted(entry["nbytes"] for entry in report["sets"] if entry["nbytes"])
        problems = []
        if sorted(held.values()) != booked:
            problems.append(f"the keeper holds slabs of {sorted(held.values())}, books: {booked}")
        if theirs != held:
            problems.append(f"the server holds {theirs}, the keeper {held}")
        return problems

    def _processes(self, report: dict[str, Any], living: list[Engine]) -> list[str]:
        problems = []
        pids = sorted(entry["pid"] for entry in report["sessions"])
        if pids != sorted(engine.pid for engine in living):
            who = sorted(engine.pid for engine in living)
            problems.append(f"sessions of {pids}, engines {who}: {report['sessions']}")
        server = report["broker"]["pid"]
        if kernel.children(self.keeper) != [server]:
            problems.append(f"the keeper {self.keeper} has {kernel.children(self.keeper)}")
        if kernel.children(server):
            problems.append(f"the server {server} has {kernel.children(server)}")
        return problems

    # --- the end --------------------------------------------------------------------------

    def end_children(self) -> None:
        """What killed engines have left behind."""
        while self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.children.pop(), signal.SIGKILL)

    def stop_engines(self) -> None:
        for engine in self.engines:
            if engine.is_alive:
                engine.kill()
        self.engines.clear()

    def empty(self, *, refill: bool = True) -> None:
        """All engines end, all sets are evicted: nothing may be left."""
        self.stop_engines()
        self.wanted, wanted = 1, self.wanted
        self.fill_up()
        engine = self.engines[0]
        for entry in self.status()["sets"]:
            engine.ask("evict", which=str(entry["id"]))
        engine.kill()
        self.wanted = wanted
        self.wait_until(self._is_empty, "the end of everything held")
        if refill:
            self.fill_up()

    def _is_empty(self) -> bool:
        report = self.status()
        (device,) = report["devices"].values()
        return (
            device["free"] == device["limit"]
            and not report["sessions"]
            and set(kernel.slabs(self.keeper)) == self.canaries
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + SETTLE_SECONDS * SCALE
        while not condition():
            if time.monotonic() > limit:
                raise Lost(f"{what} did not come in {SETTLE_SECONDS * SCALE} s")
            time.sleep(0.01)

    def close(self) -> None:
        """End the broker in order; it must leave nothing."""
        self.end_children()
        self.stop_engines()
        self.relay.close()
        if self.broker.poll() is None:
            self.broker.send_signal(signal.SIGTERM)
        code = self.broker.wait(START_SECONDS)
        left = [*self.directory.glob("*.zmq"), *self.directory.glob("*.session")]
        if code or left:
            raise Lost(f"the broker ended with {code} and left {left}")

    def states(self) -> list[str]:
        """What keeper and server do, by the kernel's word, after a failure."""
        return [
            f"{pid} {kernel.state(pid)} {kernel.command_line(pid)[:100]}"
            for pid in (self.keeper, *kernel.children(self.keeper))
        ]

    def channels(self) -> dict[int, Any]:
        """Where the engines' channels stand, after a failure."""
        found: dict[int, Any] = {}
        for engine in self.engines:
            with contextlib.suppress(AssertionError, OSError):
                engine.asked.clear()
                found[engine.pid] = engine.ask("channel", 2.0)
        return found

    def kill(self) -> None:
        """Whatever runs still, after a failure."""
        self.end_children()
        with contextlib.suppress(OSError):  # closed already
            self.relay.close()
        with contextlib.suppress(ProcessLookupError):
            for engine in self.engines:
                engine.signal(signal.SIGKILL)
        server = self.server()
        if self.broker.poll() is None:
            self.broker.kill()
            self.broker.wait()
        if server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


def _books(report: dict[str, Any]) -> list[str]:
    (use,) = report["devices"].values()
    resident = [entry for entry in report["sets"] if entry["state"] in ("sealed", "draining")]
    problems = [
        f"set {entry['id']} is {entry['state']} and nobody asks"
        for entry in report["sets"]
        if entry not in resident
    ]
    for purpose, leased in (("leased", True), ("idle", False)):
        nbytes = sum(entry["nbytes"] for entry in resident if bool(entry["leases"]) is leased)
        if use[purpose] != nbytes:
            problems.append(f"{use[purpose]} bytes are {purpose}, by the sets {nbytes}")
    if use["leased"] + use["idle"] + use["reserved"] + use["free"] != use["limit"]:
        problems.append(f"the bytes do not add up: {use}")
    return problems


def _engine(
    engine: Engine,
    held: dict[int, dict[str, Any]],
    report: dict[str, Any],
    slabs: dict[int, int],
) -> list[str]:
    """Whether what an engine holds, what is mapped there, and its leases are the same."""
    problems = []
    leased = sorted(
        entry["id"]
        for entry in report["sets"]
        for lease in entry["leases"]
        if lease["session"] == engine.session
    )
    if leased != sorted(weights["set"] for weights in held.values()):
        problems.append(f"engine {engine.pid} holds {held}, its leases are of {leased}")
    mapped = kernel.mapped(engine.pid)
    if sum(mapped.values()) != sum(weights["nbytes"] for weights in held.values()):
        problems.append(f"engine {engine.pid} has mapped {dict(mapped)} and holds {held}")
    if not mapped.keys() <= slabs.keys():
        problems.append(f"engine {engine.pid} has mapped {dict(mapped)}, held are {slabs}")
    return problems
