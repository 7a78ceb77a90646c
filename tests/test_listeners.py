"""A broker's sockets: how they are made, lent to servers, made again when their files are gone."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from broker.errors import BadRequest, Busy
from broker.listeners import Listeners, create_listener, remove_socket
from broker.name_lock import NameLock
from broker.rundir import BrokerPaths


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


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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


# --- one socket ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_listener(private: Path, kind: socket.SocketKind) -> None:
    """The listener accepts connections, does not block, and closes on exec."""
    with create_listener(private / "s", kind) as listener:
        assert listener.type == kind
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        with pytest.raises(BlockingIOError):
            listener.accept()
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.connect(str(private / "s"))
            listener.accept()[0].close()


@pytest.mark.usefixtures("umask_restored")
@pytest.mark.parametrize("umask", [0o000, 0o027, 0o777])
def test_listener_is_ours_alone(private: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's file is never open to others, and ends as 0600 whatever the umask."""
    at_first = []
    real_chmod = os.chmod

    def observed_chmod(path: Path, mode: int) -> None:
        at_first.append(stat.S_IMODE(path.stat().st_mode))
        real_chmod(path, mode)

    monkeypatch.setattr(os, "chmod", observed_chmod)
    os.umask(umask)
    with create_listener(private / "s", socket.SOCK_STREAM):
        assert at_first == [0o600 & ~umask]
        assert stat.S_IMODE((private / "s").stat().st_mode) == 0o600


def test_stale_socket_is_replaced(private: Path) -> None:
    """The socket a killed broker left is replaced by one that answers."""
    path = private / "s"
    create_listener(path, socket.SOCK_STREAM).close()
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    with create_listener(path, socket.SOCK_STREAM), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_only_sockets_are_removed(private: Path) -> None:
    """A file, a link (even to a socket) or a directory in the way is named and left alone."""
    create_listener(private / "real", socket.SOCK_STREAM).close()
    (private / "file").write_text("precious")
    (private / "link").symlink_to(private / "real")
    (private / "folder").mkdir()
    for name in ("file", "link", "folder"):
        with pytest.raises(BadRequest) as caught:
            create_listener(private / name, socket.SOCK_STREAM)
        assert str(caught.value) == (
            f"{private / name} is in the way: it is not a socket, so it is not ours to remove; move"
            " it away"
        )
    assert sorted(path.name for path in private.iterdir()) == ["file", "folder", "link", "real"]


def test_remove_socket(private: Path) -> None:
    """Removing a socket twice is no error."""
    create_listener(private / "s", socket.SOCK_STREAM).close()
    remove_socket(private / "s")
    remove_socket(private / "s")
    assert list(private.iterdir()) == []


def test_listener_that_cannot_be(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system refuses is a sentence, and neither file nor descriptor is left behind."""
    before = descriptors()
    missing = private / "missing" / "s"
    with pytest.raises(BadRequest) as caught:
        create_listener(missing, socket.SOCK_STREAM)
    assert str(caught.value) == f"cannot listen at {missing} (No such file or directory)"
    long = private / ("s" * 108)
    with pytest.raises(BadRequest) as caught:
        create_listener(long, socket.SOCK_STREAM)
    assert str(caught.value) == f"cannot listen at {long} (AF_UNIX path too long)"

    def refused(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    with pytest.raises(BadRequest) as caught:
        create_listener(private / "s", socket.SOCK_STREAM)
    assert str(caught.value) == f"cannot listen at {private / 's'} (Operation not permitted)"
    assert list(private.iterdir()) == []
    assert descriptors() == before


def test_zeromq_takes_the_listener_over(private: Path) -> None:
    """A ROUTER serves on our socket, which stays at its path with its mode when ZeroMQ is done."""
    path = private / "x.zmq"
    listener = create_listener(path, socket.SOCK_STREAM)
    context = zmq.Context()
    try:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for each in (router, dealer):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.RCVTIMEO, 10_000)
        router.setsockopt(zmq.USE_FD, listener.detach())
        router.bind(f"ipc://{path}")
        dealer.connect(f"ipc://{path}")
        dealer.send(b"hello")
        sender, word = router.recv_multipart()
        assert word == b"hello"
        router.send_multipart([sender, b"here"])
        assert dealer.recv() == b"here"
        dealer.close()
        router.close()
    finally:
        context.destroy()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
