"""Where moments lie on the page."""

from __future__ import annotations

import pytest

from broker.report.axis import MOST_TICKS, Axis
from broker.report.rows import lasting
from broker.report.story import Span

DAY = 86400.0


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1, 7, 59, 600, 5000, DAY, 40 * DAY, 20 * 365 * DAY])
def test_ticks(seconds: float) -> None:
    """Any length of time has a few round moments, all inside, each with a label of its own."""
    begin = 1_700_000_123.4
    ticks = Axis(begin, begin + seconds).ticks()
    assert 1 <= len(ticks) <= MOST_TICKS + 1
    assert all(0 <= float(tick.left.rstrip("%")) <= 100 for tick in ticks)
    assert len({tick.label for tick in ticks}) == len(ticks)


def test_a_label_at_the_end() -> None:
    """A label that would leave the page stands before its tick."""
    sides = {tick.left: tick.side for tick in Axis(0, 100).ticks()}
    assert (sides["75.000%"], sides["90.000%"]) == ("behind", "before")


def test_spans() -> None:
    """What goes on reaches to the end, what is outside is cut."""
    axis = Axis(100, 200)
    assert (axis.left(150), axis.width(Span(150, 175))) == ("50.000%", "25.000%")
    assert (axis.left(0), axis.width(Span(0, 150))) == ("0.000%", "50.000%")
    assert axis.width(Span(150)) == "50.000%"
    assert axis.width(Span(150, 140)) == "0.000%"  # a clock that was put back


def test_what_cannot_be_told_apart() -> None:
    """Thousands of leases in a row are as many bars as there are gaps that can be seen."""
    axis = Axis(0, 1500)
    spans = [Span(number / 10, number / 10 + 0.09) for number in range(5000)]
    assert axis.merged([*spans, Span(1000.0)]) == [Span(0.0, spans[-1].end), Span(1000.0)]
    assert axis.merged([Span(1.0, 9.0), Span(2.0, 3.0)]) == [Span(1.0, 9.0)]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.1234, "0.123 s"), (61, "61 s"), (600, "10.0 min"), (7200, "2.0 h"), (3 * DAY, "3.0 days")],
)
def test_lengths_of_time(seconds: float, said: str) -> None:
    """Lengths are said as people say them."""
    assert lasting(seconds) == said
