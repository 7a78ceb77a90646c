"""Work that no signal's handler cuts in two.

Python runs handlers in the main thread, between any two steps: one that raises (as Ctrl-C does) may
leave a descriptor that was just opened, or memory that was just mapped, without an owner. So the
main thread has another thread do such work and waits, which may be interrupted anywhere. What
nobody takes any more is dropped by that other thread, in whole.
"""

from __future__ import annotations

import _thread
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from broker.wire import Progress
from engine_client.deadline import Deadline
from engine_client.progress import Show

T = TypeVar("T")

START_SECONDS = 1.0
WITHDRAW_SECONDS = 2.5
"""How long an interrupted caller waits for its work to be undone, which goes on without it."""


def shielded(work: Callable[[Show], T], deadline: Deadline, show: Show | None = None) -> T:
    """What `work` returns. Blocks.

    Args:
        work: called once with what it may tell its progress to; in this thread unless that is the
            main thread, and holding no lock that this thread holds; in this one too while the
            interpreter ends, when no other runs any more. It may be dropped with what it returned.
        deadline: what the work waits under; an interrupt ends it, and with it the waiting.
        show: called in this thread with the progress; what it raises interrupts.
    """
    told: Show = show or _ignore
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return work(told)
    running = _Work(work)
    try:
        if not _workers_here().give(running):
            return work(told)
        while not running.is_over:
            progress = running.messages.get()
            if progress is not None:
                told(progress)
    except BaseException:
        deadline.expire()
        running.drop()
        raise
    return running.take()


def _ignore(_progress: Progress) -> None:
    """Nobody wants to know."""


class _Work(Generic[T]):
    """Work under way in its own thread, and what came of it."""

    def __init__(self, work: Callable[[Show], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self.messages: queue.SimpleQueue[Progress | None] = queue.SimpleQueue()
        self.is_over = False
        self._is_dropped = False
        self._is_begun = threading.Lock()  # held by whoever was first: to begin it, or to drop it

    def run(self) -> None:
        if not self._is_begun.acquire(blocking=False):
            return
        try:
            self._results.append(self._work(self.messages.put))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._errors.append(error)

    def end(self) -> None:
        """Tell who waits; what nobody waits for is dropped here."""
        self.is_over = True
        if self._is_dropped:
            self._results.clear()
        self.messages.put(None)

    def take(self) -> T:
        """The result, or raise the error; the caller's from now on."""
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()

    def drop(self) -> None:
        """Nobody takes the result. Waits a moment for the end of work that has begun."""
        self._is_dropped = True
        if self._is_begun.acquire(blocking=False):
            return
        limit = time.monotonic() + WITHDRAW_SECONDS
        while not self.is_over:
            left = limit - time.monotonic()
            if left <= 0:
                return
            try:
                self.messages.get(timeout=left)
            except queue.Empty:
                return
        self._results.clear()


class _Workers:
    """The threads that do it. One is enough, unless work that was dropped takes long.

    They stay: a new thread may find no memory for its first step in a process that has none left.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._given: queue.SimpleQueue[_Work[Any]] = queue.SimpleQueue()
        self._idle: deque[None] = deque()
        """One entry for each thread that waits for work."""

    def give(self, work: _Work[Any]) -> bool:
        """Have a thread do it; false if there is none and none can be started."""
        try:
            self._idle.pop()
        except IndexError:
            if not self._start():
                return False
        self._given.put(work)
        return True

    def _start(self) -> bool:
        born: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            # Not a threading.Thread, whose `start` waits for ever for one that had no memory.
            _thread.start_new_thread(self._work, (born,))
            born.get(timeout=START_SECONDS)
        except (RuntimeError, queue.Empty):  # no more threads, or the interpreter ends
            return False
        return True

    def _work(self, born: queue.SimpleQueue[None]) -> None:
        born.put(None)
        while True:
            self._do_next()

    def _do_next(self) -> None:
        work = self._given.get()
        try:
            work.run()
        finally:
            self._idle.append(None)  # first: who is told may have more
            work.end()


def _workers_here() -> _Workers:
    """This process's: in a forked child the parent's threads are not there."""
    global _workers
    if _workers.pid != os.getpid():
        _workers = _Workers()
    return _workers


_workers = _Workers()
