"""Engines with torch in a moment: forked from one process that has imported it before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from tests.support.clock import SCALE
from tests.support.processes import ROOT, Engine, Lines, RunningBroker, wait_until_gone

IMPORT_SECONDS = 60.0


class Nursery:
    """The process that engines are forked from (tests/support/torch_engine.py)."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.torch_engine", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
        theirs.close()
        self._link.settimeout(IMPORT_SECONDS * SCALE)
        self._is_ready = False

    def engine(self, broker: RunningBroker) -> BornEngine:
        if not self._is_ready:
            self._is_ready = self._link.recv(64) == b"ready"
        ours, theirs = os.pipe(), os.pipe()
        directory = str(broker.directory).encode()
        socket.send_fds(self._link, [directory], [ours[0], theirs[1]])
        os.close(ours[0])
        os.close(theirs[1])
        return BornEngine(int(self._link.recv(64)), ours[1], theirs[0])

    def close(self) -> None:
        self._link.close()
        self._process.wait(10 * SCALE)


class BornEngine(Engine):
    """An engine that is no child of ours."""

    def __init__(self, pid: int, given: int, answers: int) -> None:
        self._pid = pid
        self._input = os.fdopen(given, "w")
        self._lines = Lines(os.fdopen(answers))

    @property
    def pid(self) -> int:
        return self._pid

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        wait_until_gone(self._pid)

    def close(self) -> None:
        """Let it end by itself (end of its input), or kill it."""
        self._input.close()
        try:
            wait_until_gone(self._pid)
        except AssertionError:
            self.kill()
