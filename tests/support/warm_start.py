"""Starts modules of ours by a process that has imported what they need (tests/support/warm.py)."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tests.support.clock import SCALE

ROOT = Path(__file__).resolve().parents[2]
IMPORT_SECONDS = 60.0


class _Starter:
    """The process that others are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(IMPORT_SECONDS * SCALE)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        atexit.register(self._close)

    def ask(self, order: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._link, [json.dumps(order).encode()], descriptors)
            answer: int = json.loads(self._link.recv(64))
            return answer

    def _close(self) -> None:
        self._link.close()
        self._process.wait(10 * SCALE)


_starter: _Starter | None = None


def _ask(order: dict[str, Any], descriptors: list[int]) -> int:
    global _starter
    if _starter is None:
        _starter = _Starter()
    return _starter.ask(order, descriptors)


class WarmProcess:
    """`python -m MODULE ARGUMENTS`, as much of a `subprocess.Popen` as the tests need.

    Its standard output is a pipe; so is its standard input, unless it has none.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        has_input: bool = False,
        stderr: int = 2,
    ) -> None:
        ours_out, theirs_out = os.pipe()
        if has_input:
            theirs_in, ours_in = os.pipe()
            self.stdin: IO[str] | None = os.fdopen(ours_in, "w")
        else:
            theirs_in = os.open(os.devnull, os.O_RDONLY)
            self.stdin = None
        self.stdout: IO[str] = os.fdopen(ours_out)
        order = {
            "module": module,
            "arguments": arguments,
            "environ": dict(os.environ if environ is None else environ),
        }
        try:
            self.pid = _ask(order, [theirs_in, theirs_out, stderr])
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._pidfd = os.pidfd_open(self.pid)  # it is nobody else's to wait for
        self._ending = threading.Lock()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        poller = select.poll()
        with self._ending:
            if self.returncode is None:
                poller.register(self._pidfd, select.POLLIN)
                if not poller.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
                status = _ask({"wait_for": self.pid}, [])
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
            return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
