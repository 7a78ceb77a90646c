"""The lock that alone decides which broker has a name.

It comes before the sockets: binding cannot decide, since ZeroMQ takes over any path.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from types import TracebackType

from broker.errors import BadRequest, Busy
from broker.rundir import BrokerPaths


class NameLock:
    """The right to be the broker of this name in this directory. Also a context manager.

    Held from `acquire` to `release` or the end of the process, however it ends. The file is never
    removed: a broker waiting for a removed file's lock would get it beside its successor's. A
    child that is forked without exec would hold it too, so nothing forks any more by then.
    """

    def __init__(self, paths: BrokerPaths) -> None:
        self.paths = paths
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock or say who has it. Does not wait.

        Raises:
            Busy: another broker has it; fields `name`, `lock`, `pid` and `since` (`None` in the
                instant in which that broker has not written them yet).
            BadRequest: the lock file cannot be opened or locked.
        """
        path = self.paths.lock
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_holder(descriptor)
        except BlockingIOError as error:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise self._held_by(holder) from error
        except OSError as error:
            os.close(descriptor)
            raise self._unusable(error) from error
        self._descriptor = descriptor

    def is_in_place(self) -> bool:
        """Whether the file that is locked is still the one that others would try to lock."""
        if self._descriptor is None:
            return False
        ours = os.fstat(self._descriptor)
        try:
            there = os.lstat(self.paths.lock)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Give the name back. Idempotent; the file stays, empty."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> NameLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _unusable(self, error: OSError) -> BadRequest:
        path = self.paths.lock
        return BadRequest(f"the lock file {path} cannot be used ({error.strerror})", path=str(path))

    def _held_by(self, holder: Mapping[str, object]) -> Busy:
        pid, since = holder.get("pid"), holder.get("since")
        who = f"as process {pid} since {since}" if pid else "and still starting"
        return Busy(
            f"a broker named {self.paths.name!r} is already running in {self.paths.directory} "
            f"{who}; use that one, stop it with `weight-broker shutdown`, or give this one another "
            "--name",
            name=self.paths.name,
            lock=str(self.paths.lock),
            pid=pid,
            since=since,
        )


def _write_holder(descriptor: int) -> None:
    since = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "since": since}).encode() + b"\n", 0)


def _read_holder(descriptor: int) -> Mapping[str, object]:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # not written yet
        return {}
    return holder if isinstance(holder, dict) else {}
