"""The latest warnings and errors, for `status`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from broker import logs
from broker.logs import log_event
from broker.troubles import OF_EACH, SHOWN, Troubles


@pytest.fixture
def troubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Troubles]:
    monkeypatch.setattr(logs, "_buckets", {})
    listening = Troubles()
    yield listening
    listening.close()


def test_what_is_trouble(troubles: Troubles) -> None:
    """Warnings and errors with their facts and time; what happens when all is well is none."""
    log_event("set-sealed", set=1)
    log_event("set-failed", level=logging.WARNING, set=2, cause="truncated", path=None)
    log_event("crashed", level=logging.ERROR, cause=ValueError("x" * 1000))
    failed, crashed = troubles.latest()
    assert {key: failed[key] for key in ("event", "set", "cause")} == {
        "event": "set-failed",
        "set": 2,
        "cause": "truncated",
    }
    assert "path" not in failed
    assert failed["time"] <= crashed["time"]
    assert len(crashed["cause"]) < 400


def test_a_flood_drives_out_nothing_else(troubles: Troubles) -> None:
    """Of each event the last few are kept, and of all of them so many are told."""
    log_event("set-failed", level=logging.WARNING, set=1)
    for number in range(50):
        log_event("connection-cut", level=logging.WARNING, pid=number)
    latest = troubles.latest()
    assert [entry["event"] for entry in latest] == ["set-failed"] + ["connection-cut"] * OF_EACH
    assert latest[-1]["pid"] == 49
    for event in ("a", "b", "c", "d"):
        for _ in range(OF_EACH):
            log_event(event, level=logging.WARNING)
    assert len(troubles.latest()) == SHOWN


def test_closed(troubles: Troubles) -> None:
    """A server that ends hears nothing any more."""
    troubles.close()
    log_event("crashed", level=logging.ERROR)
    assert troubles.latest() == []
