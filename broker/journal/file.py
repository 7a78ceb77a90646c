"""Appending to a journal's files, two of them, within a bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from broker.rundir import BrokerPaths

KEEPER_BYTES = 16 * 1024
"""Of each file, kept free for the keeper's few lines while no server can begin a new file."""
LEAST_BYTES = 4 * KEEPER_BYTES
"""The smallest bound that leaves the server as much as the keeper."""

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class JournalFile:
    """A journal as one process appends to it.

    Args:
        path: the current file; the one before is `older(path)`.
        limit: bytes that both may have together; `LEAST_BYTES` or more.
        turns: begin a new file when this one is full. Only one process may: the server. The keeper
            writes into a little room of its own and stops when that is full too.
    """

    def __init__(self, path: Path, limit: int, *, turns: bool) -> None:
        self._path = path
        self._turns = turns
        self._room = limit // 2 - (KEEPER_BYTES if turns else 0)

    def append(self, lines: bytes) -> bool:
        """Add whole lines, `KEEPER_BYTES` at most; false if there is no room for them.

        Blocks as the file system does. Opens the file each time: it may have been removed.

        Raises:
            OSError: the file cannot be opened or written.
        """
        if self._try_append(lines):
            return True
        if not self._turns:
            return False
        self._path.replace(older(self._path))
        return self._try_append(lines)

    def _try_append(self, lines: bytes) -> bool:
        descriptor = os.open(self._path, _FLAGS, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):  # a FIFO, say, whose reader could hold us up
                raise OSError(errno.EINVAL, "it is no file", str(self._path))
            if status.st_size + len(lines) > self._room:
                return False
            if os.write(descriptor, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            return True
        finally:
            os.close(descriptor)


def journal_path(paths: BrokerPaths) -> Path:
    """Where a broker's journal is."""
    return paths.directory / f"{paths.name}.journal"


def older(path: Path) -> Path:
    """Where the file before this one is."""
    return path.with_name(f"{path.name}.old")
