"""Who gets a session: the kernel's word on the process, the limits, then the welcome.

All methods belong to the loop's thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from itertools import islice
from typing import TYPE_CHECKING

from broker import wire
from broker.amounts import counted
from broker.credentials import Credentials, peer_credentials
from broker.errors import BrokerError, Busy, NoSession
from broker.limits import descriptor_limit
from broker.logs import log_event
from broker.loop import READ
from broker.sessions import command_of, end_connection, identify

if TYPE_CHECKING:
    from broker.server import Server

ACCEPT_BATCH = 16
"""Connections accepted before others get their turn."""
PAUSE_SECONDS = 0.2
HOLDERS_NAMED = 5
"""Of those who have a session, where there are too many."""
SPARE_SHARE = 8
SPARE_DESCRIPTORS = 128
"""Of the descriptors this process may have, an eighth, at least so many, is for everything but new
sessions: libzmq ends the process when it finds none for a connection."""


class Reception:
    """Accepts sessions for a server, or refuses them with a sentence.

    Args:
        listener: non-blocking; borrowed.
    """

    def __init__(self, broker: Server, listener: socket.socket) -> None:
        self._broker = broker
        self._listener = listener
        self._open()

    def _open(self) -> None:
        if not self._broker.is_stopping:
            self._broker.loop.add(self._listener.fileno(), READ, lambda _events: self._accept())

    def _pause(self) -> None:
        """The listener stays readable, so do not spin on it."""
        self._broker.loop.remove(self._listener.fileno())
        self._broker.loop.call_later(PAUSE_SECONDS, self._open)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BATCH):
            if self._broker.keeper.is_behind:
                self._pause()  # a session that is not recorded is lost with this server
                return
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._broker.books.counters["accepts_failed"] += 1
                log_event("accept-failed", level=logging.ERROR, cause=error)
                self._pause()
                return
            try:
                self._receive(connection)
            except Exception as error:  # noqa: BLE001 - logged whole; the others are served
                self._broker.note_internal_error(error, operation="session")
                end_connection(connection)

    def _receive(self, connection: socket.socket) -> None:
        peer = peer_credentials(connection)
        refusal = self._refusal(connection, peer)
        if refusal is None:
            identity = identify(connection)
            self._broker.welcome(self._broker.books.open_session(), connection, identity)
            return
        self._broker.books.counters["sessions_refused"] += 1
        log_event(
            "session-refused",
            level=logging.WARNING,
            pid=peer.pid,
            uid=peer.uid,
            command=command_of(peer.pid),
            cause=refusal.sentence,
        )
        packet = wire.Refused("", refusal.status, refusal.to_payload().decode())
        with contextlib.suppress(OSError):  # it has gone already
            connection.send(wire.encode(packet))  # the first packet always fits
        end_connection(connection)

    def _refusal(self, connection: socket.socket, peer: Credentials) -> BrokerError | None:
        """Why this process gets no session; None if it does."""
        broker = self._broker
        limits = broker.config.limits
        if not broker.access.admits(peer):
            return NoSession(
                f"this broker serves processes of {broker.access}; yours runs as uid {peer.uid}, "
                f"group {peer.gid}: run it as that user, or share the broker (serve --group)",
                uid=peer.uid,
                gid=peer.gid,
            )
        engines = sum(not record.is_loader for record in broker.books.sessions.values())
        if engines >= limits.sessions:
            whose = ", ".join(peer.who for peer in islice(broker.peers.values(), HOLDERS_NAMED))
            more = ", …" if len(broker.peers) > HOLDERS_NAMED else ""
            return Busy(
                f"{counted(engines, 'process has', 'processes have')} a session with this broker "
                f"already ({whose}{more}); end some of them first {limits.reached('sessions')}",
                limit="sessions",
                value=engines,
            )
        own = sum(other.identity.pid == peer.pid for other in broker.peers.values())
        if peer.pid and own >= limits.process_sessions:
            return Busy(
                f"your process {peer.pid} has {counted(own, 'session')} with this broker already; "
                f"close some of them first {limits.reached('process_sessions')}",
                limit="process_sessions",
                value=own,
            )
        # The kernel gives out the lowest number that is free: so many descriptors are open.
        most = descriptor_limit()
        if connection.fileno() >= most - max(SPARE_DESCRIPTORS, most // SPARE_SHARE):
            return Busy(
                f"the broker has {connection.fileno()} descriptors open and may have {most}; start "
                "it with a higher hard limit (ulimit -Hn), or end some engines first",
                limit="RLIMIT_NOFILE",
                value=most,
            )
        return None
