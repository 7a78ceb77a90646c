"""Whether this process may have as many descriptors and threads as a client needs.

libzmq ends the process when it gets none in the middle of making a context, so it is asked before.
"""

from __future__ import annotations

import _thread
import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from broker.errors import UsageError
from engine_client.deadline import Deadline
from engine_client.descriptors import Descriptor, closed_after, owned
from engine_client.progress import Show
from engine_client.shielded import shielded

CLIENT_DESCRIPTORS = 16
"""A client has eleven, and opens some more while it connects."""
PING_DESCRIPTORS = 12


THREADS = 6
"""Two of libzmq's for each context and the client's own; and those that tried it may still be
ending."""


def check_room(needed: int, what: str) -> None:
    """Raise `UsageError` unless so many descriptors can be opened now, and `THREADS` be started;
    `what` needs them."""
    try:
        _start_and_end(THREADS)
    except RuntimeError as error:
        raise UsageError(
            f"{what} needs {THREADS} threads, and this process or its user may start no more: end "
            "some, or raise the limit (`ulimit -u`, TasksMax= of a systemd unit, pids.max of a "
            "container)"
        ) from error
    with told_of_the_limit(what):
        shielded(partial(_open_and_close, needed), Deadline(None))


def _start_and_end(number: int) -> None:
    """Raise `RuntimeError` unless so many threads can run at once."""
    enough = threading.Event()
    try:
        for _ in range(number):
            # Not a threading.Thread, whose `start` waits for ever for one that had no memory.
            _thread.start_new_thread(enough.wait, ())
    finally:
        enough.set()


def _open_and_close(number: int, _show: Show) -> None:
    opened: list[Descriptor] = []
    with closed_after(opened):
        for _ in range(number):
            opened.append(owned(partial(os.eventfd, 0, os.EFD_CLOEXEC)))  # noqa: PERF401 - to be closed


@contextmanager
def told_of_the_limit(what: str) -> Iterator[None]:
    """Raise `UsageError` if a descriptor cannot be opened inside, or a memory file not be written;
    `what` needs it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.ENOMEM):
            raise UsageError(
                f"{what} does not fit: {error.strerror} (memory, or `ulimit -f`, which holds for "
                "memory files too)"
            ) from error
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise UsageError(
            f"{what} needs more file descriptors than this process has left of its {limit} "
            "(RLIMIT_NOFILE): close some files, or raise the limit (`ulimit -n`, LimitNOFILE= of a "
            "systemd unit)",
            limit=limit,
        ) from error
