"""A command on a terminal of its own, and what it draws there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

from tests.support.clock import SCALE
from tests.support.processes import ROOT

SECONDS = 20.0
ROWS = 60


class Terminal:
    """`weight-broker` with a terminal of so many columns.

    Attributes:
        text: everything drawn so far, escape sequences included.
    """

    def __init__(self, *arguments: str, width: int) -> None:
        self.text = ""
        self._read = 0
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", ROWS, width, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "broker", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(theirs)

    def read_until(self, word: str) -> str:
        """What is drawn from where the last reading ended up to a word, and with it."""
        limit = time.monotonic() + SECONDS * SCALE
        while (end := self.text.find(word, self._read)) < 0:
            left = limit - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                raise AssertionError(f"{word!r} was not drawn: {self.text[self._read :]!r}")
            self.text += os.read(self._ours, 65536).decode("utf-8", "replace")
        start, self._read = self._read, end + len(word)
        return self.text[start : self._read]

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(SECONDS * SCALE)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)
