"""What the server does of its own accord, later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.custody.actions import FreeSlab
from broker.performing import Performing


class Timers:
    """A loop whose time a test makes pass."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, callback: Any) -> None:
        self.waiting.append((seconds, callback))


def test_writers_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sets are reserved, one timer waits for them; each is told of in its time."""
    now = 100.0
    monkeypatch.setattr("broker.performing.time.monotonic", lambda: now)
    timers = Timers()
    stalled: list[int] = []
    broker: Any = SimpleNamespace(
        keeper=SimpleNamespace(is_gathering=False, is_behind=False, drop_set=lambda _set: None),
        loop=timers,
        books=SimpleNamespace(writer_stalled=stalled.append),
        perform=lambda _actions: None,
        helpers=SimpleNamespace(submit=lambda _key, _call: None),
    )
    performing = Performing(broker)
    for number in range(1000):
        performing._await_seal(number, 60.0)
        if number % 2:
            performing.perform([FreeSlab(number)])
        now += 0.01
    ((_seconds, look),) = timers.waiting
    timers.waiting.clear()
    now = 165.001
    look()
    assert stalled == list(range(0, 501, 2))
    ((seconds, look),) = timers.waiting
    assert 0 < seconds < 0.1
    now += 60
    look()
    assert stalled == list(range(0, 1000, 2))
