"""A broker's two listening sockets: made by the keeper, lent to each of its servers.

Whoever tidies up a directory may remove their files while we run (systemd-tmpfiles does after ten
days in /tmp); engines that are connected notice nothing, but nobody finds us any more. So they are
looked after: what is missing is made again.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from broker.rundir import (
    BrokerPaths,
    NameLock,
    create_listener,
    is_private_directory,
    remove_socket,
    share_with_group,
)


@dataclass
class _Listener:
    path: Path
    kind: socket.SocketKind
    socket: socket.socket
    identity: tuple[int, int]


class Listeners:
    """Lock and sockets of a name. The descriptors are the ROUTER's and the sessions'.

    Raises:
        Busy: a broker of this name is running.
        BadRequest: a socket cannot be made; nothing is left behind.
    """

    def __init__(self, paths: BrokerPaths) -> None:
        self._paths = paths
        self._open: list[_Listener] = []
        self._lock = NameLock(paths)
        self._lock.acquire()
        try:
            for path, kind in (
                (paths.zmq, socket.SOCK_STREAM),
                (paths.session, socket.SOCK_SEQPACKET),
            ):
                self._open.append(_listen(path, kind, paths.group))
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> list[int]:
        """Borrowed."""
        return [listener.socket.fileno() for listener in self._open]

    def mend(self) -> bool:
        """Make again what has been removed; true if a server needs the new descriptors.

        Raises:
            Busy: the lock file was removed too, and another broker has the name by now.
            BadRequest: the directory is not what it must be; nothing was made.
        """
        if all(map(_is_in_place, self._open)) and self._lock.is_in_place():
            return False
        directory, group = self._paths.directory, self._paths.group
        if not is_private_directory(directory, group=group):
            directory.mkdir(0o700)
            if group is not None:
                share_with_group(directory, group, 0o750)
        if not self._lock.is_in_place():
            self._lock.release()
            self._lock.acquire()
        missing = [listener for listener in self._open if not _is_in_place(listener)]
        for listener in missing:
            made = _listen(listener.path, listener.kind, group)
            listener.socket.close()
            listener.socket, listener.identity = made.socket, made.identity
        return bool(missing)

    def close(self) -> None:
        """Close and remove the sockets, if they are still ours, and give the name back."""
        for listener in self._open:
            listener.socket.close()
            if _is_in_place(listener):
                remove_socket(listener.path)
        self._open.clear()
        self._lock.release()


def _listen(path: Path, kind: socket.SocketKind, group: int | None) -> _Listener:
    made = create_listener(path, kind, group)
    status = os.lstat(path)
    return _Listener(path, kind, made, (status.st_dev, status.st_ino))


def _is_in_place(listener: _Listener) -> bool:
    try:
        status = os.lstat(listener.path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == listener.identity
