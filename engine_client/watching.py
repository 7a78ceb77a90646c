"""Events of a name: a newer generation, an eviction, the broker's end."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from broker import wire
from broker.closing import Closeable
from broker.errors import RequestTimeout, UsageError
from engine_client.deadline import Deadline
from engine_client.session import Session

ANSWER_SECONDS = 10.0
MAX_UNREAD = 1024
"""Events kept for an engine that does not read them."""


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


class Watches:
    """All watches of one client. Usable from several threads, and from a signal's handler.

    No lock: a handler that closes a watch may have interrupted this very thread in the midst of
    opening one, and a watch that is dropped closes wherever that is noticed. Whoever has changed
    what is watched tells the broker, and again if it has changed meanwhile.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[int, weakref.ref[Watch]] = {}
        self._numbers = itertools.count()
        self._is_listening = threading.Lock()  # held from the first watch on

    def open(self, name: str) -> Watch:
        """Raises `Busy` if the session watches too many names, `BrokerLost`, `RequestTimeout`."""
        number = next(self._numbers)
        watch = Watch(name, self, number)
        if self._is_listening.acquire(blocking=False):
            self._session.on_lost(self._on_lost)
            self._session.on_event(self._on_event)
        self._open[number] = weakref.ref(watch)  # first: what comes at once is not missed
        try:
            deadline = Deadline(ANSWER_SECONDS)
            self._session.call("watch", wire.Watch(name), wire.Done, deadline=deadline)
        except BaseException:
            self.forget(number, name)
            raise
        return watch

    def forget(self, number: int, name: str) -> None:
        """No more events for this watch; none of its name if it was the last. Idempotent.

        Waits for nobody. In a forked child it does nothing: the watch is the parent's.
        """
        if self._session.is_inherited or self._open.pop(number, None) is None:
            return
        while self._session.is_usable and not self._is_watched(name):
            self._session.notify("unwatch", wire.Unwatch(name))
            if not self._is_watched(name):
                return
            self._session.notify("watch", wire.Watch(name))  # opened meanwhile, perhaps just before

    def end(self) -> None:
        """The client is closing: who waits for an event is told that there is none. Never waits."""
        for watch in self._watches():
            watch.end()

    def check_process(self) -> None:
        """Raise `UsageError` in a forked child, where no event ever comes."""
        if self._session.is_inherited:
            raise UsageError(
                "this watch was made before a fork, in the parent process; a forked child must "
                "make a client and a watch of its own"
            )

    def _watches(self) -> list[Watch]:
        watches = (reference() for reference in self._open.copy().values())
        return [watch for watch in watches if watch is not None]

    def _is_watched(self, name: str) -> bool:
        return any(watch.name == name for watch in self._watches())

    def _on_event(self, event: wire.Event) -> None:
        typed = _typed(event)
        if typed is None:
            return
        for watch in self._watches():
            if isinstance(typed, BrokerStopping) or watch.name in ("", typed.name):
                watch.put(typed)

    def _on_lost(self) -> None:
        for watch in self._watches():
            watch.put(BrokerStopping("the broker is gone"))


class Watch(Closeable):
    """The events of a name from now on, as an iterator that waits. Also a context manager.

    Events are hints: an engine that does not read for long misses some (the oldest beyond
    `MAX_UNREAD`), so what counts is what `acquire` then says. Ends after `BrokerStopping`, and when
    it or its client is closed or it is dropped. Usable from one thread at a time; `close` from any,
    and from a signal's handler.
    """

    def __init__(self, name: str, watches: Watches, number: int) -> None:
        self.name = name
        self._watches = watches
        self._forget = weakref.finalize(self, watches.forget, number, name)
        self._forget.atexit = False
        self._events: queue.SimpleQueue[WatchEvent | None] = queue.SimpleQueue()
        self._ended = False

    def next(self, timeout: float | None = None) -> WatchEvent:
        """The next event. Blocks.

        Raises:
            RequestTimeout: none came within `timeout` seconds.
            UsageError: the watch or its client is closed, or it has ended with the broker; or in a
                forked child.
        """
        event = self._next(timeout)
        if event is None:
            raise UsageError(f"the watch of {self.name!r} is over")
        return event

    def _next(self, timeout: float | None = None) -> WatchEvent | None:
        """The next event, or None if there will be no more."""
        self._watches.check_process()
        deadline = Deadline(timeout)
        if self._ended:
            return None
        try:
            event = self._events.get(timeout=deadline.remaining())
        except queue.Empty:
            raise RequestTimeout(
                f"no event of {self.name!r} within {timeout} s", stage="watching", seconds=timeout
            ) from None
        if event is None or isinstance(event, BrokerStopping):
            self._ended = True
        return event

    def put(self, event: WatchEvent) -> None:
        """For the client: an event has come. Never blocks."""
        if self._events.qsize() >= MAX_UNREAD:
            with contextlib.suppress(queue.Empty):  # read at this moment
                self._events.get_nowait()
        self._events.put(event)

    def close(self) -> None:
        """Stop watching; whoever waits in `next` is told. Idempotent."""
        self._forget()
        self.end()

    def end(self) -> None:
        """For the client: no more events will come. Never blocks."""
        self._events.put(None)

    def __iter__(self) -> Iterator[WatchEvent]:
        while (event := self._next()) is not None:
            yield event


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
