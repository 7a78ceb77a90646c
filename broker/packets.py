"""One packet of a Unix `SOCK_SEQPACKET` socket, with the descriptors that came beside it."""

from __future__ import annotations

import array
import socket
import struct

MAX_DESCRIPTORS = 4
"""In one packet, of session or link; more are a cut packet (MSG_CTRUNC), which is refused."""
_CUT = int(socket.MSG_CTRUNC | socket.MSG_TRUNC)
"""A plain number: the flags' own type takes microseconds for every operation."""
_Received = tuple[bytes, list[tuple[int, int, bytes]], int]


def receive_packet(connection: socket.socket, nbytes: int) -> tuple[bytes, list[int], bool]:
    """One packet, its descriptors (close-on-exec, owned by the caller), and whether it was cut.

    Blocks if the socket does. An empty packet without descriptors is end-of-file, also that of a
    peer which ended with packets of ours unread; what it had sent before is received first.

    Args:
        nbytes: the largest packet; of a larger one the rest is lost.

    Raises:
        OSError: as `recvmsg`.
    """
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * struct.calcsize("i"))
    try:
        packet, ancillary, flags = _receive(connection, nbytes, room)
    except (
        ConnectionResetError
    ):  # the kernel says so once, and before the packets still in the queue
        packet, ancillary, flags = _receive(connection, nbytes, room)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    cut = bool(flags & _CUT)
    return packet, list(descriptors), cut


def _receive(connection: socket.socket, nbytes: int, room: int) -> _Received:
    return connection.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)[:3]
