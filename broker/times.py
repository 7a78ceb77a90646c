"""When things on the books happened, and how fast loads go: the books have no clock.

Belongs to the loop's thread. Fed by what the books log (`note`) and by writers' reports
(`progressed`). Wall-clock times are seconds since 1970; what an earlier server has seen is None
unless the keeper kept it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any

import msgspec

WINDOW_SECONDS = 10.0
"""Over which a load's rate is measured."""
MOST_FORGOTTEN = 256
"""Sets that are gone, of which times are kept before they are cleared away."""


class Pace:
    """How fast one stage of one load goes. Times are of the monotonic clock."""

    def __init__(self, now: float) -> None:
        self._stage = ""
        self._seen: deque[tuple[float, int]] = deque()
        self._heard = now

    def note(self, stage: str, done: int, now: float) -> None:
        """The writer has reported."""
        if stage != self._stage or (self._seen and done < self._seen[-1][1]):
            self._seen.clear()
        self._stage, self._heard = stage, now
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - WINDOW_SECONDS:
            self._seen.popleft()

    def rate(self, now: float) -> float | None:
        """What is done a second, until now; None: not known yet."""
        if len(self._seen) < 2:
            return None
        (began, first), (_latest, last) = self._seen[0], self._seen[-1]
        return (last - first) / max(now - began, 1e-6)

    def quiet(self, now: float) -> float:
        """Seconds since the writer was last heard of."""
        return now - self._heard


class SetTimes(msgspec.Struct):
    """Of one set: claimed, sealed, last leased or given back, superseded or evicted; and its
    writer's pace."""

    begun: float | None = None
    sealed: float | None = None
    used: float | None = None
    unwanted: float | None = None
    pace: Pace | None = None


class Times(msgspec.Struct):
    """Of all sets and leases that `known` still has.

    Args:
        known: the ids of the sets on the books.
    """

    known: Container[int]
    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    leases: dict[tuple[int, str], float] = {}
    """By session and lease: since when."""
    _sets: dict[int, SetTimes] = {}

    def of(self, set_id: int) -> SetTimes:
        return self._sets.get(set_id, SetTimes())

    def note(self, event: str, detail: Mapping[str, Any]) -> None:
        """What the books log."""
        if event == "lease-granted":
            now = self.wall()
            self._entry(detail["set"]).used = now
            self.leases[detail["session"], detail["lease"]] = now
        elif event == "lease-ended":
            self._entry(detail["set"]).used = self.wall()
            self.leases.pop((detail["session"], detail["lease"]), None)
        elif event in ("load-started", "claim-granted"):
            self._begin(detail["set"])
        elif event == "claim-inherited":
            self._begin(detail["by"])
        elif event == "set-sealed":
            self.sealed(detail["set"])  # its record for the keeper came before, and says the same
            self._entry(detail["set"]).pace = None
        elif event in ("set-superseded", "set-evicted"):
            self._entry(detail["set"]).unwanted = self.wall()

    def progressed(self, set_id: int, stage: str, done: int) -> None:
        """A set's writer has reported."""
        pace = self._entry(set_id).pace
        if pace is not None:
            pace.note(stage, done, self.monotonic())

    def sealed(self, set_id: int) -> float:
        """When a resident set was sealed; now, if it is being sealed at this moment."""
        times = self._entry(set_id)
        if times.sealed is None:
            times.sealed = self.wall()
        return times.sealed

    def adopt(self, set_id: int, sealed: float) -> None:
        """What an earlier server knew of a set; 0: nothing."""
        self._entry(set_id).sealed = sealed or None

    def _begin(self, set_id: int) -> None:
        times = self._entry(set_id)
        times.begun, times.pace = self.wall(), Pace(self.monotonic())

    def _entry(self, set_id: int) -> SetTimes:
        entry = self._sets.get(set_id)
        if entry is None:
            self._clear_away()
            entry = self._sets[set_id] = SetTimes()
        return entry

    def _clear_away(self) -> None:
        gone = [set_id for set_id in self._sets if set_id not in self.known]
        if len(gone) > MOST_FORGOTTEN:
            for set_id in gone:
                del self._sets[set_id]
