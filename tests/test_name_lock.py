"""The lock that decides which broker has a name."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from broker.errors import BadRequest, Busy
from broker.name_lock import NameLock
from broker.rundir import BrokerPaths


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
        "import sys; from pathlib import Path; from broker.name_lock import *\n"
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
