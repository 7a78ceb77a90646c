"""The port where metrics are fetched: connections in threads of their own, on a short rein.

The loop accepts, and gives each thread a copy of the numbers that does not change any more.
Scrapers can be many, slow or hostile: there are so many connections at once, so many a second, so
long each, and copying the numbers has a bounded share of the loop's time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from broker.logs import log_event
from broker.loop import READ, Loop
from broker.metrics.address import name_of
from broker.metrics.families import families
from broker.metrics.snapshot import Snapshot

PLACES = 16
"""Connections at once; a further one takes the place of the oldest."""
ACCEPT_BATCH = 4
PAUSE_SECONDS = 0.05
"""Between batches: 80 connections a second are accepted, the rest waits in the system's queue."""
FRESH_SECONDS = 0.1
"""So old may the numbers be that a scraper gets; or, where there are very many,"""
FRESH_TIMES = 20
"""so many times as long as copying them took: scrapers have a twentieth of the loop's time."""
IDLE_SECONDS = 5.0
"""How long a scraper may take for a piece of its request, and for reading the whole answer."""
WHOLE_SECONDS = 15.0
"""How long a connection may live."""


class Page:
    """One moment's numbers as text, in whatever form scrapers ask for. For any thread."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Numbers(snapshot))
        self._texts: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def text(self, accept: str) -> tuple[str, bytes]:
        """Content type and text for a scraper that accepts these."""
        encode, content_type = _encoder(accept)
        with self._lock:
            if content_type not in self._texts:
                self._texts[content_type] = encode(self._registry)
            return content_type, self._texts[content_type]


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Plain text also for whoever asks for what the library cannot make out."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        return choose_encoder("")
    # It repeats what was asked for, and a header that was folded has line ends in it.
    return (encode, content_type) if content_type.isprintable() else choose_encoder("")


class _Numbers(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        """Nothing is collected when this is registered."""
        return []

    def collect(self) -> list[Metric]:
        return list(families(self._snapshot))


class Endpoint:
    """Answers scrapers until `close`. Belongs to the loop's thread.

    Args:
        listener: listening and non-blocking; owned from now on. The keeper has it too, so that
            scrapers who come while a server is replaced wait for the next one.
        collect: makes a snapshot.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, collect: Callable[[], Snapshot]
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._collect = collect
        self._page: Page | None = None
        self._page_ends = 0.0
        self._open: dict[socket.socket, None] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        """Around `_is_closed`: the loop may not be called any more once it is closed."""
        log_event("metrics-served", address=name_of(listener))
        self._listen()

    def close(self) -> None:
        """Accept nobody any more; answers under way are cut off."""
        with self._lock:
            self._is_closed = True
        self._loop.remove(self._listener.fileno())
        self._listener.close()
        for connection in self._open:
            _cut(connection)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add(self._listener.fileno(), READ, lambda _events: self._accept())

    def _accept(self) -> None:
        self._loop.remove(self._listener.fileno())
        self._loop.call_later(PAUSE_SECONDS, self._listen)
        for _ in range(ACCEPT_BATCH):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log_event("metrics-failed", level=logging.ERROR, cause=error)
                return
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        if len(self._open) >= PLACES:
            _cut(next(iter(self._open)))
        self._open[connection] = None
        page = self._page_or_none()
        self._loop.call_later(WHOLE_SECONDS, lambda: self._cut_if_open(connection))
        answering = threading.Thread(
            target=self._answer, args=(connection, page), name="broker-metrics", daemon=True
        )
        try:
            answering.start()
        except RuntimeError as error:  # the system has no thread for it
            log_event("metrics-failed", level=logging.ERROR, cause=error)
            self._end(connection)

    def _page_or_none(self) -> Page | None:
        try:
            return self._fresh_page()
        except Exception as error:  # noqa: BLE001 - metrics end no server
            _log_mistake(error)
            return None

    def _fresh_page(self) -> Page:
        began = time.monotonic()
        if self._page is None or began > self._page_ends:
            self._page = Page(self._collect())
            now = time.monotonic()
            self._page_ends = now + max(FRESH_SECONDS, FRESH_TIMES * (now - began))
        return self._page

    def _cut_if_open(self, connection: socket.socket) -> None:
        if connection in self._open:
            _cut(connection)

    def _answer(self, connection: socket.socket, page: Page | None) -> None:
        """In a thread of its own, which leaves the connection's end to the loop: a descriptor that
        is closed here could be another one's when the loop cuts it off."""
        try:
            with contextlib.suppress(OSError):  # the scraper has gone, or was cut off
                _Handler(connection, page, self._tell)
        except Exception as error:  # noqa: BLE001 - else it is written past the log
            self._tell(error)
        finally:
            self._on_loop(lambda: self._end(connection))

    def _tell(self, error: Exception) -> None:
        """In the log, which belongs to the loop's thread."""
        self._on_loop(lambda: _log_mistake(error))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(callback)

    def _end(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        connection.close()


def _log_mistake(error: Exception) -> None:
    known = (type(error), error, error.__traceback__)
    log_event("metrics-failed", level=logging.ERROR, exc_info=known, cause=repr(error))


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request of a scraper."""

    timeout = IDLE_SECONDS
    server_version = "weight-broker"
    sys_version = ""

    def __init__(
        self, connection: socket.socket, page: Page | None, tell: Callable[[Exception], None]
    ) -> None:
        self._page = page
        self._tell = tell
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]  # it needs no server

    def do_GET(self) -> None:
        """Answer one request."""
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
            return
        answer = self._text()
        if answer is None:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the broker's log has the cause")
            return
        content_type, text = answer
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _text(self) -> tuple[str, bytes] | None:
        """None: a mistake of ours, which is told in the log."""
        if self._page is None:
            return None
        try:
            return self._page.text(self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - the scraper is to know that it is our mistake
            self._tell(error)
            return None

    def log_message(self, *_args: object) -> None:
        """The broker's log is not for every scrape."""
