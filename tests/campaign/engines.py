"""The campaign's hold on its engines: commands go out, outcomes come back when they do."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from typing import Any

from tests.campaign.engine import run_engine


def nursery() -> ForkServerContext:
    """Where engines come from; imports everything once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaign.engine"])
    return context


@dataclass
class Outcome:
    """`kind`: "ok", the class of an error, or "crash"; `at`: Unix time."""

    pid: int
    command: str
    arguments: dict[str, Any]
    kind: str
    value: Any
    sentence: str
    at: float


@dataclass
class Asked:
    command: str
    arguments: dict[str, Any]
    since: float = field(default_factory=time.monotonic)


class Engine:
    """One engine's process."""

    def __init__(self, context: ForkServerContext, directory: str) -> None:
        ours, theirs = context.Pipe()
        self.directory = directory
        self._connection = ours
        self._process = context.Process(target=run_engine, args=(theirs, directory), daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count(1)
        self.asked: dict[int, Asked] = {}
        self.is_alive = True
        self.session = 0
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def tell(self, command: str, **arguments: Any) -> int:
        number = next(self._numbers)
        self.asked[number] = Asked(command, arguments)
        with contextlib.suppress(BrokenPipeError):
            self._connection.send((number, command, arguments))
        return number

    def pump(self) -> list[Outcome]:
        """What has come back since."""
        outcomes = []
        try:
            while self._connection.poll():
                number, kind, value, sentence, at = self._connection.recv()
                asked = self.asked.pop(number, None)
                if asked is None:
                    continue  # nobody wants to know any more
                said = (asked.command, asked.arguments, kind, value, sentence, at)
                outcomes.append(Outcome(self.pid, *said))
        except (EOFError, ConnectionResetError):
            self.is_alive = False
        return outcomes

    def ask(self, command: str, seconds: float = 30.0, **arguments: Any) -> Any:
        """Do a command alone; its result.

        Raises:
            AssertionError: it failed, or took too long.
        """
        assert not self.asked
        self.tell(command, **arguments)
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self._connection.poll(0.05):
                for outcome in self.pump():
                    assert outcome.kind == "ok", outcome
                    return outcome.value
        raise AssertionError(f"engine {self.pid}: {command} had no answer in {seconds} s")

    def wait(self, seconds: float) -> None:
        """Until something comes back, or so long."""
        self._connection.poll(seconds)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; every question of it is settled by its death."""
        self.signal(signal.SIGKILL)
        self.gone()

    def gone(self) -> None:
        """It has died by itself or is about to."""
        self._process.join(30)
        self.is_alive = False
        self.asked.clear()
        self._connection.close()
