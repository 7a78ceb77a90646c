"""Closing aside: what blocks holds up nobody, and nothing is left open."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from broker import strays
from broker.packets import close_received
from broker.strays import THREADS, Closer, close_stray
from tests.support.clock import eventually


@pytest.fixture
def closed() -> list[int]:
    """What `closer` has closed."""
    return []


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Set when closes of negative numbers may end."""
    may_end = threading.Event()
    yield may_end
    may_end.set()


@pytest.fixture
def closer(closed: list[int], stuck: threading.Event) -> Closer:
    def close(descriptor: int) -> None:
        if descriptor < 0:
            stuck.wait()
        closed.append(descriptor)

    return Closer(close)


def test_others_do_not_wait(closer: Closer, closed: list[int], stuck: threading.Event) -> None:
    """All but one of the threads may be stuck."""
    for number in range(1, THREADS):
        closer.close_aside(-number)
        closer.close_aside(number)
    eventually(lambda: len(closed) == THREADS - 1, 2, "every close that does not block")
    stuck.set()
    eventually(lambda: len(closed) == 2 * (THREADS - 1), 2, "the others")
    assert set(closed) == {*range(1 - THREADS, 0), *range(1, THREADS)}


def test_as_many_stuck_as_threads(
    closer: Closer, closed: list[int], stuck: threading.Event
) -> None:
    """What comes when all are stuck waits, and its caller does not."""
    for number in range(1, THREADS + 1):
        closer.close_aside(-number)
    closer.close_aside(1)
    assert closed == []
    stuck.set()
    eventually(lambda: 1 in closed, 2, "the close that had to wait")


def test_no_thread(closer: Closer, closed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system allows no thread, the caller closes it; later there may be one."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        closer.close_aside(1)
        assert closed == [1]
    closer.close_aside(2)
    eventually(lambda: closed == [1, 2], 2, "the close in a thread")


def test_no_room_to_wait(
    closer: Closer, closed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where descriptors run out, none waits for a thread."""
    monkeypatch.setattr(strays, "descriptor_limit", lambda: 1000)
    closer.close_aside(1000 - strays.SPARE_DESCRIPTORS)
    assert closed == [1000 - strays.SPARE_DESCRIPTORS]


def test_socket_that_lingers() -> None:
    """It is closed at once, with what has not been sent yet still on its way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _address = listener.accept()
        with receiver:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            sender.setblocking(False)
            sent = 0
            try:
                while True:
                    sent += sender.send(b"x" * (1 << 16))
            except BlockingIOError:
                pass
            close_stray(sender.detach())
            received = 0
            while data := receiver.recv(1 << 16):
                received += len(data)
    assert received == sent


def test_what_is_closed_at_once(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was opened as one; nothing else, whatever it is."""
    aside: list[int] = []
    monkeypatch.setattr(strays, "close_aside", aside.append)
    close_received(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    assert aside == []
    others = [
        os.open(os.devnull, os.O_RDONLY),
        os.memfd_create("x"),
        os.open(tmp_path, os.O_RDONLY),
    ]
    for descriptor in others:
        close_received(descriptor)
    assert aside == others
    for descriptor in others:
        os.close(descriptor)
