"""Events of a name: a newer generation, an eviction, the broker's end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from broker import wire
from broker.errors import BrokerError, RequestTimeout, UsageError
from engine_client.deadline import Deadline
from engine_client.session import Session

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class NewGeneration:
    """A newer generation of the name was sealed: `acquire(name)` or `swap` would get it."""

    name: str
    generation: str
    set: int


@dataclass(frozen=True)
class Evicted:
    """A set of the name is not wanted any more; engines that hold it keep it."""

    name: str
    set: int
    cause: str


@dataclass(frozen=True)
class BrokerStopping:
    """Nothing new can be acquired; what is mapped stays. The last event of every watch."""

    cause: str


WatchEvent: TypeAlias = NewGeneration | Evicted | BrokerStopping


class Watch:
    """The events of a name from now on, as an iterator that waits. Also a context manager.

    Events are hints: an engine that does not read for long may miss some, so what counts is what
    `acquire` then says. Ends after `BrokerStopping`. Usable from one thread at a time.
    """

    def __init__(self, session: Session, name: str) -> None:
        """Raises `Busy` if the session watches too many names, `BrokerLost`, `RequestTimeout`."""
        self.name = name
        self._session = session
        self._events: queue.SimpleQueue[WatchEvent | None] = queue.SimpleQueue()
        self._ended = False
        self._forget = session.on_event(self._on_event)
        session.on_lost(self._on_lost)
        try:
            deadline = Deadline(ANSWER_SECONDS)
            session.call("watch", wire.Watch(name), wire.Done, deadline=deadline)
        except BaseException:
            self._forget()
            raise

    def next(self, timeout: float | None = None) -> WatchEvent:
        """The next event. Blocks.

        Raises:
            RequestTimeout: none came within `timeout` seconds.
            UsageError: the watch is closed, or has ended with the broker.
        """
        if self._ended:
            raise UsageError(f"the watch of {self.name!r} is over")
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            raise RequestTimeout(
                f"no event of {self.name!r} within {timeout} s", stage="watching", seconds=timeout
            ) from None
        if event is None or isinstance(event, BrokerStopping):
            self._ended = True
        if event is None:
            raise UsageError(f"the watch of {self.name!r} is over")
        return event

    def close(self) -> None:
        """Stop watching; whoever waits in `next` is told. Idempotent."""
        self._forget()
        self._events.put(None)
        if self._session.is_usable and not self._ended:
            try:
                deadline = Deadline(ANSWER_SECONDS)
                self._session.call("unwatch", wire.Unwatch(self.name), wire.Done, deadline=deadline)
            except BrokerError:
                return  # the broker is gone, and its watches with it

    def _on_event(self, event: wire.Event) -> None:
        typed = _typed(event)
        if isinstance(typed, BrokerStopping) or (typed is not None and typed.name == self.name):
            self._events.put(typed)

    def _on_lost(self) -> None:
        self._events.put(BrokerStopping("the broker is gone"))

    def __iter__(self) -> Iterator[WatchEvent]:
        while not self._ended:
            yield self.next()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _typed(event: wire.Event) -> WatchEvent | None:
    """An event of a kind this client does not know is none."""
    detail = event.detail
    kinds: dict[str, Callable[[], WatchEvent]] = {
        "new-generation": lambda: NewGeneration(
            str(detail["name"]), str(detail["generation"]), int(detail["set"])
        ),
        "evicted": lambda: Evicted(str(detail["name"]), int(detail["set"]), str(detail["cause"])),
        "broker-stopping": lambda: BrokerStopping(str(detail["cause"])),
    }
    make = kinds.get(event.event)
    try:
        return None if make is None else make()
    except (KeyError, TypeError, ValueError):
        return None
