"""Events of a name: a newer generation, an eviction, the broker's end."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from broker import wire
from broker.closing import Closeable
from broker.errors import BrokerError, RequestTimeout, UsageError
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
    """All watches of one client. Usable from several threads."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        # Replaced, never changed: the I/O thread reads it while another waits under the lock.
        self._open: tuple[Watch, ...] = ()
        self._is_listening = False

    def open(self, name: str) -> Watch:
        """Raises `Busy` if the session watches too many names, `BrokerLost`, `RequestTimeout`."""
        watch = Watch(name, self)
        with self._lock:
            if not self._is_listening:
                self._session.on_event(self._on_event)
                self._session.on_lost(self._on_lost)
                self._is_listening = True
            self._open = (*self._open, watch)  # first: what comes at once is not missed
            try:
                self._tell("watch", wire.Watch(name))
            except BaseException:
                self._forget(watch)
                raise
        return watch

    def close(self, watch: Watch) -> None:
        """No more events for this watch; none of its name if it was the last. Idempotent.

        In a forked child it does nothing: the watch is the parent's.
        """
        if self._session.is_inherited:
            return
        with self._lock:
            if watch not in self._open:
                return
            self._forget(watch)
            is_last = all(other.name != watch.name for other in self._open)
            if not is_last or not self._session.is_usable:
                return
            try:
                self._tell("unwatch", wire.Unwatch(watch.name))
            except BrokerError:
                return  # the broker is gone, and its watches with it

    def end(self) -> None:
        """The client is closing: who waits for an event is told that there is none. Never waits."""
        for watch in self._open:
            watch.end()

    def check_process(self) -> None:
        """Raise `UsageError` in a forked child, where no event ever comes."""
        if self._session.is_inherited:
            raise UsageError(
                "this watch was made before a fork, in the parent process; a forked child must "
                "make a client and a watch of its own"
            )

    def _forget(self, watch: Watch) -> None:
        self._open = tuple(other for other in self._open if other is not watch)

    def _tell(self, operation: str, message: wire.Message) -> None:
        self._session.call(operation, message, wire.Done, deadline=Deadline(ANSWER_SECONDS))

    def _on_event(self, event: wire.Event) -> None:
        typed = _typed(event)
        if typed is None:
            return
        for watch in self._open:
            if isinstance(typed, BrokerStopping) or watch.name in ("", typed.name):
                watch.put(typed)

    def _on_lost(self) -> None:
        for watch in self._open:
            watch.put(BrokerStopping("the broker is gone"))


class Watch(Closeable):
    """The events of a name from now on, as an iterator that waits. Also a context manager.

    Events are hints: an engine that does not read for long misses some (the oldest beyond
    `MAX_UNREAD`), so what counts is what `acquire` then says. Ends after `BrokerStopping`, and when
    it or its client is closed. Usable from one thread at a time; `close` from any.
    """

    def __init__(self, name: str, watches: Watches) -> None:
        self.name = name
        self._watches = watches
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
        self._watches.close(self)
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
