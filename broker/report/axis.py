"""Where moments lie on the page, in percent of its width."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

from broker.report.story import Span

LEAST_SECONDS = 1.0
"""A journal with one event in it has a width too."""
MOST_TICKS = 8
FINEST = 1 / 1500
"""Of the axis: about a pixel. What is closer together is drawn as one."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * count for count in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * count for count in (1, 2, 3, 6, 12)),
    *(_DAY * count for count in (1, 2, 7, 14, 30, 90, 365)),
)


LATE = 0.85
"""Behind this share of the axis a label on the right of its tick would leave a narrow page."""


@dataclass(frozen=True)
class Tick:
    """A moment with a label; `side` is where that stands."""

    left: str
    label: str
    side: str


class Axis:
    """The time from `begin` to `end`, in seconds since 1970."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._end = max(end, begin + LEAST_SECONDS)

    @property
    def seconds(self) -> float:
        return self._end - self._begin

    def share(self, when: float) -> float:
        """From 0 at the begin to 1 at the end; what is outside lies at the nearest of both."""
        return min(1.0, max(0.0, (when - self._begin) / self.seconds))

    def left(self, when: float) -> str:
        """A CSS length."""
        return percent(self.share(when))

    def width(self, span: Span) -> str:
        """A CSS length; a span that goes on reaches to the end."""
        end = 1.0 if span.end is None else self.share(span.end)
        return percent(max(0.0, end - self.share(span.start)))

    def merged(self, spans: Iterable[Span]) -> list[Span]:
        """The same spans, oldest first, with those as one that are not to be told apart."""
        merged: list[Span] = []
        for span in spans:
            last = merged[-1] if merged else None
            if last is not None and last.end is not None and self._is_close(last.end, span.start):
                last.end = None if span.end is None else max(last.end, span.end)
            else:
                merged.append(Span(span.start, span.end))
        return merged

    def _is_close(self, earlier: float, later: float) -> bool:
        return later - earlier < FINEST * self.seconds

    def ticks(self) -> list[Tick]:
        """Round moments, in UTC."""
        step = next((s for s in _STEPS if self.seconds / s <= MOST_TICKS), self.seconds / 4)
        first = -(-self._begin // step) * step
        count = int((self._end - first) // step) + 1
        return [self._tick(first + index * step, step) for index in range(count)]

    def _tick(self, moment: float, step: float) -> Tick:
        side = "before" if self.share(moment) > LATE else "behind"
        return Tick(self.left(moment), _label(moment, step), side)


def percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def _label(when: float, step: float) -> str:
    moment = datetime.fromtimestamp(when, timezone.utc)
    if step >= _DAY:
        return f"{moment:%d %b}"
    return f"{moment:%H:%M:%S}" if step < _MINUTE else f"{moment:%H:%M}"
