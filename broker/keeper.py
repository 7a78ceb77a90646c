"""The keeper: the small, dull process that outlives the server.

It holds the lock, the listening sockets, and whatever the server hands it: the engines' sessions,
slabs, manifests, records of sets and leases. It understands none of it. It starts the server, and
when that dies (libzmq aborts a process that runs out of descriptors) it starts the next one and
hands everything over: engines keep computing, their sessions see no end-of-file, their leases stay.

Imports neither zmq nor msgspec nor torch, decodes nothing, and has no other thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from broker.errors import BrokerError
from broker.first_server import ForkedServer, take_server
from broker.link import (
    EXIT_RESTART,
    Item,
    RecordLost,
    items_of,
    link_pair,
    packed,
    packet_of,
    receive_item,
    try_send,
    wait_for_room,
)
from broker.listeners import Listeners
from broker.logs import log_event
from broker.rundir import BrokerPaths
from broker.sd_notify import notify, watchdog_seconds
from broker.stop_signals import STOP_SIGNALS, on_stop_signal

STEADY_SECONDS = 10.0
"""A server that lived this long did not die of its start."""
FIRST_DELAY_SECONDS = 0.05
LEAST_DELAY_SECONDS = 0.02
"""Not even a keeper that is to lose no time turns in circles."""
STOP_SECONDS = 15.0
"""How long a server that is told to stop may take before it is killed."""
FULL_SECONDS = 0.1
"""Between looks for a signal while a new server does not read yet."""
LOOK_SECONDS = 2.0
"""Between looks at whether the sockets' files are still there."""
NEVER = float("inf")
EXIT_KILLED = 1
"""The keeper's own code if a signal has ended the last server."""

_LOOK_ONLY = os.WEXITED | os.WNOHANG | os.WNOWAIT

SERVER_COMMAND = (sys.executable, "-m", "broker.server_process")

Kept = dict[tuple[str, str], Item]
ServerProcess: TypeAlias = "subprocess.Popen[bytes] | ForkedServer"


class Keeper:
    """Holds a broker's name, and everything its servers must not lose.

    Args:
        paths: where to listen.
        options: what servers are told to serve; a keeper does not look into it.
        longest_delay: seconds before a server that dies again and again is started again.
        command: how to start a server; the descriptor of its link is appended.

    Raises:
        Busy: a broker of this name is running.
        BadRequest: a socket cannot be made; nothing is left behind.
    """

    def __init__(
        self,
        paths: BrokerPaths,
        options: bytes,
        longest_delay: float,
        command: Sequence[str] = SERVER_COMMAND,
    ) -> None:
        self._options = options
        self._command = command
        self._longest_delay = longest_delay
        self._kept: Kept = {}
        self._server: ServerProcess | None = None
        self._is_up = False
        self._stopping = False
        self._is_ending = False
        self._is_closed = False
        self._stop_signal = signal.SIGTERM
        self._kill_at = NEVER
        self._patience = (watchdog_seconds(os.getpid()) or NEVER) / 2
        self._deaths = 0
        self._came_up = False
        self._complaint = ""
        self.restarts = 0
        self._signals = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._listeners = Listeners(paths)
        except BaseException:
            os.close(self._signals)
            raise

    def keep(self, kind: str, key: str, record: bytes, descriptor: int) -> None:
        """Something that every server is to get, also the first; takes the descriptor over."""
        self._kept[kind, key] = Item("keep", kind, key, record, [descriptor])

    def stop_on_signals(self) -> None:
        """SIGTERM, SIGINT, and SIGHUP of a terminal that closes, end server and keeper in order.

        Only from the main thread.
        """
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
        on_stop_signal(self._on_signal, STOP_SIGNALS if ignored else (*STOP_SIGNALS, signal.SIGHUP))

    def _on_signal(self, number: signal.Signals) -> None:
        self._stopping = True
        if number in STOP_SIGNALS:  # SIGHUP means something else to the server
            self._stop_signal = number
        if not self._is_closed:
            os.eventfd_write(self._signals, 1)

    def run(self, on_ready: Callable[[str], None] | None = None) -> int:
        """Keep a server running until one ends in order; its exit code. Closes the keeper.

        Args:
            on_ready: called with its line when the first server answers requests.
        """
        try:
            while True:
                started = time.monotonic()
                code = self._run_server(on_ready)
                if self._is_over(code):
                    return self._exit_code(code)
                self._before_restart(code, time.monotonic() - started)
        finally:
            self.close()

    def _exit_code(self, code: int) -> int:
        if self._stopping and not self._is_up and code == -signal.SIGTERM:
            return 0  # told to stop before it could take signals: nothing had begun
        if self._stopping and code == EXIT_RESTART:
            return 0  # told to stop while one server was to follow another
        if code < 0 and not self._came_up and not self._stopping:
            log_event("server-died", level=logging.ERROR, exit=code, cause="it never came up")
        return code if code >= 0 else EXIT_KILLED

    def _is_over(self, code: int) -> bool:
        """A server that ended in order, was told to, or never came up at the very start."""
        return self._stopping or code == 0 or not self._came_up

    def _before_restart(self, code: int, lived: float) -> None:
        self.restarts += 1
        if code == EXIT_RESTART:
            log_event("server-replaced", kept=len(self._kept))
            return
        self._deaths = 1 if lived > STEADY_SECONDS else self._deaths + 1
        delay = 0.0
        if self._deaths > 1:
            doubled = FIRST_DELAY_SECONDS * 2 ** min(self._deaths - 2, 20)
            delay = min(doubled, max(self._longest_delay, LEAST_DELAY_SECONDS))
        log_event(
            "server-died",
            level=logging.ERROR,
            exit=code,
            lived=round(lived, 1),
            deaths_in_a_row=self._deaths,
            next_start_in=round(delay, 2),
            kept=len(self._kept),
        )
        if delay:
            self._wait(delay)

    def _wait(self, seconds: float, link: socket.socket | None = None) -> bool:
        """Wait for a signal or a packet; true if there is a packet, or the link's end."""
        poller = select.poll()  # select() knows no descriptor above 1023
        poller.register(self._signals, select.POLLIN)
        if link is not None:
            poller.register(link, select.POLLIN)
        ready = [descriptor for descriptor, _events in poller.poll(max(0.0, seconds) * 1000)]
        if self._signals in ready:
            os.eventfd_read(self._signals)
            self._tell_to_stop()
        return link is not None and link.fileno() in ready

    # --- one server -----------------------------------------------------------------------

    def _run_server(self, on_ready: Callable[[str], None] | None) -> int:
        """Start a server, hand over, and serve it until it ends: its exit code."""
        if self._stopping:
            return 0
        try:
            self._mend()
            self._is_up = self._is_ending = False
            self._kill_at = NEVER
            self._server, link = take_server() or self._start()
            with link:
                try:
                    self._serve(link, on_ready)
                except BaseException:  # nobody can be told that it is ready
                    self._server.send_signal(signal.SIGTERM)
                    self._reap(self._server)
                    raise
        except OSError as error:  # no processes, memory or descriptors: perhaps later
            log_event("server-not-started", level=logging.ERROR, cause=error)
            return 1
        return self._reap(self._server)

    def _start(self) -> tuple[ServerProcess, socket.socket]:
        """A new server, and our end of the link to it."""
        ours, theirs = link_pair()
        with theirs:
            try:
                server = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
                )
            except BaseException:
                ours.close()
                raise
        return server, ours

    def _serve(self, link: socket.socket, on_ready: Callable[[str], None] | None) -> None:
        """Take what the server sends until its end of the link is closed."""
        with contextlib.suppress(ConnectionError):  # it died meanwhile: end-of-file follows
            self._hand_over(link)
        looked = time.monotonic()
        while True:
            until = min(self._kill_at, looked + LOOK_SECONDS)
            if not self._wait(until - time.monotonic(), link):
                self._kill_if_due()
                if time.monotonic() >= looked + LOOK_SECONDS:
                    self._reap_orphans()
                    self._replace_if_mended()
                    looked = time.monotonic()
                continue
            try:
                item = receive_item(link)
            except RecordLost as error:
                self._end_server(link, error)
                continue
            except OSError as error:
                log_event("keeper-link-failed", level=logging.ERROR, cause=error)
                return
            if item is None:
                return
            if item.verb == "ready":
                if on_ready is not None and not self._came_up:
                    on_ready(item.record.decode())
                self._came_up = self._is_up = True
            elif item.verb == "alive":
                self._heard()
            else:
                for one in items_of(item):
                    self._take(one)

    def _end_server(self, link: socket.socket, cause: RecordLost) -> None:
        """Let it see the link's end, and a successor try. What it still records, it tells: that is
        taken until it has ended."""
        if not self._is_ending:
            log_event("keeper-link-failed", level=logging.ERROR, cause=cause)
        self._is_ending = True
        self._kill_at = min(self._kill_at, time.monotonic() + STOP_SECONDS)
        with contextlib.suppress(OSError):  # it has ended already
            link.shutdown(socket.SHUT_WR)

    def _heard(self) -> None:
        """The server's loop turns, and so does ours. A server of which that is not heard in time is
        killed: another takes over from it before whoever watches us ends us too."""
        notify("WATCHDOG=1")
        if not self._is_ending:
            self._kill_at = time.monotonic() + self._patience

    def _hand_over(self, link: socket.socket) -> None:
        """Wait as long as it takes: a server on a busy machine needs a while before it reads."""
        with packed(self._options, self._listeners.descriptors()) as (options, beside):
            begin = packet_of("begin", key=str(self.restarts), record=options)
            self._send(link, begin, beside)
        for (kind, key), item in self._kept.items():
            self._send(link, packet_of("item", kind, key, item.record), item.descriptors)
        self._send(link, packet_of("end"), [])

    def _send(self, link: socket.socket, packet: bytes, descriptors: list[int]) -> None:
        while not try_send(link, packet, descriptors):
            # Room, and yet not for this packet: too many descriptors are on their way, for a while.
            is_crowded = wait_for_room(link, 0)
            self._wait(LEAST_DELAY_SECONDS if is_crowded else 0)
            wait_for_room(link, FULL_SECONDS)
            self._kill_if_due()

    def _mend(self) -> bool:
        """Make listening sockets that somebody has removed again; true if there were any."""
        try:
            mended = self._listeners.mend()
        except (BrokerError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log_event("sockets-missing", level=logging.ERROR, cause=self._complaint)
            return False
        self._complaint = ""
        if mended:
            log_event("sockets-mended", level=logging.ERROR)
        return mended

    def _replace_if_mended(self) -> None:
        if self._stopping or not self._is_up or self._server is None:
            return  # one that is not up yet would be killed by the signal: in a moment, then
        if self._mend():
            self._server.send_signal(signal.SIGHUP)  # it hands over; its successor gets the new

    def _take(self, item: Item) -> None:
        name = (item.kind, item.key)
        if item.verb == "note":
            if name in self._kept:
                self._kept[name].record = item.record
            _close_all(item.descriptors)
            return
        previous = self._kept.pop(name, None)
        if previous is not None:
            _close_all(previous.descriptors)
        if item.verb == "keep":
            self._kept[name] = item

    def _tell_to_stop(self) -> None:
        notify("STOPPING=1")
        if self._server is not None:
            # Told as it was, for its log. One that is only starting would print a traceback of it.
            self._server.send_signal(self._stop_signal if self._is_up else signal.SIGTERM)
            self._is_ending = True
            self._kill_at = min(self._kill_at, time.monotonic() + STOP_SECONDS)

    def _kill_if_due(self) -> None:
        """A server that is stopped (SIGSTOP) or hangs does not end in order."""
        if self._server is not None and time.monotonic() >= self._kill_at:
            hangs = f"its loop has not turned for {self._patience:g} s"
            cause = "it was told to stop and did not" if self._is_ending else hangs
            log_event("server-killed", level=logging.ERROR, cause=cause)
            self._server.kill()
            self._kill_at = NEVER

    def _reap(self, server: ServerProcess) -> int:
        """Its exit code. It has closed its link, so it is ending, or is made to."""
        try:
            code = server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait()
        self._server = None
        self._reap_orphans()
        return code

    def _reap_orphans(self) -> None:
        """As the first process of a container we inherit what others had started and left."""
        server = None if self._server is None else self._server.pid
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, _LOOK_ONLY)) and ended.si_pid != server:
                os.waitpid(ended.si_pid, 0)

    def close(self) -> None:
        """Give name, sockets and all that is kept back. Idempotent; not while `run` is at work."""
        if self._is_closed:
            return
        self._is_closed = True
        notify("STOPPING=1")
        for item in self._kept.values():
            _close_all(item.descriptors)
        self._kept.clear()
        self._listeners.close()
        os.close(self._signals)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
