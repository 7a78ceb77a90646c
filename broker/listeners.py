"""A broker's two listening sockets: made by the keeper, lent to each of its servers.

Whoever tidies up a directory may remove their files while we run (systemd-tmpfiles does after ten
days in /tmp); engines that are connected notice nothing, but nobody finds us any more. So they are
looked after: what is missing is made again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from broker.errors import BadRequest
from broker.name_lock import NameLock
from broker.rundir import BrokerPaths, is_private_directory, mode_of, share_with_group

SO_PASSRIGHTS = 83  # asm-generic/socket.h, Linux 6.16
LISTEN_BACKLOG = 1024
"""Connections that may wait to be accepted: every engine of a node may connect at once."""


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


def create_listener(path: Path, kind: socket.SocketKind, group: int | None = None) -> socket.socket:
    """A listening Unix socket at `path`, for the holder of the name's lock only.

    Removes the socket a killed broker left there; the lock says that nobody serves it any more.
    The socket is non-blocking and close-on-exec, and nobody but us can connect to it at any moment,
    whatever the umask.

    Args:
        kind: `SOCK_STREAM` for ZeroMQ (which takes it over by `ZMQ_USE_FD`), `SOCK_SEQPACKET` for
            sessions.
        group: members of this group may connect too.

    Returns:
        The socket, which the caller closes. The file remains; `remove_socket` removes it.

    Raises:
        BadRequest: something that is no socket is in the way, or the system refuses; nothing of
            ours is left at the path then.
    """
    remove_socket(path)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # bind gives the file this mode less the umask, so that it is never wider ...
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        # ... and this mends a umask that takes our own rights away.
        os.chmod(path, 0o600)  # noqa: PTH101
        if group is not None:
            share_with_group(path, group, 0o660)
        if kind is socket.SOCK_STREAM:
            _take_no_descriptors(listener)
        listener.listen(LISTEN_BACKLOG)
    except BadRequest:
        listener.close()
        remove_socket(path)
        raise
    except OSError as error:
        bound = bool(listener.getsockname())
        listener.close()
        if bound:
            remove_socket(path)
        reason = error.strerror or str(error)
        raise BadRequest(f"cannot listen at {path} ({reason})", path=str(path)) from error
    return listener


def _take_no_descriptors(listener: socket.socket) -> None:
    """Refuse the ones that a peer sends to libzmq, which takes none: the kernel would close them in
    libzmq's thread, and that may take as long as the peer likes (strays.py)."""
    with contextlib.suppress(OSError):  # before Linux 6.16 there is no such option
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def remove_socket(path: Path) -> None:
    """Remove the socket at `path`, if there is one.

    Raises:
        BadRequest: something else is there, which is left alone, or it cannot be removed.
    """
    mode = mode_of(path)
    if mode is None:
        return
    if not stat.S_ISSOCK(mode):
        raise BadRequest(
            f"{path} is in the way: it is not a socket, so it is not ours to remove; move it away",
            path=str(path),
        )
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise BadRequest(f"{path} cannot be removed ({error.strerror})", path=str(path)) from error
