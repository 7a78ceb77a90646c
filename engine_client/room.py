"""Whether this process may open as many descriptors as a client needs.

libzmq ends the process when it gets none in the middle of making a context, so it is asked before.
"""

from __future__ import annotations

import errno
import os
import resource
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


def check_room(needed: int, what: str) -> None:
    """Raise `UsageError` unless so many descriptors can be opened now; `what` needs them."""
    with told_of_the_limit(what):
        shielded(partial(_open_and_close, needed), Deadline(None))


def _open_and_close(number: int, _show: Show) -> None:
    opened: list[Descriptor] = []
    with closed_after(opened):
        for _ in range(number):
            opened.append(owned(partial(os.eventfd, 0, os.EFD_CLOEXEC)))  # noqa: PERF401 - to be closed


@contextmanager
def told_of_the_limit(what: str) -> Iterator[None]:
    """Raise `UsageError` if a descriptor cannot be opened inside; `what` needs it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise UsageError(
            f"{what} needs more file descriptors than this process has left of its {limit} "
            "(RLIMIT_NOFILE): close some files, or raise the limit (`ulimit -n`, LimitNOFILE= of a "
            "systemd unit)",
            limit=limit,
        ) from error
