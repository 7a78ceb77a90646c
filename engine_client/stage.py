"""What a call is waiting for right now: for the progress line, and for a time-out's sentence."""

from __future__ import annotations

from collections.abc import Callable

from broker import wire


class Stage:
    """`str(stage)` at a time-out is the end of its sentence.

    Args:
        what: what is waited for, e.g. "the weights".
        show: called with each progress message.
    """

    def __init__(self, what: str, show: Callable[[wire.Progress], None] | None = None) -> None:
        self._what = what
        self._show = show
        self._last: wire.Progress | None = None

    def on_progress(self, progress: wire.Progress) -> None:
        self._last = progress
        if self._show is not None:
            self._show(progress)

    def __str__(self) -> str:
        if self._last is None:
            return f"waiting for {self._what}"
        done, total = self._last.done, self._last.total
        if not total:
            return f"waiting for {self._what} ({self._last.stage})"
        return f"waiting for the load ({self._last.stage}, {done} of {total} bytes)"
