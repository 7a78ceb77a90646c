"""The lock that decides which broker has a name, and the sockets it then makes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from broker.errors import BadRequest, Busy
from broker.rundir import BrokerPaths, NameLock, create_listener, remove_socket


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private directory whose path is short enough for sockets."""
    folder = tmp_path_factory.mktemp("d")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def umask_restored() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


# --- the lock -----------------------------------------------------------------------------------


def test_second_broker_is_told_of_the_first(private: Path) -> None:
    """A name is held by one broker; another gets its process id and start, in this process too."""
    paths = BrokerPaths(private, "x")
    with NameLock(paths):
        with pytest.raises(Busy) as caught:
            NameLock(paths).acquire()
        with NameLock(BrokerPaths(private, "y")):
            pass
    error = caught.value
    assert str(error) == (
        f"a broker named 'x' is already running in {private} as process {os.getpid()} since "
        f"{error.since}; use that one, stop it with `weight-broker shutdown`, or give this one "
        "another --name"
    )
    assert (error.name, error.pid, error.lock) == ("x", os.getpid(), str(paths.lock))


def test_lock_file_stays(private: Path) -> None:
    """Releasing gives the name back, twice without harm, and leaves the same file, empty."""
    paths = BrokerPaths(private)
    lock = NameLock(paths)
    lock.acquire()
    before = paths.lock.stat()
    assert stat.S_IMODE(before.st_mode) == 0o600
    assert json.loads(paths.lock.read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert paths.lock.read_bytes() == b""
    with NameLock(paths):
        assert paths.lock.stat().st_ino == before.st_ino


def test_lock_of_a_killed_broker_is_free(private: Path) -> None:
    """The lock of a broker killed with SIGKILL is free, whatever the file still says."""
    program = (
        "import sys; from pathlib import Path; from broker.rundir import *\n"
        f"NameLock(BrokerPaths(Path({str(private)!r}))).acquire()\n"
        "print('locked', flush=True); sys.stdin.read()\n"
    )
    paths = BrokerPaths(private)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"locked\n"
        with pytest.raises(Busy) as caught:
            NameLock(paths).acquire()
        assert caught.value.pid == broker.pid
        broker.send_signal(signal.SIGKILL)
        broker.wait(10)
    assert json.loads(paths.lock.read_text())["pid"] == broker.pid
    with NameLock(paths):
        assert json.loads(paths.lock.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_holder_that_has_written_nothing_yet(private: Path, content: bytes) -> None:
    """In the instant before the first broker has written its id the second is refused as well."""
    paths = BrokerPaths(private)
    paths.lock.write_bytes(content)
    with paths.lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy) as caught:
            NameLock(paths).acquire()
    assert str(caught.value).startswith(
        f"a broker named 'default' is already running in {private} and still starting; use that"
    )
    assert caught.value.pid is None
    assert paths.lock.read_bytes() == content


def test_lock_is_not_inherited(private: Path) -> None:
    """The lock's descriptor closes on exec, so that children do not keep the name."""
    lock = NameLock(BrokerPaths(private))
    with lock:
        assert lock._descriptor is not None
        assert not os.get_inheritable(lock._descriptor)


def test_lock_file_that_is_none(private: Path) -> None:
    """A link or a directory in the lock's place is refused in the system's words."""
    before = descriptors()
    (private / "x.lock").symlink_to(private / "elsewhere")
    with pytest.raises(BadRequest) as caught:
        NameLock(BrokerPaths(private, "x")).acquire()
    assert str(caught.value) == (
        f"the lock file {private}/x.lock cannot be used (Too many levels of symbolic links)"
    )
    (private / "y.lock").mkdir()
    with pytest.raises(BadRequest) as caught:
        NameLock(BrokerPaths(private, "y")).acquire()
    assert str(caught.value) == f"the lock file {private}/y.lock cannot be used (Is a directory)"
    os.mkfifo(private / "z.lock")
    with pytest.raises(BadRequest) as caught:
        NameLock(BrokerPaths(private, "z")).acquire()
    assert str(caught.value) == f"the lock file {private}/z.lock cannot be used (Invalid argument)"
    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- listening sockets --------------------------------------------------------------------------


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
