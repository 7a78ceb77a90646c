"""A progress line on a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from broker.wire import Progress

BAR_WIDTH = 30


def progress_printer(what: str, stream: TextIO | None = None) -> Callable[[Progress], None]:
    """A callback that redraws one line on `stream` (standard error) if it is a terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return lambda _progress: None

    def show(progress: Progress) -> None:
        if not progress.total:  # a stage without an end that is known
            stream.write(f"\r{what}: {progress.stage}")
            stream.flush()
            return
        done = progress.done / progress.total
        bar = ("#" * int(done * BAR_WIDTH)).ljust(BAR_WIDTH)
        end = "\n" if progress.done >= progress.total else ""
        stream.write(f"\r{what}: {progress.stage} [{bar}] {done:4.0%}{end}")
        stream.flush()

    return show
