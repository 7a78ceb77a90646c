"""One deadline for a whole operation, however many waits it is made of."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.errors import RequestTimeout, UsageError

LONGEST_SECONDS = 1e9
"""Thirty years. The system's own waits take no numbers that are much larger."""


class Deadline:
    """`seconds` from now; None, and what is longer than a machine lives, never comes.

    Raises:
        UsageError: it is no number, or a negative one.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise UsageError(f"timeout must be seconds, 0 or more, or None, not {seconds!r:.40}")
        self.seconds = seconds
        is_endless = seconds is None or seconds > LONGEST_SECONDS
        self._at = None if is_endless else time.monotonic() + (seconds or 0)
        self._wake: Callable[[], None] | None = None

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None if there is no end."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def wake_by(self, wake: Callable[[], None]) -> None:
        """What `expire` calls to end the waiting that begins now; before `remaining` is asked."""
        self._wake = wake

    def expire(self) -> None:
        """Be over now, whoever waits under it, in whatever thread."""
        self._at = time.monotonic()
        wake = self._wake
        if wake is not None:
            wake()

    def expired(self, stage: object) -> RequestTimeout:
        """The error to raise: it names what was being waited for."""
        return RequestTimeout(
            f"timed out after {self.seconds} s while {stage}",
            stage=str(stage),
            seconds=self.seconds,
        )
