"""The first server of a `serve`: forked before there is anything that a fork must not inherit.

Two interpreters that import one after the other are most of a broker's start. So `serve` forks as
its very first act, with one thread, no socket of its own and no lock: the child imports what only a
server needs while the parent reads its options and checks the platform, and then waits to be told
what to serve, like any server. If there is nothing to serve, it is ended. All later servers are
processes of their own (keeper.py), so that `upgrade` runs new code.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress

from broker.link import link_pair

_SHARED = ("broker.config", "broker.journal.recording", "broker.stop_signals")
"""What keeper and server both need: imported before the fork, much of it is there only once."""


class ForkedServer:
    """A child of this process, with as much of `subprocess.Popen` as a keeper needs.

    Args:
        pid: nobody else waits for it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has been waited for."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; negative: the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it has not ended after so many seconds.
        """
        if self._code is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("the first server", timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self._code


_waiting: tuple[ForkedServer, socket.socket] | None = None


def fork_server(mask: Iterable[int]) -> int | None:
    """Fork a server that waits to be taken. To be called before anything else is done, with
    signals that end a process blocked: Python drops an interrupt that comes while it forks.

    Where the system refuses, there is none to be taken: the keeper starts one, or says why not.

    Args:
        mask: the signals that the child is to have blocked.

    Returns:
        None at once in the caller; in the child its exit code, when it has ended.
    """
    for module in _SHARED:
        importlib.import_module(module)
    gc.freeze()  # no collection touches what is there by now: its pages stay shared
    link = _fork()
    if link is None:
        return None
    _become_independent(link.fileno())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    from broker.server_process import main  # all that the parent does not need

    return main([str(link.detach())])


def _fork() -> socket.socket | None:
    """In the child its end of the link; None in the parent, where a server waits now, if any."""
    global _waiting
    try:
        ours, theirs = link_pair()
    except OSError:
        return None
    try:
        pid = os.fork()
        if pid == 0:
            ours.close()
            return theirs
        _waiting = ForkedServer(pid), ours
    except OSError:
        ours.close()  # a child that cannot be waited for ends with it
    theirs.close()
    return None


def take_server() -> tuple[ForkedServer, socket.socket] | None:
    """The server that was forked and the keeper's end of its link, once; both are the caller's."""
    global _waiting
    taken, _waiting = _waiting, None
    return taken


def discard_server() -> None:
    """End a server that was forked and never taken. Blocks until it is gone."""
    unused = take_server()
    if unused is not None:
        server, link = unused
        server.kill()
        server.wait()
        link.close()


def _become_independent(link: int) -> None:
    """As `Popen` starts a server: in a session of its own, with no input and nobody's files."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib is not there yet
        if int(name) > 2 and int(name) != link:
            with suppress(OSError):  # the one that this list was read from
                os.close(int(name))
