"""The broker's one thread: descriptors, timers, results of helper threads. Knows no protocol."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
HUNG_UP = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Loop:
    """Calls back from one thread. Only `call_soon_threadsafe` may be used from another.

    Attributes:
        turn_began: `time.monotonic()` at which the current turn began.
        slowest_turn: seconds of the longest turn so far.
    """

    def __init__(self) -> None:
        self.turn_began = time.monotonic()
        self.slowest_turn = 0.0
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._added: set[int] = set()
        """In this turn: what epoll saw of such a number before was about another descriptor."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._soon: deque[Callable[[], None]] = deque()
        self._running = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add(self._wake, READ, self._on_wake)

    def add(self, descriptor: int, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the events seen, as long as they last (level-triggered)."""
        self._epoll.register(descriptor, events)
        self._callbacks[descriptor] = callback
        self._added.add(descriptor)

    def modify(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Stop watching; before the descriptor is closed. Unknown descriptors are no error."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), callback))

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """From any thread: run `callback` on the loop, in the order of the calls."""
        self._soon.append(callback)
        os.eventfd_write(self._wake, 1)

    def run(self, drain: Callable[[], bool]) -> None:
        """Turn until `stop`.

        Args:
            drain: handles pending input that epoll does not report by level (a ZeroMQ socket's
                descriptor is edge-triggered); true if there is some for the next turn.
        """
        self._running = True
        while self._running:
            more = drain()
            now = time.monotonic()
            self.slowest_turn = max(self.slowest_turn, now - self.turn_began)
            self._added.clear()
            events = self._epoll.poll(0 if more else self._wait(now))
            self.turn_began = time.monotonic()
            for descriptor, seen in events:
                callback = self._callbacks.get(descriptor)
                if callback is not None and descriptor not in self._added:
                    callback(seen)
            if self._timers and self._timers[0][0] <= self.turn_began:
                self._run_timers()

    def run_pending(self) -> None:
        """Run what other threads have handed over, outside `run`."""
        while self._soon:
            self._soon.popleft()()

    def stop(self) -> None:
        """End `run` after the current turn."""
        self._running = False

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    def _wait(self, now: float) -> float | None:
        if not self._running:
            return 0
        return max(0.0, self._timers[0][0] - now) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _on_wake(self, _events: int) -> None:
        os.eventfd_read(self._wake)
        for _ in range(len(self._soon)):
            self._soon.popleft()()


class Helpers:
    """Threads for everything that may block, one call at a time per key, in order."""

    def __init__(self, loop: Loop, threads: int = 4) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="broker-helper")
        self._queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._start_all(threads)

    def _start_all(self, threads: int) -> None:
        """Later the system may refuse a thread, with a request half done."""
        all_there = threading.Barrier(threads + 1)
        try:
            for _ in range(threads):
                self._pool.submit(all_there.wait)
        except RuntimeError:
            all_there.abort()
            raise
        all_there.wait()

    def submit(
        self,
        key: Hashable,
        call: Callable[[], T],
        done: Callable[[T | BaseException], None] | None = None,
    ) -> None:
        """Run `call` in a helper thread after earlier calls of this key; `done` on the loop.

        `done` gets the result, or the exception the call raised.
        """

        def run() -> None:
            try:
                result: T | BaseException = call()
            except Exception as error:  # noqa: BLE001 - delivered to `done`
                result = error
            if done is not None:
                self._loop.call_soon_threadsafe(lambda: done(result))
            elif isinstance(result, BaseException):
                self._loop.call_soon_threadsafe(lambda: _reraise(result))
            self._next(key)

        with self._lock:
            queue = self._queues.get(key)
            if queue is not None:
                queue.append(run)
                return
            self._queues[key] = deque()
        self._start(run)

    def _next(self, key: Hashable) -> None:
        with self._lock:
            queue = self._queues[key]
            if not queue:
                del self._queues[key]
                return
            run = queue.popleft()
        self._start(run)

    def _start(self, run: Callable[[], None]) -> Future[Any]:
        return self._pool.submit(run)

    def close(self) -> None:
        """Wait for the calls under way."""
        self._pool.shutdown(wait=True)


def _reraise(error: BaseException) -> None:
    raise error
