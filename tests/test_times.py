"""When things on the books happened, and how fast a load goes."""

from __future__ import annotations

import pytest

from broker.times import MOST_FORGOTTEN, WINDOW_SECONDS, Pace, Times


class Clock:
    """Both clocks of `Times`, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def times_of(clock: Clock, known: set[int]) -> Times:
    return Times(known, wall=clock, monotonic=clock)


# --- pace ---------------------------------------------------------------------------------------


def test_a_steady_load() -> None:
    """What is done a second, once two reports have come."""
    pace = Pace(0.0)
    assert pace.rate(0.0) is None
    pace.note("reading", 0, 1.0)
    assert pace.rate(1.0) is None
    pace.note("reading", 100, 2.0)
    assert pace.rate(2.0) == 100
    assert pace.quiet(5.0) == 3.0


def test_a_load_that_stops() -> None:
    """Its rate falls towards nothing while no report comes."""
    pace = Pace(0.0)
    pace.note("reading", 0, 0.0)
    pace.note("reading", 100, 1.0)
    assert pace.rate(4.0) == 25


def test_only_the_latest_counts() -> None:
    """A load that was slow at its beginning is not called slow for ever."""
    pace = Pace(0.0)
    for second in range(100):
        pace.note("reading", second if second < 50 else 50 + (second - 50) * 1000, float(second))
    assert pace.rate(99.0) == pytest.approx(1000, rel=1 / WINDOW_SECONDS)


@pytest.mark.parametrize(("stage", "done"), [("hashing", 200), ("reading", 10)])
def test_another_stage(stage: str, done: int) -> None:
    """A new stage, or one that begins again, has a rate of its own."""
    pace = Pace(0.0)
    pace.note("reading", 0, 0.0)
    pace.note("reading", 100, 1.0)
    pace.note(stage, done, 2.0)
    assert pace.rate(2.0) is None


# --- times --------------------------------------------------------------------------------------


def test_the_life_of_a_set(clock: Clock) -> None:
    """Begun, sealed, leased, given back: each at its moment; sealed sets have no pace."""
    times = times_of(clock, {1})
    times.note("load-started", {"set": 1})
    clock.now += 1
    times.progressed(1, "reading", 5)
    assert times.of(1).pace is not None
    times.note("set-sealed", {"set": 1})
    assert (times.of(1).begun, times.of(1).sealed, times.of(1).pace) == (1000.0, 1001.0, None)
    clock.now += 1
    times.note("lease-granted", {"set": 1, "session": 7, "lease": "w"})
    assert (times.of(1).used, times.leases) == (1002.0, {(7, "w"): 1002.0})
    clock.now += 1
    times.note("lease-ended", {"set": 1, "session": 7, "lease": "w"})
    assert (times.of(1).used, times.leases) == (1003.0, {})


@pytest.mark.parametrize(
    ("event", "detail"),
    [("claim-granted", {"set": 1}), ("claim-inherited", {"set": 9, "by": 1})],
)
def test_a_publication_begins(clock: Clock, event: str, detail: dict[str, int]) -> None:
    """A claim begins a set, also one that is inherited."""
    times = times_of(clock, {1})
    times.note(event, detail)
    assert times.of(1).begun == 1000.0


def test_what_an_earlier_server_knew(clock: Clock) -> None:
    """A set's age outlives the server; one that nobody knows stays unknown."""
    times = times_of(clock, {1, 2})
    times.adopt(1, 500.0)
    times.adopt(2, 0.0)
    assert (times.sealed(1), times.of(2).sealed) == (500.0, None)


def test_what_is_not_known(clock: Clock) -> None:
    """Of a set that nobody has told of there are no times, and asking leaves nothing behind."""
    times = times_of(clock, set())
    assert times.of(3).begun is None
    assert not times._sets


def test_sets_that_are_gone_are_forgotten(clock: Clock) -> None:
    """A broker that loads and evicts for years keeps no more than a bounded number of times."""
    known: set[int] = {0}
    times = times_of(clock, known)
    for number in range(10 * MOST_FORGOTTEN):
        times.note("load-started", {"set": number})
    assert len(times._sets) <= MOST_FORGOTTEN + 2
    assert times.of(0).begun == 1000.0
