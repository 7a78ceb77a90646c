"""Whether a file stayed as it was while it was read, as far as the kernel can tell.

The kernel stamps a file with the time of its last write, but only as exactly as its clock ticks (1
to 10 ms): two writes within one tick leave equal stamps. So nothing is read within a tick or two of
a file's last change: whatever is written after the first look then gets a stamp of its own, and
equal stamps before and after mean that the bytes in between were one version of the file.

What no stamp shows: writes through a shared mapping to pages that are dirty already (the kernel
stamps the first of them only), and servers whose clock is not ours. Checkpoints are written by
ordinary writes or renamed into place.

Imports neither zmq nor torch.
"""

from __future__ import annotations

import os
import time

from broker.checkpoints.faults import load_failed, quoted, system_refused
from broker.errors import LoadFailed
from broker.wire import FileStamp

SETTLED_NS = 20_000_000
"""Twice the longest tick there is (CONFIG_HZ=100: 10 ms)."""

_LOOKS = 50


def settled_status(descriptor: int, file: str) -> os.stat_result:
    """The status of an open file whose last change is over `SETTLED_NS` ago; waits until it is.

    Raises:
        LoadFailed: "changed": somebody goes on writing to it (after about a second).
    """
    for _ in range(_LOOKS):
        try:
            status = os.fstat(descriptor)
        except OSError as error:
            raise system_refused(error, file, "looking at") from error
        age = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
        # A time in the future was set by hand or by another clock: waiting would not help.
        if not -SETTLED_NS < age < SETTLED_NS:
            return status
        time.sleep((SETTLED_NS - max(age, 0)) / 1e9)
    raise load_failed(
        "changed",
        f"{quoted(file)} is still being written; wait until it is complete and load again",
        file=file,
    )


def require_unchanged(descriptor: int, planned: FileStamp) -> None:
    """Refuse unless an open file is the one that was planned with, and as it was then.

    Raises:
        LoadFailed: "changed".
    """
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        raise system_refused(error, planned.name, "looking at") from error
    if stamp(planned.name, status, planned.header_digest) != planned:
        raise changed(planned.name)


def stamp(name: str, status: os.stat_result, digest: str) -> FileStamp:
    """A stamp from a file's status and the digest of its header."""
    return FileStamp(
        name,
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        digest,
    )


def changed(file: str) -> LoadFailed:
    """The error for a file that did not stay as it was."""
    return load_failed(
        "changed",
        f"{quoted(file)} changed while it was being loaded; nothing of it is kept, load again when "
        "it is complete",
        file=file,
    )
