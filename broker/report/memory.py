"""How a device's memory was used, as areas one above the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from broker.amounts import human
from broker.commands.text import shown
from broker.report.axis import FINEST, Axis
from broker.report.story import MemoryPoint

WIDTH = 1000
HEIGHT = 100

_LAYERS: tuple[tuple[str, Callable[[MemoryPoint], int]], ...] = (
    ("reserved", lambda point: point.used),
    ("idle", lambda point: point.leased + point.idle),
    ("leased", lambda point: point.leased),
)
"""From the back to the front: each is drawn down to the ground."""


@dataclass(frozen=True)
class Area:
    kind: str
    path: str
    """Of an SVG of `WIDTH` by `HEIGHT`."""


@dataclass(frozen=True)
class MemoryChart:
    device: str
    limit: str
    most: str
    now: str
    areas: list[Area]


def memory_chart(device: str, points: list[MemoryPoint], axis: Axis) -> MemoryChart:
    """The chart of one device; its top is the limit."""
    last = points[-1]
    most = max(points, key=lambda point: point.used)
    drawn = _thinned(points, axis)
    top = max(*(point.limit for point in points), most.used, 1)
    return MemoryChart(
        device=shown(device),
        limit=human(last.limit),
        most=human(most.used),
        now=", ".join(
            f"{name} {human(nbytes)}"
            for name, nbytes in (
                ("leased", last.leased),
                ("idle", last.idle),
                ("reserved", last.reserved),
            )
        ),
        areas=[Area(kind, _path(drawn, height, top, axis)) for kind, height in _LAYERS],
    )


def _thinned(points: list[MemoryPoint], axis: Axis) -> list[MemoryPoint]:
    """Of the points of one pixel those with the most in use, and the last of all."""
    kept: list[MemoryPoint] = []
    for point in points:
        is_close = bool(kept) and axis.share(point.time) - axis.share(kept[-1].time) < FINEST
        if is_close and len(kept) > 1:
            kept[-1] = max(kept[-1], point, key=lambda each: each.used)
        else:
            kept.append(point)
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _path(
    points: list[MemoryPoint], height: Callable[[MemoryPoint], int], top: int, axis: Axis
) -> str:
    """Steps: a value holds until the next is known."""
    steps = (f"H{_x(point, axis)}V{HEIGHT * (1 - height(point) / top):.2f}" for point in points)
    return f"M{_x(points[0], axis)},{HEIGHT}{''.join(steps)}H{WIDTH}V{HEIGHT}Z"


def _x(point: MemoryPoint, axis: Axis) -> str:
    return f"{WIDTH * axis.share(point.time):.2f}"
