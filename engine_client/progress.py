"""A progress line on a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

from broker.wire import Progress

BAR_WIDTH = 30

Show: TypeAlias = Callable[[Progress], None]
"""Called with each progress message of a call, in the thread that waits."""


@contextmanager
def shown(progress: Show | None, what: str, stream: TextIO | None = None) -> Iterator[Show]:
    """What a call that waits tells its progress to.

    Args:
        progress: the caller's own; None: one line on `stream` (standard error), redrawn, if that is
            a terminal. Whatever is printed after the call begins on a line of its own.
        what: how the line begins.
    """
    if progress is not None:
        yield progress
        return
    line = _Line(what, stream or sys.stderr)
    try:
        yield line.show
    finally:
        line.end()


class _Line:
    def __init__(self, what: str, stream: TextIO) -> None:
        self._what = what
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._length = 0

    def show(self, progress: Progress) -> None:
        if self._is_terminal:
            self._draw(f"{self._what}: {progress.stage}{_bar(progress)}")

    def end(self) -> None:
        """Nothing more is drawn; the cursor goes to the next line if anything was."""
        if self._length:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, text: str) -> None:
        """Over what was there, also where that was longer."""
        self._stream.write("\r" + text.ljust(self._length))
        self._stream.flush()
        self._length = len(text)


def _bar(progress: Progress) -> str:
    if not progress.total:
        return ""  # a stage without an end that is known
    done = progress.done / progress.total
    return f" [{('#' * int(done * BAR_WIDTH)).ljust(BAR_WIDTH)}] {done:4.0%}"
