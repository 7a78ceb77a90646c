"""The port for metrics: what scrapers ask for, and what is answered when something goes wrong."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, cast

import pytest

from broker.metrics.endpoint import Endpoint, Page
from broker.metrics.snapshot import Snapshot
from tests.metrics.test_snapshot import World


@pytest.mark.parametrize(
    "version",
    ["version=x", "version=9.a.b; escaping=values", "version=1.0.0; escaping=x\r\n y", "version="],
)
def test_an_odd_version_is_answered(version: str) -> None:
    """A version that is none is no mistake of the broker's: a page comes in some known form."""
    content_type, text = Page(World().snapshot()).text(f"application/openmetrics-text; {version}")
    assert content_type.isprintable()
    assert b"# TYPE" in text


class OwnLoop:
    """Runs what an endpoint hands to its loop in the test's thread."""

    def __init__(self) -> None:
        self.accept: Callable[[int], None] | None = None
        self.calls: Queue[Callable[[], None]] = Queue()

    def add(self, _descriptor: int, _events: int, callback: Callable[[int], None]) -> None:
        self.accept = callback

    def remove(self, _descriptor: int) -> None:
        """It is never polled."""

    def call_later(self, _seconds: float, _callback: Callable[[], None]) -> None:
        """No time passes here."""

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.calls.put(callback)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def no_snapshot() -> Snapshot:
    raise RuntimeError("a mistake of ours")


def no_number() -> Snapshot:
    return cast("Snapshot", object())


@pytest.mark.parametrize("collect", [no_snapshot, no_number])
def test_a_mistake_of_ours_is_told(
    collect: Callable[[], Snapshot], listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """The scraper gets a 500, the log one event with the traceback, and the loop goes on."""
    loop = OwnLoop()
    endpoint = Endpoint(cast("Any", loop), listener, collect)
    with (
        caplog.at_level(logging.ERROR, "weight-broker"),
        socket.create_connection(listener.getsockname(), timeout=20) as scraper,
    ):
        assert loop.accept is not None
        loop.accept(0)
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        status = scraper.recv(100)
        for _ in range(1 if collect is no_snapshot else 2):
            loop.calls.get(timeout=20)()
    endpoint.close()
    assert b" 500 " in status
    (told,) = (each for each in caplog.records if getattr(each, "event", "") == "metrics-failed")
    assert told.exc_info


def test_no_thread_is_left(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scraper's connection ends, the log says why, and the loop goes on."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = OwnLoop()
    endpoint = Endpoint(cast("Any", loop), listener, World().snapshot)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(listener.getsockname()) as scraper:
        assert loop.accept is not None
        loop.accept(0)
        assert scraper.recv(1) == b""
    assert "can't start new thread" in caplog.text
    endpoint.close()
