"""The server: one loop that ties conversation, sessions, books, store and loaders together.

Decisions are the books'; this file only carries them out. Nothing here blocks: whatever may take
long goes to a helper thread (device memory, starting a process) or a loader process (everything
that reads a checkpoint).
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from broker import wire
from broker.config import BrokerConfig
from broker.conversation import RETRY_SECONDS, Conversation
from broker.credentials import own_access
from broker.custody import Books, Budget
from broker.custody.actions import Action
from broker.devices.base import Device
from broker.dispatch import Dispatcher
from broker.errors import BrokerError, LoadFailed, ShuttingDown
from broker.journal.memory import MemoryNotes
from broker.journal.recording import server_journal
from broker.keeping import Inheritance, KeeperLink, KeptSession
from broker.link import EXIT_RESTART, METRICS
from broker.loading import Loading
from broker.logs import log_event
from broker.loop import READ, WRITE, Helpers, Loop
from broker.metrics.measures import Measures
from broker.metrics.starting import serve_metrics
from broker.performing import Performing
from broker.reception import Reception
from broker.requests import Tickets
from broker.rundir import BrokerPaths
from broker.sd_notify import watchdog_seconds
from broker.served import limit_of, open_served
from broker.sessions import Passed, PeerIdentity, SessionPeer, end_connection, identify
from broker.stop_signals import on_stop_signal
from broker.store import Store
from broker.times import Times
from broker.troubles import Troubles

if TYPE_CHECKING:
    from broker.preloading import Preload

RECEIVE_BATCH = 64
"""Requests handled in one turn before sessions and timers get their turn."""
FEW_REQUESTS = 2
"""Of a turn, after each of which it is asked whether there are more; where there are so many, the
rest is received until there is none."""
BEATS = 4
"""In the time after which a watchdog ends the broker. The keeper waits for two."""
KEEPER_END_MS = 200
"""A process that dies closes its sockets a moment before it is dead."""


class Server:
    """What answers engines, from taking over what an earlier server left to its own end.

    Args:
        config: validated; the platform has been checked by the keeper.
        paths: where the keeper listens.
        link: the server's end of the line to the keeper.
        router, sessions: the keeper's listening sockets.
        restarts: how many servers this keeper had before.
    """

    def __init__(
        self,
        config: BrokerConfig,
        paths: BrokerPaths,
        link: socket.socket,
        router: socket.socket,
        sessions: socket.socket,
        restarts: int,
    ) -> None:
        self.config = config
        self.paths = paths
        self.restarts = restarts
        self.started = time.time()
        self.troubles = Troubles()
        self._journal = server_journal(paths, config.journal_limit)
        atexit.register(self._journal.close)  # not sooner: a crash is told when all else is closed
        self.devices: dict[str, Device] = open_served(config.device)
        self.platform = next(iter(self.devices.values())).properties.platform
        self.keeper = KeeperLink(link)
        inherited = self.keeper.receive_inheritance()
        self.epoch = inherited.facts.get("epoch", os.urandom(8).hex().encode()).decode()
        self.books = Books(self._budgets(inherited), self.epoch, keeping=True, limits=config.limits)
        self.books.counters["server_restarts"] = restarts
        self.first_started = self._first_started(inherited)
        self.store = Store(self.devices)
        self._canaries = inherited.canaries
        self.access = own_access(config.group)
        self.loop = Loop()
        self._memory_notes = MemoryNotes(self.loop, self.books, self._journal)
        self.helpers = Helpers(self.loop)
        self.peers: dict[int, SessionPeer] = {}
        self._passed = Passed()
        self.preloads: list[Preload] = []
        self.times = Times(self.books.sets)
        self.measures = Measures()
        self.loading = Loading(self)
        self._performing = Performing(self)
        self.is_stopping = False
        self.is_replaced = False
        self.exit_code = 0
        self._keeper_pidfd = os.pidfd_open(os.getppid())
        self._retrying = False
        self._sessions = sessions
        self.conversation = Conversation(
            self.loop, router, paths.zmq, self.access, config.limits, self._conversation_lost
        )
        self.tickets = Tickets(self.conversation, config.limits, self.measures)
        self.dispatcher = Dispatcher(self)
        self._take_over(inherited)
        self._reception = Reception(self, sessions)
        self._metrics = serve_metrics(self, inherited.listeners.get(METRICS))
        self.loop.add(self.conversation.fileno(), READ, self.conversation.on_readable)
        self.loop.add(self.keeper.fileno(), READ, self._on_keeper)
        self.keeper.on_behind(self._await_keeper)

    def _budgets(self, inherited: Inheritance) -> dict[str, Budget]:
        """Limits stay what they were at the first start: what was free then is in use now."""
        kept = msgspec.json.decode(inherited.facts.get("limits", b"{}"), type=dict[str, int])
        limits = {
            uuid: kept[uuid] if uuid in kept else limit_of(device, self.config.memory_limit)
            for uuid, device in self.devices.items()
        }
        self.keeper.keep_fact("limits", msgspec.json.encode(limits))
        self.keeper.keep_fact("epoch", self.epoch.encode())
        return {
            uuid: Budget(limits[uuid], device.properties.granularity)
            for uuid, device in self.devices.items()
        }

    def _first_started(self, inherited: Inheritance) -> float:
        """When the first server of this keeper started, in seconds since 1970."""
        kept = inherited.facts.get("started", repr(self.started).encode())
        self.keeper.keep_fact("started", kept)
        return float(kept)

    def _take_over(self, inherited: Inheritance) -> None:
        """Go on where an earlier server ended. Engines are asked to say hello again."""
        for kept, descriptors in inherited.sets:
            self.store.adopt(kept.id, *descriptors)
            self.times.adopt(kept.id, kept.sealed)
        sets = [kept for kept, _descriptors in inherited.sets]
        numbers = [kept.id for kept, _connection in inherited.sessions]
        actions = self.books.restore(sets, numbers, inherited.leases, restarts=self.restarts)
        for session, _descriptor in inherited.sessions:
            self.books.sessions[session.id].watches.update(session.watches)
        self.perform(actions)
        for session, descriptor in inherited.sessions:
            connection = socket.socket(fileno=descriptor)
            with self._costing_it_alone(session.id, connection):
                # Ends the session at once if its process has died meanwhile.
                self._attend(session.id, connection, identify(connection), session)
        if self.restarts:
            log_event(
                "taken-over",
                restarts=self.restarts,
                sessions=len(inherited.sessions),
                sets=len(inherited.sets),
                leases=len(inherited.leases),
            )

    def _on_keeper(self, events: int) -> None:
        if events & WRITE:
            self.keeper.catch_up()
            self.loop.modify(self.keeper.fileno(), READ)
            if self.keeper.is_behind:
                # There is room, perhaps but not for descriptors (ETOOMANYREFS), and so for a while.
                self.loop.call_later(RETRY_SECONDS, self._await_keeper)
        if events & ~WRITE:
            self._keeper_gone()

    def _await_keeper(self) -> None:
        """Go on with what waits for the keeper when it has room."""
        if self.keeper.is_behind:
            self.loop.modify(self.keeper.fileno(), READ | WRITE)

    def _keeper_gone(self) -> None:
        """Without its keeper a server must not go on: nobody would take over from it."""
        self.exit_code = 1
        poller = select.poll()
        poller.register(self._keeper_pidfd, select.POLLIN)
        if poller.poll(KEEPER_END_MS):
            log_event("keeper-gone", level=logging.ERROR)
            self.stop("the broker's keeper process has died")
            return
        # It lives and has closed the line: it could not take a record. Let a successor try.
        log_event("keeper-lost-a-record", level=logging.ERROR)
        self.is_replaced = True
        self.loop.stop()

    # --- life -----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until `stop`; then tell the engines and end the loaders. The exit code."""
        log_event(
            "serving",
            name=self.config.name,
            device=",".join(self.devices),
            pid=os.getpid(),
            epoch=self.epoch,
        )
        self._memory_notes.look()
        self.loop.call_soon_threadsafe(self._tell_ready)
        watchdog = watchdog_seconds(os.getppid())
        if watchdog is not None:
            self._beat(watchdog / BEATS)
        self._preload()
        try:
            self.loop.run(self._drain)
        except BaseException:
            self.is_replaced = True  # by a server that takes over, as if this one had been killed
            raise
        finally:
            self._close()
        return self.exit_code

    def _preload(self) -> None:
        if self.config.preload:
            from broker.preloading import preload  # with all that looks into checkpoints

            for path in self.config.preload:
                self.preloads += preload(self, os.fspath(path))

    def _tell_ready(self) -> None:
        self.keeper.ready(
            f"weight-broker ready: name={self.config.name} device={','.join(self.devices)} "
            f"platform={self.platform} socket={self.paths.zmq} pid={os.getppid()} "
            f"server_pid={os.getpid()}"
        )

    def _beat(self, seconds: float) -> None:
        """Let the keeper know, again and again, that the loop turns."""
        self.keeper.alive()
        self.loop.call_later(seconds, partial(self._beat, seconds))

    def stop(self, why: str) -> None:
        """Begin an orderly stop. Idempotent; from the loop or a signal handler of its thread."""
        if self.is_stopping:
            return
        self.is_stopping = True
        log_event("stopping", cause=why)
        self.dispatcher.broadcast(wire.Event("broker-stopping", {"cause": why}))
        self.tickets.reply_all(ShuttingDown(f"the broker is stopping ({why})"))
        self.loop.stop()

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT begin an orderly stop, SIGHUP the change to a new server.

        Only from the main thread.
        """
        on_stop_signal(self._on_signal)
        signal.signal(signal.SIGHUP, lambda *_: self.loop.call_soon_threadsafe(self.hand_over))

    def _on_signal(self, number: signal.Signals) -> None:
        if self.is_stopping:
            return  # the loop is closed, or about to be
        self.loop.call_soon_threadsafe(lambda: self.stop(f"received {number.name}"))

    def hand_over(self) -> None:
        """End so that a new server, perhaps of a newer version, goes on; engines notice nothing."""
        if self.is_stopping:
            return
        self.exit_code = EXIT_RESTART
        self.is_stopping = self.is_replaced = True
        log_event("handing-over")
        self.loop.stop()

    def _close(self) -> None:
        self.tell_due()
        self.is_stopping = True
        self.helpers.close()
        self.loop.run_pending()
        self.loading.close()
        if self._metrics is not None:
            self._metrics.close()
        self._sessions.close()
        # The last replies first: after a session's end-of-file nobody reads them any more.
        self.conversation.close()
        for peer in self.peers.values():
            peer.close(end=not self.is_replaced)
        self.store.close()
        self.troubles.close()
        self.loop.close()
        self.keeper.close()
        os.close(self._keeper_pidfd)
        log_event("stopped", name=self.config.name)

    # --- requests -------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Requests that have come, then the answers of this turn; true if there are more."""
        self._handle_requests()
        self.tell_due()
        if self.conversation.has_unsent:
            self._retry_later()
        return self.conversation.has_request

    def _handle_requests(self) -> None:
        for number in range(RECEIVE_BATCH):
            received = self.conversation.receive()
            if received is None or self.is_stopping:
                return  # what comes after the end of this server, the next one is asked again
            self.dispatcher.handle(*received)
            if number < FEW_REQUESTS and not self.conversation.has_request:
                return

    def perform(self, actions: list[Action]) -> None:
        """Carry out what the books decided (performing.py). Nothing any more once the end has
        begun."""
        if self.is_stopping:
            return
        self._performing.perform(actions)
        if actions:
            self._memory_notes.look_soon()

    def tell_due(self) -> None:
        """Answer everything that is decided; each turn ends with it."""
        self._performing.tell_due()

    def _retry_later(self) -> None:
        """Kept replies are tried again until they are gone."""
        if not self._retrying:
            self._retrying = True
            self.loop.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        if self.conversation.retry():
            self._retry_later()

    # --- sessions -------------------------------------------------------------------------

    def welcome(self, session: int, connection: socket.socket, identity: PeerIdentity) -> None:
        """A process has connected, or a loader was started."""
        log_event(
            "session-opened",
            session=session,
            pid=identity.pid,
            uid=identity.uid,
            command=identity.command,
        )
        kept = KeptSession(session, os.urandom(16), "", since=time.time())
        with self._costing_it_alone(session, connection):
            if not self.books.sessions[session].is_loader:
                self.keeper.keep_session(kept, connection.fileno())
            self._attend(session, connection, identity, kept)

    @contextmanager
    def _costing_it_alone(self, session: int, connection: socket.socket) -> Iterator[None]:
        """A mistake of ours in this block ends the session, not the server: its successor would
        make the same one as long as that peer lives."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged whole; the others are served
            self._session_failed(error, session)
            self.loop.remove(connection.fileno())
            end_connection(connection)
            if not self.loading.closed_its_session(session):
                self.end_session(session, LoadFailed("the broker failed to take its session on"))

    def _session_failed(self, error: Exception, session: int) -> None:
        self.note_internal_error(error, operation="session", session=session)

    def note_internal_error(self, error: Exception, **facts: object) -> None:
        """A mistake of ours has cost somebody a request or a session: count it, log it whole."""
        self.books.counters["internal_errors"] += 1
        log_event(
            "internal-error",
            level=logging.ERROR,
            exc_info=(type(error), error, error.__traceback__),
            **facts,
            cause=repr(error),
        )

    def _attend(
        self,
        session: int,
        connection: socket.socket,
        identity: PeerIdentity,
        kept: KeptSession,
    ) -> None:
        peer = SessionPeer(
            self.loop,
            session,
            connection,
            identity,
            self.config.limits,
            self._passed,
            self._attach,
            self._session_ended,
            self._packet_refused,
            self._session_failed,
            self._delivered_by,
        )
        peer.token, peer.label, peer.since = kept.token, kept.label, kept.since
        peer.is_own = self.access.is_own(identity.uid)
        self.peers[session] = peer
        self.books.introduce(session, peer.who)
        peer.send(wire.Welcome(session, peer.token, self.epoch))

    def _delivered_by(self, pid: int) -> int:
        return sum(peer.delivered for peer in self.peers.values() if peer.identity.pid == pid)

    def note_session(self, session: int) -> None:
        """Something that a successor needs to know of the session has changed."""
        peer, record = self.peers[session], self.books.sessions[session]
        if not record.is_loader:
            watches = sorted(record.watches)
            kept = KeptSession(session, peer.token, peer.label, watches, peer.since)
            self.keeper.note_session(kept)

    def _attach(self, peer: SessionPeer, request: wire.Attach) -> None:
        lease, store = request.lease, self.store
        canary = None
        if lease.startswith(wire.CANARY):
            canary = self._canaries.get(lease.removeprefix(wire.CANARY))
        if canary is not None:
            message = wire.Attached(lease, canary.nbytes, self.epoch, canary.seed)
            peer.deliver(request, message, [canary.descriptor])
            return
        try:
            record, writing = self.books.attachment(peer.session, lease)
        except BrokerError as error:
            peer.refuse(lease, error)
            return
        descriptors = store.for_writer(record.id) if writing else store.for_reader(record.id)
        peer.deliver(request, wire.Attached(lease, record.nbytes, self.epoch), descriptors)

    def _packet_refused(self, peer: SessionPeer, error: BrokerError) -> None:
        self.books.counters["packets_refused"] += 1
        log_event(
            "packet-refused",
            session=peer.session,
            pid=peer.identity.pid,
            status=error.status,
            cause=error.sentence,
        )

    def _conversation_lost(self, routing: bytes, cause: str) -> None:
        """Its connection was cut off. Leases, claims and requests stay; it may say hello again."""
        session = self.dispatcher.session_of(routing)
        if session is None or session not in self.peers:
            return
        peer = self.peers[session]
        if not peer.is_open:
            return  # a loader that is ending
        self.books.counters["conversations_lost"] += 1
        log_event(
            "conversation-lost",
            level=logging.WARNING,
            session=session,
            pid=peer.identity.pid,
            cause=cause,
        )
        self.dispatcher.untie(session)
        self.books.conversation_lost(session)
        peer.send(wire.Welcome(session, peer.token, self.epoch))

    def _session_ended(self, peer: SessionPeer, how: str) -> None:
        if self.loading.closed_its_session(peer.session):
            return
        is_writing = self.books.sessions[peer.session].claims
        who = "the engine that was writing the weights" if is_writing else "the engine"
        cause = f"{who} closed its session" if peer.has_left else f"{who} is gone: {how}"
        self.end_session(peer.session, LoadFailed(cause), closed=peer.has_left)

    def end_session(self, session: int, cause: BrokerError, *, closed: bool = False) -> None:
        """Undo what a session holds. `closed`: the process behind it has ended in order."""
        peer = self.peers.get(session)
        if peer is not None:
            peer.close()
        self.dispatcher.end(session)
        self.tickets.drop_session(session)
        self.keeper.drop_session(session)
        self.perform(self.books.end_session(session, cause, closed=closed))
        self.peers.pop(session, None)  # until now, so that the log can say whose session it was
