"""Who is at the other end of a Unix socket, by the kernel's word, and whether that is one of us.

Both sides ask: the broker about whoever connects, the client about whoever listens (the kernel
notes who called `listen`). Imports nothing heavy.
"""

from __future__ import annotations

import array
import grp
import os
import socket
import struct
from typing import NamedTuple

from broker.errors import BadRequest

GROUP_VARIABLE = "WEIGHT_BROKER_GROUP"
"""Set for an engine, or a command, that uses a broker which another user shares with this group."""
_SO_PEERGROUPS = 59  # asm-generic/socket.h
_MOST_GROUP = (1 << 32) - 2
"""A `gid_t`; the number after it means none (chown(2))."""
_LONGEST_GROUP = 20
"""Digits that are looked at."""
_MAX_GROUPS = 256
"""Python's `getsockopt` returns 1024 bytes at most."""


class Credentials(NamedTuple):
    """A process as it was when it connected or began to listen.

    Attributes:
        pid: 0 if it is outside our PID namespace.
        uid, gid: effective; 65534 usually means an id that our user namespace does not know.
        groups: its supplementary groups.
    """

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()


def peer_credentials(connection: socket.socket) -> Credentials:
    """Ask the kernel (unix(7), SO_PEERCRED and SO_PEERGROUPS). Blocks for nothing."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", packed)
    return Credentials(pid, uid, gid, _peer_groups(connection))


def _peer_groups(connection: socket.socket) -> frozenset[int]:
    groups = array.array("I")
    try:
        groups.frombytes(
            connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * groups.itemsize)
        )
    except OSError:  # more of them, or a kernel before 4.13: then none is known
        return frozenset()
    return frozenset(groups)


class Access(NamedTuple):
    """Whom a broker and its engines take for their own: the user, root, and perhaps a group.

    Attributes:
        uid: the user whose processes both are.
        gid: members of this group too; None: nobody else.
    """

    uid: int
    gid: int | None = None

    def admits(self, peer: Credentials) -> bool:
        """Whether the process is one of ours."""
        if peer.uid in (0, self.uid):
            return True
        return self.gid is not None and (self.gid == peer.gid or self.gid in peer.groups)

    def is_own(self, uid: int) -> bool:
        """Whether a process of this user may do what needs the broker's own rights."""
        return uid in (0, self.uid)

    def __str__(self) -> str:
        members = "" if self.gid is None else f" and group {self.gid}"
        return f"uid {self.uid}, root{members}"


def group_id(name: str) -> int:
    """The number of a group that is given by name or number.

    Raises:
        BadRequest: there is no such group here.
    """
    if name.isascii() and name.isdecimal():
        return _group_number(name)
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError) as error:  # a NUL, or half a pair of surrogates
        raise BadRequest(
            f"there is no group {name!r} on this machine; create it, or give its number",
            group=name,
            setting="group",
        ) from error


def _group_number(digits: str) -> int:
    number = int(digits[:_LONGEST_GROUP])
    if len(digits) > _LONGEST_GROUP or number > _MOST_GROUP:
        raise BadRequest(
            f"there can be no group {digits[:_LONGEST_GROUP]!r}: the largest number of a group is "
            f"{_MOST_GROUP}",
            group=digits[:_LONGEST_GROUP],
            setting="group",
        )
    return number


def own_access(group: int | None = None) -> Access:
    """Our own user, and the group if one is given."""
    return Access(os.geteuid(), group)


def trusted_group() -> int | None:
    """The group whose brokers this process uses, from `$WEIGHT_BROKER_GROUP`; None: no others'.

    Raises:
        BadRequest: there is no such group.
    """
    name = os.environ.get(GROUP_VARIABLE)
    return group_id(name) if name else None
