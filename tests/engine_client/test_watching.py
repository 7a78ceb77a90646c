"""Watches over a session that only hands events on: order, bounds and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from broker import wire
from broker.errors import Busy, UsageError
from engine_client import BrokerStopping, Evicted, NewGeneration
from engine_client.session import Session
from engine_client.watching import MAX_UNREAD, Watch, Watches


class ToldSession(Session):
    """Notes what is asked, and lets a test be the broker."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusal: Exception | None = None
        self.tell: Callable[[wire.Event], None] = lambda event: None
        self.lose: Callable[[], None] = lambda: None
        self.inherited = False
        self.meanwhile: list[Callable[[], object]] = []
        """What another thread does while something is told."""

    def call(self, operation: str, message: Any, *given: Any, **options: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(f"{operation} {message.name}")
        return wire.Done()

    def notify(self, operation: str, message: Any) -> None:
        self.asked.append(f"{operation} {message.name}")
        self.meanwhile.pop(0)() if self.meanwhile else None

    def on_event(self, callback: Callable[[wire.Event], None]) -> Callable[[], None]:
        self.tell = callback
        return lambda: None

    def on_lost(self, callback: Callable[[], None]) -> None:
        self.lose = callback

    @property
    def is_inherited(self) -> bool:
        return self.inherited

    @property
    def is_usable(self) -> bool:
        return True


@pytest.fixture
def session() -> ToldSession:
    return ToldSession()


def sealed(name: str, number: int) -> wire.Event:
    return wire.Event("new-generation", {"name": name, "generation": str(number), "set": number})


def test_the_broker_is_told_of_a_name_until_its_last_watch_ends(session: ToldSession) -> None:
    """Two watches of a name: only the second one's end says unwatch."""
    watches = Watches(session)
    first, second, other = watches.open("m"), watches.open("m"), watches.open("n")
    first.close()
    assert session.asked == ["watch m", "watch m", "watch n"]
    second.close()
    second.close()
    other.close()
    assert session.asked[3:] == ["unwatch m", "unwatch n"]


def test_events_of_kinds_that_are_not_known_are_none(session: ToldSession) -> None:
    """A broker of a later version may tell more, or tell it in another way."""
    watch = Watches(session).open("m")
    session.tell(wire.Event("moved", {"name": "m"}))
    session.tell(wire.Event("new-generation", {"name": "m"}))
    session.tell(wire.Event("new-generation", {"name": "m", "generation": "1", "set": "one"}))
    session.tell(wire.Event("evicted", {"name": "m", "set": 1, "cause": "evict"}))
    assert watch.next(1) == Evicted("m", 1, "evict")


def test_who_does_not_read_loses_the_oldest(session: ToldSession) -> None:
    """What is kept is bounded, and the newest is in it."""
    watch = Watches(session).open("m")
    for number in range(MAX_UNREAD + 10):
        session.tell(sealed("m", number))
    assert watch.next(1) == NewGeneration("m", "10", 10)
    session.tell(wire.Event("broker-stopping", {"cause": "asked to"}))
    events = list(watch)
    assert len(events) == MAX_UNREAD
    assert events[-1] == BrokerStopping("asked to")


def test_a_broker_that_is_gone_ends_every_watch(session: ToldSession) -> None:
    """Of every name, and of all names."""
    watches = Watches(session)
    opened = [watches.open(name) for name in ("m", "n", "")]
    session.lose()
    assert [list(watch) for watch in opened] == [[BrokerStopping("the broker is gone")]] * 3


def test_a_refusal_leaves_nothing(session: ToldSession) -> None:
    """A watch too many is not opened."""
    watches = Watches(session)
    session.refusal = Busy("a session may watch 64 names")
    with pytest.raises(Busy):
        watches.open("m")
    session.refusal = None
    assert session.asked == ["unwatch m"]  # perhaps it was a time-out, and the broker does watch
    watches.open("m").close()
    assert session.asked[1:] == ["watch m", "unwatch m"]


def test_an_interrupt_leaves_nothing(session: ToldSession) -> None:
    """Nobody has the watch that an interrupted call would have returned."""
    watches = Watches(session)
    session.refusal = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        watches.open("m")
    assert session.asked == ["unwatch m"]


def test_a_watch_that_is_dropped_is_closed(session: ToldSession) -> None:
    """With its last reference, as an iterator's own is."""
    watches = Watches(session)
    watch = watches.open("m")
    events = iter(watch)
    del watch
    session.tell(sealed("m", 1))
    assert next(events) == NewGeneration("m", "1", 1)
    assert session.asked == ["watch m"]
    del events
    assert session.asked == ["watch m", "unwatch m"]


def test_a_name_that_is_watched_again_meanwhile(session: ToldSession) -> None:
    """Another thread opens a watch of the name while the last one's end is told: it is told too."""
    watches = Watches(session)
    opened: list[Watch] = []
    session.meanwhile = [lambda: opened.append(watches.open("m")), lambda: opened.pop().close()]
    watches.open("m").close()
    assert session.asked == ["watch m", "unwatch m", "watch m", "watch m", "unwatch m", "unwatch m"]
    session.meanwhile = [lambda: opened.append(watches.open("m"))]
    watches.open("m").close()
    assert session.asked[6:] == ["watch m", "unwatch m", "watch m", "watch m"]


def test_closing_ends_who_waits(session: ToldSession) -> None:
    """Also from another thread."""
    watch = Watches(session).open("m")
    seen: list[list[Any]] = []
    reader = threading.Thread(target=lambda: seen.append(list(watch)))
    reader.start()
    watch.close()
    reader.join(10)
    assert seen == [[]]


def test_a_forked_child_hears_nothing_and_is_told_so(session: ToldSession) -> None:
    """It would wait for ever; closing there is no matter of the parent's."""
    watch: Watch = Watches(session).open("m")
    session.inherited = True
    with pytest.raises(UsageError, match=r"^this watch was made before a fork"):
        watch.next()
    watch.close()
    assert session.asked == ["watch m"]
