"""What the service manager is told: ready, alive while the loop turns, stopping."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.sd_notify import notify, watchdog_seconds
from tests.support.clock import SCALE, eventually
from tests.support.processes import RunningBroker, process_state
from tests.support.raw import RawDealer

StartBroker = Callable[..., RunningBroker]
WATCHDOG_SECONDS = 1.2 * SCALE
"""The server says four times in it that it is alive; the keeper gives it half of it."""


class Manager:
    """A service manager's end of $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(20 * SCALE)
        self.environ = {
            "NOTIFY_SOCKET": str(path),
            "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6)),
        }

    def hear(self) -> str:
        """The next state."""
        return self._socket.recv(4096).decode()

    def forget(self) -> None:
        """Whatever was said until now."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(4096):
                pass
        except BlockingIOError:
            self._socket.settimeout(20 * SCALE)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(broker_dir: Path) -> Iterator[Manager]:
    manager = Manager(broker_dir / "notify")
    yield manager
    manager.close()


def test_from_ready_to_stopping(start_broker: StartBroker, manager: Manager) -> None:
    """READY with a line for a person when a ping is answered, WATCHDOG again and again while the
    server's loop turns, STOPPING at the end."""
    broker = start_broker(environ=manager.environ)
    said = [manager.hear() for _ in range(2)]
    (ready,) = (state for state in said if state != "WATCHDOG=1")
    assert ready == f"READY=1\nSTATUS={broker.ready_line}"
    with RawDealer(broker.directory) as dealer:
        assert dealer.ping_seconds() < SCALE
    assert [manager.hear() for _ in range(3)] == ["WATCHDOG=1"] * 3
    broker.stop()
    while (state := manager.hear()) != "STOPPING=1":
        assert state == "WATCHDOG=1"


def test_a_server_that_hangs(start_broker: StartBroker, manager: Manager) -> None:
    """While its loop does not turn nobody says that it does; the keeper replaces it before the
    service manager would end the keeper, and all the weights with it."""
    broker = start_broker(environ=manager.environ)
    server = broker.server_pid()
    os.kill(server, signal.SIGSTOP)
    eventually(lambda: process_state(server) == "T", 5, "the stop")
    eventually(lambda: process_state(broker.pid) == "S", 5, "a keeper that has heard all of it")
    manager.forget()
    assert manager.hear() == "WATCHDOG=1"
    assert 'server-killed cause="its loop has not turned for' in broker.log.read_text()
    assert broker.server_pid() != server


def test_nobody_watches(start_broker: StartBroker, broker_dir: Path) -> None:
    """A service manager that cannot be told is a warning, and the broker serves."""
    broker = start_broker(environ={"NOTIFY_SOCKET": "/nowhere/at/all"})
    assert broker.counter("requests") > 0
    said = "WARNING NOTIFY_SOCKET='/nowhere/at/all'"
    eventually(lambda: said in broker.log.read_text(), 5, "the keeper's warning")


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "7"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "8"}, None),
    ],
)
def test_whom_it_watches(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], seconds: float | None
) -> None:
    """The watchdog counts for the process that it names, or for whoever asks if it names none."""
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert watchdog_seconds(7) == seconds


def test_no_descriptor_to_tell_it_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning: a broker is not there for those who watch it."""

    def refuse(*_arguments: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setenv("NOTIFY_SOCKET", "/run/nobody")
    monkeypatch.setattr(socket, "socket", refuse)
    notify("READY=1")
    assert "was not told READY=1" in caplog.text
