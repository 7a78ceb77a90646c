"""Work that the main thread has done elsewhere, where no signal's handler runs."""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from broker.errors import NotFound
from broker.wire import Progress
from engine_client.deadline import Deadline
from engine_client.progress import Show
from engine_client.shielded import shielded
from tests.support.clock import eventually

REPORT = Progress("reading", 1, 2)


class Result:
    """Something of which it is seen whether anybody has it."""


def where(_show: Show) -> int:
    return threading.get_ident()


def test_where_it_runs() -> None:
    """The main thread's work runs elsewhere; others do their own."""
    assert shielded(where, Deadline(None)) != threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threading.get_ident).result()
        assert pool.submit(shielded, where, Deadline(None)).result() == other


def test_errors_and_progress() -> None:
    """Both arrive in the thread that waits."""
    told: list[tuple[Progress, int]] = []

    def work(show: Show) -> None:
        show(REPORT)
        raise NotFound("nothing there")

    with pytest.raises(NotFound, match="nothing there"):
        shielded(work, Deadline(None), lambda progress: told.append((progress, 0)))
    assert told == [(REPORT, 0)]


def test_interrupt_ends_the_waiting() -> None:
    """Whoever waits under the deadline is woken, and what the work returns is dropped."""
    made: list[weakref.ref[Result]] = []
    deadline = Deadline(None)

    def work(show: Show) -> Result:
        news: queue.SimpleQueue[str] = queue.SimpleQueue()
        deadline.wake_by(partial(news.put, "woken"))
        show(REPORT)
        assert news.get() == "woken"
        result = Result()
        made.append(weakref.ref(result))
        return result

    def interrupt(_progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shielded(work, deadline, interrupt)
    assert deadline.remaining() == 0
    [result] = made
    eventually(lambda: result() is None, 1, "the end of what nobody takes")
    assert shielded(where, Deadline(None)) != threading.get_ident()
