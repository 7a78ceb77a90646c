"""What the kernel says of the process at the other end of a session."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from broker.sessions import SO_PEERPIDFD, identify


class PeerOnKernel(socket.socket):
    """A connection on a kernel that answers the question for a pidfd with this error."""

    def __init__(self, error: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._error = error

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> bytes:  # type: ignore[override]
        if option == SO_PEERPIDFD:
            raise OSError(self._error, os.strerror(self._error))
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())


@pytest.mark.parametrize(
    ("error", "has_ended"),
    [(errno.ENOPROTOOPT, False), (errno.EINVAL, True), (errno.ESRCH, True), (errno.EMFILE, False)],
)
def test_process_without_pidfd(error: int, has_ended: bool) -> None:
    """A kernel without such pidfds says nothing; one that has none of this peer, that it ended."""
    with PeerOnKernel(error) as connection:
        identity = identify(connection)
    assert (identity.pidfd, identity.has_ended) == (None, has_ended)
    assert (identity.pid, identity.uid) == (os.getpid(), os.getuid())
