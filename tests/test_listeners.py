"""A broker's sockets: lent to servers, made again when somebody has removed their files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.errors import BadRequest, Busy
from broker.listeners import Listeners
from broker.rundir import BrokerPaths, NameLock


@pytest.fixture
def paths(tmp_path: Path) -> BrokerPaths:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return BrokerPaths(directory)


@pytest.fixture
def listeners(paths: BrokerPaths) -> Iterator[Listeners]:
    opened = Listeners(paths)
    yield opened
    opened.close()


def is_reached(path: Path, descriptor: int, kind: socket.SocketKind) -> bool:
    """Whether who connects at the path comes out at this listener."""
    with (
        socket.socket(socket.AF_UNIX, kind) as peer,
        socket.socket(fileno=os.dup(descriptor)) as listener,
    ):
        peer.connect(str(path))
        accepted, _address = listener.accept()
        accepted.close()
    return True


def check_reached(paths: BrokerPaths, listeners: Listeners) -> None:
    router, sessions = listeners.descriptors()
    assert is_reached(paths.zmq, router, socket.SOCK_STREAM)
    assert is_reached(paths.session, sessions, socket.SOCK_SEQPACKET)


def test_nothing_to_mend(paths: BrokerPaths, listeners: Listeners) -> None:
    """Sockets that are in place stay the ones they are."""
    before = listeners.descriptors()
    assert not listeners.mend()
    assert listeners.descriptors() == before
    check_reached(paths, listeners)


@pytest.mark.parametrize("removed", [["zmq"], ["session"], ["zmq", "session", "lock"]])
def test_removed_files(paths: BrokerPaths, listeners: Listeners, removed: list[str]) -> None:
    """What is missing is made again, and the name stays ours."""
    for kind in removed:
        (paths.directory / f"default.{kind}").unlink()
    assert listeners.mend()
    check_reached(paths, listeners)
    with pytest.raises(Busy, match=str(os.getpid())):
        NameLock(paths).acquire()
    assert not listeners.mend()


def test_removed_lock_alone(paths: BrokerPaths, listeners: Listeners) -> None:
    """The lock is taken again; no server needs to know."""
    paths.lock.unlink()
    assert not listeners.mend()
    with pytest.raises(Busy):
        NameLock(paths).acquire()


def test_removed_directory(paths: BrokerPaths, listeners: Listeners) -> None:
    """It is made again as it was, closed to everybody else."""
    for path in paths.directory.iterdir():
        path.unlink()
    paths.directory.rmdir()
    assert listeners.mend()
    assert paths.directory.stat().st_mode & 0o777 == 0o700
    check_reached(paths, listeners)


def test_another_broker_has_the_name(paths: BrokerPaths, listeners: Listeners) -> None:
    """Who lost lock and sockets to another takes nothing back, and removes nothing of the other."""
    for path in paths.directory.iterdir():
        path.unlink()
    other = Listeners(paths)
    with pytest.raises(Busy):
        listeners.mend()
    check_reached(paths, other)
    listeners.close()
    check_reached(paths, other)
    other.close()
    assert not paths.zmq.exists()


def test_something_else_is_in_the_way(paths: BrokerPaths, listeners: Listeners) -> None:
    """A file that is no socket is left alone."""
    paths.zmq.unlink()
    paths.zmq.write_text("mine")
    with pytest.raises(BadRequest, match="is in the way"):
        listeners.mend()
    assert paths.zmq.read_text() == "mine"
    paths.zmq.unlink()
    assert listeners.mend()
    check_reached(paths, listeners)


def test_directory_that_became_public(paths: BrokerPaths, listeners: Listeners) -> None:
    """Nothing is made in a directory that others can use; when it is closed again, it is."""
    paths.session.unlink()
    paths.directory.chmod(0o755)
    with pytest.raises(BadRequest, match="open to others"):
        listeners.mend()
    assert not paths.session.exists()
    paths.directory.chmod(0o700)
    assert listeners.mend()
    check_reached(paths, listeners)
