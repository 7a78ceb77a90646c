"""What the books log as trouble, and what who is in trouble is told."""

from __future__ import annotations

from broker import wire
from broker.custody.actions import Reply
from broker.errors import OverBudget
from tests.custody.desk import DEVICE, KILLED, LIMIT, Desk, source


def troubles(desk: Desk) -> list[str]:
    return [logged.event for logged in desk.logged if logged.trouble]


def close(desk: Desk, session: int) -> None:
    desk.call(lambda: desk.books.end_session(session, KILLED, closed=True))


def test_an_orderly_life_is_no_trouble() -> None:
    """A load, a lease, the ends of loader and engine, an eviction."""
    desk = Desk()
    engine = desk.engine()
    loader = desk.start(source(1), engine)
    desk.reserve(loader.session)
    desk.created(loader.set)
    desk.seal(loader.session, "blake3:a", 1)
    desk.frozen(loader.set)
    close(desk, loader.session)
    close(desk, engine)
    desk.evict(loader.set)
    assert desk.logged[-1].event == "set-evicted"
    assert troubles(desk) == []


def test_deaths_and_failures_are_trouble() -> None:
    """A death, and the load that fails with it; a load that is evicted was meant to end."""
    desk = Desk()
    desk.end(desk.start(source(1)).session)
    assert troubles(desk) == ["set-failed", "session-ended"]
    desk.evict(desk.start(source(2, "shape-b")).set)
    assert troubles(desk) == ["set-failed", "session-ended"]
    assert desk.logged[-1].event == "set-failed"


def test_whoever_runs_out_of_memory_is_told_the_limit() -> None:
    """A loader knows what its device has, the books what the broker may hold of it."""
    desk = Desk()
    loader = desk.start(source(1))
    asked = desk.ticket
    desk.reserve(loader.session, 300)
    desk.created(loader.set)
    request = wire.Abandon("load", "over-budget", 'no room\n{"free": 7}')
    actions = desk.books.abandon(loader.session, 0, request)
    (error,) = (a.body for a in actions if isinstance(a, Reply) and a.ticket == asked)
    assert isinstance(error, OverBudget)
    assert error.fields == {"requested": 300, "limit": LIMIT, "device": DEVICE, "free": 7}
