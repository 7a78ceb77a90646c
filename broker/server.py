"""The broker: one loop that ties conversation, sessions, books, store and loaders together.

Decisions are the books'; this file only carries them out. Nothing here blocks: whatever may take
long goes to a helper thread (device memory, starting a process) or a loader process (everything
that reads a checkpoint).
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker import wire
from broker.checkpoints.files import open_checkpoint
from broker.config import BrokerConfig, memory_limit_bytes
from broker.conversation import RETRY_SECONDS, Conversation
from broker.custody import Books, Budget
from broker.custody.actions import (
    Action,
    CreateSlab,
    FreeSlab,
    FreezeSlab,
    Log,
    Notify,
    Reply,
    StartLoader,
    StartShipped,
    StopLoader,
    Tell,
)
from broker.devices import open_devices
from broker.devices.base import Device
from broker.dispatch import Dispatcher
from broker.errors import BrokerError, InternalError, LoadFailed, ShuttingDown
from broker.loading import Loading
from broker.loop import READ, Helpers, Loop
from broker.platform import check_ipc_platform_support
from broker.requests import Tickets
from broker.rundir import (
    DIRECTORY_VARIABLE,
    BrokerPaths,
    NameLock,
    broker_directory,
    candidate_directories,
    create_listener,
    remove_socket,
)
from broker.sessions import PeerIdentity, SessionPeer, identify
from broker.store import Store

log = logging.getLogger("weight-broker")

RECEIVE_BATCH = 64
"""Requests handled in one turn before sessions and timers get their turn."""
ACCEPT_PAUSE_SECONDS = 0.2


class Broker:
    """A broker, from its platform check to its last socket.

    Everything that can be refused is refused here, before `run`: platform, name, directory, a
    second broker of the same name. Nothing is left behind then.

    Raises:
        UnsupportedPlatformForIPCError: no device here can share memory between processes.
        Busy: a broker of this name is running; the sentence names its pid.
        BadRequest: the directory is not safe, the name or a path is not usable.
    """

    def __init__(self, config: BrokerConfig) -> None:
        check_ipc_platform_support(where="broker", device=config.device)
        self.config = config
        self.epoch = secrets.token_hex(8)
        self.started = time.time()
        self.devices: dict[str, Device] = {
            d.properties.uuid: d for d in open_devices(config.device)
        }
        self.platform = next(iter(self.devices.values())).properties.platform
        for path in config.preload:
            open_checkpoint(path).close()
        self.paths = _paths(config)
        self._bound: list[Path] = []
        self._lock = NameLock(self.paths)
        self._lock.acquire()
        try:
            self._open()
        except BaseException:
            self._remove_sockets()
            self._lock.release()
            raise

    def _open(self) -> None:
        self.books = Books(self._budgets(), self.epoch)
        self.store = Store(self.devices)
        self.loop = Loop()
        self.helpers = Helpers(self.loop)
        self.peers: dict[int, SessionPeer] = {}
        self.loading = Loading(self)
        self.is_stopping = False
        self._retrying = False
        self._sessions = self._listen(self.paths.session, socket.SOCK_SEQPACKET)
        self.conversation = Conversation(
            self._listen(self.paths.zmq, socket.SOCK_STREAM), self.paths.zmq
        )
        self.tickets = Tickets(self.conversation)
        self.dispatcher = Dispatcher(self)
        self.loop.add(self._sessions.fileno(), READ, lambda _events: self._accept())
        self.loop.add(self.conversation.fileno(), READ, lambda _events: None)

    def _budgets(self) -> dict[str, Budget]:
        return {
            uuid: Budget(
                memory_limit_bytes(
                    self.config.memory_limit,
                    free_bytes=device.free_bytes(),
                    total_bytes=device.properties.total_bytes,
                ),
                device.properties.granularity,
            )
            for uuid, device in self.devices.items()
        }

    # --- life -----------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop`; then tell the engines, end the loaders, remove the sockets.

        Args:
            on_ready: called on the loop's first turn, when `ping` is about to be answered.
        """
        log.info("serving name=%s device=%s pid=%d epoch=%s", *self._identity())
        if on_ready is not None:
            self.loop.call_soon_threadsafe(on_ready)
        for path in self.config.preload:
            self.dispatcher.preload(path)
        try:
            self.loop.run(self._drain)
        finally:
            self._close()

    def _identity(self) -> tuple[str, str, int, str]:
        return (self.config.name, ",".join(self.devices), os.getpid(), self.epoch)

    def stop(self, why: str) -> None:
        """Begin an orderly stop. Idempotent; from the loop or a signal handler of its thread."""
        if self.is_stopping:
            return
        self.is_stopping = True
        log.info("stopping cause=%r", why)
        self.dispatcher.broadcast(wire.Event("broker-stopping", {"cause": why}))
        self.tickets.reply_all(ShuttingDown(f"the broker is stopping ({why})"))
        self.loop.stop()

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT begin an orderly stop. Only from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: self._on_signal(received))

    def _on_signal(self, number: int) -> None:
        if self.is_stopping:
            return  # an impatient second one finds the loop closed, or about to be
        name = signal.Signals(number).name
        self.loop.call_soon_threadsafe(lambda: self.stop(f"received {name}"))

    def _close(self) -> None:
        self.is_stopping = True
        self.helpers.close()
        self.loop.run_pending()
        self.loading.close()
        self._sessions.close()
        # The last replies first: after a session's end-of-file nobody reads them any more.
        self.conversation.close()
        for peer in self.peers.values():
            peer.close()
        self.store.close()
        self.loop.close()
        self._remove_sockets()
        self._lock.release()
        log.info("stopped name=%s", self.config.name)

    def _remove_sockets(self) -> None:
        while self._bound:
            remove_socket(self._bound.pop())

    def _listen(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        listener = create_listener(path, kind)
        self._bound.append(path)
        return listener

    # --- requests -------------------------------------------------------------------------

    def _drain(self) -> bool:
        for _ in range(RECEIVE_BATCH):
            received = self.conversation.receive()
            if received is None:
                return False
            self.dispatcher.handle(*received)
        return True

    def retry_later(self) -> None:
        """Kept replies are tried again until they are gone."""
        if self.conversation.has_unsent and not self._retrying:
            self._retrying = True
            self.loop.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self.conversation.retry()
        self.retry_later()

    # --- sessions -------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _address = self._sessions.accept()
        except OSError as error:
            log.warning("a session could not be accepted: %s", error)
            self._pause_accepting()
            return
        self.welcome(self.books.open_session(), connection, identify(connection))

    def _pause_accepting(self) -> None:
        """Out of descriptors, perhaps: the listener stays readable, so do not spin on it."""
        listener = self._sessions.fileno()
        self.loop.remove(listener)
        self.loop.call_later(
            ACCEPT_PAUSE_SECONDS,
            lambda: self.loop.add(listener, READ, lambda _events: self._accept()),
        )

    def welcome(self, session: int, connection: socket.socket, identity: PeerIdentity) -> None:
        peer = SessionPeer(
            self.loop, session, connection, identity, self._attach, self._session_ended
        )
        self.peers[session] = peer
        log.info(
            "session-opened session=%d pid=%d command=%s", session, identity.pid, identity.command
        )
        peer.send(wire.Welcome(session, peer.token, self.epoch))

    def _attach(self, peer: SessionPeer, request: wire.Attach) -> None:
        try:
            record, writing = self.books.attachment(peer.session, request.lease)
        except BrokerError as error:
            peer.send(wire.Refused(request.lease, error.status, error.to_payload().decode()))
            return
        store = self.store
        descriptors = store.for_writer(record.id) if writing else store.for_reader(record.id)
        peer.send(wire.Attached(request.lease, record.nbytes, self.epoch), descriptors)

    def _session_ended(self, peer: SessionPeer, how: str) -> None:
        if self.loading.closed_its_session(peer.session):
            return
        is_writing = self.books.sessions[peer.session].claims
        who = "the engine that was writing the weights" if is_writing else "the engine"
        self.end_session(peer.session, LoadFailed(f"{who} is gone: {how}"))

    def end_session(self, session: int, cause: BrokerError) -> None:
        peer = self.peers.pop(session, None)
        if peer is not None:
            peer.close()
        self.dispatcher.untie(session)
        self.tickets.drop_session(session)
        self.perform(self.books.end_session(session, cause))

    # --- carrying out ---------------------------------------------------------------------

    def perform(self, actions: list[Action]) -> None:
        """Carry out what the books decided, in order. Nothing any more once the end has begun."""
        if self.is_stopping:
            return
        for action in actions:
            self._perform(action)
        self.retry_later()

    def _perform(self, action: Action) -> None:
        match action:
            case Reply(ticket, body):
                self.tickets.reply(ticket, body)
            case Tell(ticket, body):
                self.tickets.tell(ticket, body)
            case Log(event, detail):
                log.info("%s %s", event, " ".join(f"{k}={v!r}" for k, v in detail.items()))
            case Notify(session, event):
                self.dispatcher.notify(session, event)
            case StartLoader() | StartShipped():
                self.loading.start(action)
            case StopLoader(session):
                self.loading.stop(session)
            case CreateSlab(set_id, device, nbytes):
                manifest = self.dispatcher.take_manifest(set_id)
                self._on_device(
                    set_id,
                    lambda: self.store.create(set_id, device, nbytes, manifest),
                    self.books.slab_created,
                )
            case FreezeSlab(set_id, device):
                self._on_device(
                    set_id, lambda: self.store.freeze(set_id, device), self.books.slab_frozen
                )
            case FreeSlab(set_id):
                self.helpers.submit(("set", set_id), lambda: self.store.free(set_id))

    def _on_device(
        self, set_id: int, call: Callable[[], None], then: Callable[[int], list[Action]]
    ) -> None:
        def done(result: Any) -> None:
            if isinstance(result, BaseException):
                self.perform(self.books.slab_failed(set_id, _as_broker_error(result)))
            else:
                self.perform(then(set_id))

        self.helpers.submit(("set", set_id), call, done)


def _paths(config: BrokerConfig) -> BrokerPaths:
    given = config.directory
    environ = None if given is None else {DIRECTORY_VARIABLE: str(given.absolute())}
    for candidate in candidate_directories(environ):
        BrokerPaths(candidate, config.name)  # a bad name is refused before anything is created
    return BrokerPaths(broker_directory(environ), config.name)


def _as_broker_error(error: BaseException) -> BrokerError:
    if isinstance(error, BrokerError):
        return error
    return InternalError(f"unexpected {type(error).__name__}: {error}")
