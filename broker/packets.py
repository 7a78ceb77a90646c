"""One packet of a Unix `SOCK_SEQPACKET` socket, with the descriptors that came beside it.

To close a descriptor that a peer has sent may take as long as that peer likes (strays.py).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

MAX_DESCRIPTORS = 4
"""In one packet, of session or link; more are refused."""
MOST_SENT = 253
"""That the kernel lets anybody send in one packet (SCM_MAX_FD). Where there is less room it closes
the rest itself, in the midst of our `recvmsg`."""
_SIZE = struct.calcsize("i")
_RIGHTS = socket.CMSG_SPACE(MOST_SENT * _SIZE)
_SENDER = socket.CMSG_SPACE(struct.calcsize("3i"))
_CUT = int(socket.MSG_CTRUNC | socket.MSG_TRUNC)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_LEVEL, _PASSED = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
"""Plain numbers: the flags' own type takes microseconds for every operation."""
_Ancillary = list[tuple[int, int, bytes]]


def receive_packet(connection: socket.socket, nbytes: int) -> tuple[bytes, list[int], bool]:
    """One packet, its descriptors (close-on-exec, owned by the caller), and whether it was cut.

    Blocks if the socket does, and while the kernel closes descriptors for which this process has no
    room. An empty packet without descriptors is end-of-file, also that of a peer which ended with
    packets of ours unread; what it had sent before is received first.

    Args:
        nbytes: the largest packet; of a larger one the rest is lost.

    Raises:
        OSError: as `recvmsg`.
    """
    packet, ancillary, flags = _receive(connection, nbytes, _RIGHTS)
    return packet, _descriptors(ancillary) if ancillary else [], bool(flags & _CUT)


def discard_unread(connection: socket.socket) -> None:
    """Take what a peer has sent from a socket that was shut down and is about to be closed.

    With the socket's last descriptor, here or in the keeper, the kernel would close what is in it.
    """
    connection.setblocking(False)
    # Now every packet says who has sent it; end-of-file, for which an empty one passes, does not.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    while True:
        try:
            _packet, ancillary, _flags = _receive(connection, 1, _SENDER + _RIGHTS)
        except BlockingIOError:
            return
        if not ancillary:
            return
        close_unasked(_descriptors(ancillary))


def close_received(descriptor: int) -> None:
    """Close a descriptor that a peer has sent because it was to.

    A checkpoint's folder, opened as one, is closed here and now, whatever else aside.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECTORY:
        os.close(descriptor)
    else:
        close_unasked([descriptor])


def close_unasked(descriptors: list[int]) -> None:
    """Close descriptors that a peer has sent, aside: they may be anything."""
    if descriptors:
        from broker.strays import close_aside  # hardly ever needed

        for descriptor in descriptors:
            close_aside(descriptor)


def _receive(connection: socket.socket, nbytes: int, room: int) -> tuple[bytes, _Ancillary, int]:
    try:
        return connection.recvmsg(nbytes, room, _CLOSE_ON_EXEC)[:3]
    except (
        ConnectionResetError
    ):  # the kernel says so once, and before the packets still in the queue
        return connection.recvmsg(nbytes, room, _CLOSE_ON_EXEC)[:3]


def _descriptors(ancillary: _Ancillary) -> list[int]:
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == _LEVEL and kind == _PASSED:
            descriptors += memoryview(data[: len(data) - len(data) % _SIZE]).cast("i")
    return descriptors
