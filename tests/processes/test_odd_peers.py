"""Peers that nobody thought of cost themselves something, never the server or another engine."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker import wire
from tests.processes.conftest import brokers
from tests.support.clock import eventually
from tests.support.processes import LOADER_FAULTS, RunningBroker
from tests.support.raw import RawDealer, RawSession

StartBroker = Callable[..., RunningBroker]

PEERS = 300
_PR_SET_NAME = 15  # linux/prctl.h


def connect(directory: Path) -> socket.socket:
    """A session's socket, with nothing said or read."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(directory / "default.session"))
    return connection


# --- names --------------------------------------------------------------------------------------


@contextmanager
def process_called(name: bytes) -> Iterator[None]:
    """This process has another name meanwhile (prctl(2); of its main thread, as `ps` shows it)."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes().strip()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, before, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"gr\xc3\xb6\xc3\x9fere-gr\xc3\xb6\xc3", "größere-grö\N{REPLACEMENT CHARACTER}"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"a\x1b[2J\nb", r"a\x1b[2J\nb"),
    ],
    ids=["cut", "no text", "control characters"],
)
def test_process_name(broker: RunningBroker, name: bytes, shown: str) -> None:
    """A name of any bytes is shown as printable text, by this server and by its successor."""
    with process_called(name), RawSession(broker.directory) as session:
        (entry,) = broker.status()["sessions"]
        assert entry["command"] == shown
        os.kill(broker.server_pid(), signal.SIGKILL)
        assert isinstance(session.receive(), wire.Welcome)
        (entry,) = broker.status()["sessions"]
        assert entry["command"] == shown
    assert broker.status()["broker"]["restarts"] == 1


# --- mistakes of ours ---------------------------------------------------------------------------

FAULT = """
import os, socket
getsockopt = socket.socket.getsockopt
def faulty(self, level, option, *size):
    if option == 77 and os.path.exists({order!r}):  # SO_PEERPIDFD, asked of every session
        raise RuntimeError("a mistake")
    return getsockopt(self, level, option, *size)
socket.socket.getsockopt = faulty
"""


@pytest.fixture
def order(tmp_path: Path) -> Path:
    """While this file is there, a broker with this PYTHONPATH fails to identify its peers."""
    order = tmp_path / "order"
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(order=str(order)))
    return order


@pytest.fixture
def mistaken(broker_dir: Path, order: Path) -> Iterator[RunningBroker]:
    path = os.pathsep.join([str(order.parent), str(LOADER_FAULTS)])
    with brokers(broker_dir, loaders_may_raise=True) as start:  # its log may have a traceback
        yield start(environ={"PYTHONPATH": path})


def test_mistake_while_accepting(mistaken: RunningBroker, order: Path) -> None:
    """An exception that nobody foresaw costs the peer its connection, and is logged whole."""
    order.touch()
    with connect(mistaken.directory) as refused:
        assert refused.recv(1) == b""
    order.unlink()
    with RawSession(mistaken.directory):
        status = mistaken.status()
        assert len(status["sessions"]) == 1
    assert status["broker"]["restarts"] == 0
    assert status["counters"]["internal_errors"] == 1
    assert "RuntimeError: a mistake" in mistaken.log.read_text()


def test_mistake_while_taking_over(mistaken: RunningBroker, order: Path) -> None:
    """The same of a successor, for which the peer is still there: no server after server dies."""
    with RawSession(mistaken.directory) as lost:
        server = mistaken.server_pid()
        order.touch()
        os.kill(server, signal.SIGKILL)
        assert lost.receive() is None
        order.unlink()
    eventually(lambda: mistaken.status()["sessions"] == [], 2, "the end of that session")
    with RawSession(mistaken.directory) as session, RawDealer(mistaken.directory) as dealer:
        assert session.hello(dealer)[0] == b"ok"
    assert mistaken.status()["broker"]["restarts"] == 1
    assert "RuntimeError: a mistake" in mistaken.log.read_text()


# --- peers that go at once ----------------------------------------------------------------------


def test_refused_peers_that_do_not_wait(start_broker: StartBroker) -> None:
    """Who closes its connection before it can be told that it gets no session misses that only."""
    broker = start_broker("--limit", "process_sessions=1")
    with RawSession(broker.directory):
        for _ in range(PEERS):
            connect(broker.directory).close()
        eventually(lambda: broker.counter("sessions_refused") == PEERS, 5, "every refusal")
        status = broker.status()
    assert status["broker"]["restarts"] == 0
    assert status["counters"].get("internal_errors", 0) == 0
