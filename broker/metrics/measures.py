"""What is counted while it happens: how long answers and loads took, and why loads failed.

Belongs to the loop's thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from broker.metrics.causes import CAUSES, cause_of

REQUEST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)
"""Upper ends of the buckets. An answer that waits for nothing takes less than a millisecond, one
that waits for a load as long as the load."""
MEASURED = frozenset({"load-started", "set-sealed", "set-failed", "same-content"})
"""Of what the books log."""
LOAD_SECONDS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class Histogram(msgspec.Struct):
    """How often values were in each bucket; one more for what is above the last end."""

    ends: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = []

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.ends) + 1)

    def add(self, value: float) -> None:
        """Count a value; one at a bucket's end belongs to it."""
        self.counts[bisect_left(self.ends, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """The same, which does not change any more."""
        copied = Histogram(self.ends, self.total)
        copied.counts[:] = self.counts
        return copied


class Measures:
    """Of one server, from its start.

    Args:
        clock: seconds of a clock that is never put back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[int, float] = {}
        self.requests: dict[str, Histogram] = {}
        """By operation: how long the final answer took."""
        self.request_errors: Counter[tuple[str, str]] = Counter()
        """By operation and status."""
        self.load_seconds = Histogram(LOAD_SECONDS)
        self.loaded_bytes = 0
        self.load_failures = Counter(dict.fromkeys(CAUSES, 0))
        """By cause, each from the start: the increase of what has just appeared is nothing."""
        self.publication_failures = Counter(dict.fromkeys(CAUSES, 0))

    def answered(self, operation: str, status: str | None, opened: float) -> None:
        """A request has its final answer.

        Args:
            status: of an error; None: there was none.
            opened: when it came, by the clock.
        """
        histogram = self.requests.get(operation)
        if histogram is None:
            histogram = self.requests[operation] = Histogram(REQUEST_SECONDS)
        histogram.add(self._clock() - opened)
        if status is not None:
            self.request_errors[operation, status] += 1

    def note(self, event: str, detail: Mapping[str, Any]) -> None:
        """What the books log; only events in `MEASURED` change anything."""
        if event == "load-started":
            self._loads[detail["set"]] = self._clock()
        elif event == "set-sealed":
            began = self._loads.pop(detail["set"], None)
            if began is not None:
                self.load_seconds.add(self._clock() - began)
                self.loaded_bytes += detail["nbytes"]
        elif event == "set-failed":
            is_load = self._loads.pop(detail["set"], None) is not None
            failures = self.load_failures if is_load else self.publication_failures
            failures[cause_of(detail.get("status"), detail.get("reason"))] += 1
        elif event == "same-content":
            self._loads.pop(detail["set"], None)
