"""One request in, one decision asked of the books, one answer out: the operations."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from broker import wire
from broker.amounts import counted
from broker.custody.actions import Action, CreateSlab
from broker.errors import (
    BadRequest,
    BrokerError,
    Busy,
    InternalError,
    NoSession,
    ProtocolMismatch,
    StaleEpoch,
    from_payload,
)
from broker.logs import log_event
from broker.packets import close_received
from broker.reporting import status_report
from broker.requests import Encoded, RequestKey, Ticket, answer, request_key
from broker.store import check_manifest

if TYPE_CHECKING:
    from broker.server import Server
    from broker.sessions import SessionPeer

PING = [b"ping", b""]
"""Operation and payload."""
ENDED = 256
"""Conversations of sessions that have ended, of which late requests are no refusals."""
REPORT_SECONDS = 0.25
"""Progress goes out at most four times a second (DESIGN section 3)."""


class Dispatcher:
    """Decodes requests and answers them; knows which conversation belongs to which session."""

    def __init__(self, broker: Server) -> None:
        self._broker = broker
        self._session_of: dict[bytes, int] = {}
        self._routing_of: dict[int, bytes] = {}
        self._ended: deque[bytes] = deque(maxlen=ENDED)
        self._manifests: dict[int, int] = {}
        self._reported: dict[int, float] = {}
        self._status_turn = 0.0
        self._encoded_status = Encoded(b"")

    def handle(self, routing: bytes, frames: list[bytes]) -> None:
        """Answer one request, whatever it is."""
        if frames[-2:] == PING and self._answer_ping(routing, frames):
            return
        try:
            self._check_size(frames)
            request = wire.split_request(frames)
            message = wire.decode_request(request.operation, request.payload)
            session = self._session_for(request.operation, routing)
            if not isinstance(message, wire.Status):
                self._status_turn = 0.0
            key = request_key(session, request)
            if key is not None and self._is_repeated(key, routing, request.envelope):
                return
        except BrokerError as error:
            self._refuse(routing, frames, error)
            return
        except Exception as error:  # noqa: BLE001 - logged whole, and answered
            self._broker.note_internal_error(error)
            self._refuse(
                routing, frames, InternalError(f"a request failed in the broker: {error!r}")
            )
            return
        ticket = self._broker.tickets.open(
            request.operation,
            session,
            routing=routing,
            envelope=request.envelope,
            nbytes=len(request.payload),
            key=key,
        )
        try:
            self._broker.perform(self._decide(ticket, message))
        except BrokerError as error:
            self._note_refusal(request.operation, routing, session, error)
            self._answer(ticket, error)
        except Exception as error:  # noqa: BLE001 - logged whole, and answered
            self._broker.note_internal_error(error, operation=request.operation, session=session)
            failed = f"{request.operation} failed in the broker: {error!r}"
            self._answer(ticket, InternalError(failed))

    def _answer_ping(self, routing: bytes, frames: list[bytes]) -> bool:
        """Answer a `ping`, which needs neither ticket nor books and comes most often; False: it is
        no request as it stands."""
        began, envelope = time.monotonic(), frames[:-2]
        if len(frames) > self._broker.config.limits.frames or not wire.is_envelope(envelope):
            return False
        session = self._session_of.get(routing)
        if session is not None:
            self._broker.tickets.count(session)
        self._broker.tell_due()  # answers come in the order of the requests
        self._broker.conversation.reply(routing, [*envelope, *answer(self._pong())])
        self._broker.measures.answered("ping", None, began)
        return True

    def _refuse(self, routing: bytes, frames: list[bytes], error: BrokerError) -> None:
        if isinstance(error, NoSession) and routing in self._ended:
            self._broker.books.counters["requests_late"] += 1
        else:
            self._note_refusal(None, routing, self._session_of.get(routing), error)
        self._broker.tell_due()
        self._broker.conversation.reply(routing, [*wire.envelope_of(frames), *answer(error)])

    def _note_refusal(
        self, operation: str | None, routing: bytes, session: int | None, error: BrokerError
    ) -> None:
        connection = self._broker.conversation.connections.of(routing)
        self._broker.books.counters["requests_refused"] += 1
        log_event(
            "request-refused",
            operation=operation,
            session=session,
            pid=None if connection is None else connection.peer.pid,
            status=error.status,
            cause=error.sentence,
        )

    def _is_repeated(self, key: RequestKey, routing: bytes, envelope: tuple[bytes, ...]) -> bool:
        """A request that came already, perhaps on a conversation which its session has lost since.

        It is not decided again: its answer goes to the new one.
        """
        if not self._broker.tickets.is_repeated(key, routing, envelope):
            return False
        session, request, _said = key
        self._broker.books.counters["requests_repeated"] += 1
        pid = self._broker.peers[session].identity.pid
        log_event("request-repeated", session=session, pid=pid)
        self._broker.peers[session].discard(request)
        return True

    def _check_size(self, frames: list[bytes]) -> None:
        """Raise `BadRequest` for too many frames, or too large a payload."""
        limits = self._broker.config.limits
        if len(frames) > limits.frames:
            raise BadRequest(
                f"a request may have {limits.frames} frames at most, this one had more "
                f"{limits.reached('frames')}",
                limit="frames",
            )
        if frames and len(frames[-1]) > limits.frame_bytes:
            raise BadRequest(
                f"a payload may have {limits.frame_bytes} bytes at most, this one has "
                f"{len(frames[-1])} {limits.reached('frame_bytes')}",
                limit="frame_bytes",
            )

    def _session_for(self, operation: str, routing: bytes) -> int | None:
        session = self._session_of.get(routing)
        if session is None and operation not in wire.SESSIONLESS and operation != "hello":
            raise NoSession(
                f"{operation} needs a session: connect to the session socket, say hello"
            )
        return session

    def _decide(self, ticket: Ticket, message: wire.Message) -> list[Action]:
        books = self._broker.books
        session = ticket.session or 0
        match message:  # what comes most often first: each case that does not fit takes time
            case wire.Acquire():
                if message.source is not None:
                    peer = self._peer_of(ticket)
                    ticket.source = peer.take(ticket.envelope[0], "source")
                    if not (peer.is_own or books.is_known(message)):
                        raise self._may_not_load()
                self._check_limits(ticket)
                return books.acquire(session, ticket.number, message)
            case wire.Release():
                return books.release(session, ticket.number, message)
            case wire.Status():
                self._broker.tell_due()
                return self._answer(ticket, self._status())
            case wire.Hello():
                return self._answer(ticket, self._hello(ticket, message))
            case wire.Shutdown(force):
                self._check_own(ticket)
                return self._shutdown(ticket, force=force)
            case wire.Upgrade():
                self._check_own(ticket)
                actions = self._answer(ticket, wire.Done())
                self._broker.hand_over()
                return actions
            case wire.Claim():
                self._check_limits(ticket)
                return books.claim(session, ticket.number, message)
            case wire.Load():
                # The code first: with the answer, also a refusal, its descriptor is closed.
                ticket.source = self._take(ticket, "code")
                self._check_own(ticket)
                self._check_loaders_allowed()
                self._check_limits(ticket)
                return books.load(session, ticket.number, message)
            case wire.Resolve():
                return books.resolve(session, ticket.number, message)
            case wire.Reserve():
                return self._reserve(ticket, session, message)
            case wire.Seal():
                self._check_limits(ticket)
                return books.seal(session, ticket.number, message)
            case wire.Abandon():
                return books.abandon(
                    session, ticket.number, self._with_last_words(session, message)
                )
            case wire.Report():
                return self._report(ticket, session, message)
            case wire.Cancel():
                return books.cancel(session, ticket.number, message)
            case wire.Evict():
                return books.evict(ticket.number, message)
            case wire.Pin():
                return books.pin(ticket.number, message)
            case wire.Unpin():
                return books.unpin(ticket.number, message)
            case wire.Watch():
                actions = books.watch(session, ticket.number, message)
                self._broker.note_session(session)
                return actions
            case wire.Unwatch():
                actions = books.unwatch(session, ticket.number, message)
                self._broker.note_session(session)
                return actions
        raise InternalError(f"the operation {ticket.operation} is not handled")

    def _status(self) -> Encoded:
        """Made once for all who ask one after the other in a turn: no answer takes longer, and
        hundreds of them would hold up everybody else's."""
        turn = self._broker.loop.turn_began
        if self._status_turn != turn:
            self._encoded_status = Encoded(wire.encode(status_report(self._broker)))
            self._status_turn = turn
        return self._encoded_status

    def _answer(self, ticket: Ticket, body: msgspec.Struct | BrokerError) -> list[Action]:
        self._broker.tell_due()  # answers come in the order of the requests
        self._broker.tickets.reply(ticket.number, body)
        return []

    # --- operations that are not the books' alone -----------------------------------------

    def _pong(self) -> wire.Pong:
        age = time.monotonic() - self._broker.loop.turn_began
        return wire.Pong(wire.PROTOCOL, self._broker.epoch, os.getpid(), round(age * 1000, 3))

    def _hello(self, ticket: Ticket, message: wire.Hello) -> wire.Welcomed:
        broker = self._broker
        if message.protocol != wire.PROTOCOL:
            raise ProtocolMismatch(
                f"this broker speaks protocol {wire.PROTOCOL}, the engine {message.protocol}; "
                "install the same version of weight-broker on both sides",
                broker=wire.PROTOCOL,
                engine=message.protocol,
            )
        if message.platform not in (broker.platform, wire.NO_PLATFORM):
            raise ProtocolMismatch(
                f"this broker serves {broker.platform} memory, the engine asks for "
                f"{message.platform}; start both on the same platform",
                broker=broker.platform,
                engine=message.platform,
            )
        for session, peer in broker.peers.items():
            if peer.token == message.token:
                if self._session_of.get(ticket.routing, session) != session:
                    raise BadRequest("hello: this conversation belongs to another session already")
                peer.label = message.label[: wire.MAX_NAME_BYTES]
                broker.books.introduce(session, peer.who)
                broker.note_session(session)
                if self._routing_of.get(session) != ticket.routing:
                    self.untie(session)
                self._session_of[ticket.routing] = session
                self._routing_of[session] = ticket.routing
                broker.tickets.move(session, ticket.routing)
                return wire.Welcomed(session, broker.epoch, sorted(broker.devices))
        raise StaleEpoch("the session token is not of this broker: it restarted; connect again")

    def _shutdown(self, ticket: Ticket, *, force: bool) -> list[Action]:
        leases = self._broker.books.leases()
        if leases and not force:
            holders = sorted({session for _set, session, _lease in leases})
            peers = [self._broker.peers[s] for s in holders if s in self._broker.peers]
            pids = ", ".join(str(peer.identity.pid) for peer in peers)
            held = counted(len(leases), "lease is held", "leases are held")
            raise Busy(
                f"{held} by {'process' if len(peers) == 1 else 'processes'} {pids}; stop the "
                "engines first, or use shutdown --force: what is mapped stays valid, but nobody "
                "can attach any more",
                leases=len(leases),
            )
        actions = self._answer(ticket, wire.Done())
        self._broker.stop("asked to shut down")
        return actions

    def _check_own(self, ticket: Ticket) -> None:
        """Raise `BadRequest` for a process that may use the broker as a member of its group only.

        A shipped loader runs with the rights of the broker's user.
        """
        peer = self._broker.peers.get(ticket.session or 0)
        if peer is None or not peer.is_own:
            raise BadRequest(
                f"{ticket.operation} is for processes of the broker's own user, uid "
                f"{self._broker.access.uid}; yours may only use what is resident, and publish"
            )

    def _may_not_load(self) -> BadRequest:
        """A load would read files for somebody who perhaps may not."""
        return BadRequest(
            "this checkpoint is not resident, and a load would read it with the rights of the "
            f"broker's user, uid {self._broker.access.uid}: have a process of that user load it "
            "first (or serve --preload), or publish the weights"
        )

    def _check_limits(self, ticket: Ticket) -> None:
        """Raise `Busy` if too much is under way. What is decided and waits to be told is not."""
        try:
            self._broker.tickets.check_limits(ticket)
        except Busy:
            self._broker.tell_due()
            self._broker.tickets.check_limits(ticket)

    def _check_loaders_allowed(self) -> None:
        if not self._broker.config.allow_loaders:
            raise BadRequest(
                "this broker runs no loaders that engines ship: start it with --allow-loaders, or "
                "publish the weights from the engine"
            )

    def _reserve(self, ticket: Ticket, session: int, message: wire.Reserve) -> list[Action]:
        manifest = self._take(ticket, "manifest")
        try:
            check_manifest(manifest, self._broker.config.limits)
            self._check_limits(ticket)
            claims = self._broker.books.sessions[session].claims
            actions = self._broker.books.reserve(session, ticket.number, message)
        except BrokerError:
            close_received(manifest)
            raise
        if any(isinstance(action, CreateSlab) for action in actions):
            self._manifests[claims[message.claim]] = manifest
        else:
            close_received(manifest)  # the request came again
        return actions

    def _with_last_words(self, session: int, message: wire.Abandon) -> wire.Abandon:
        """What a loader printed belongs to its reason: nobody else sees it."""
        words = self._broker.loading.last_words(session)
        if not words:
            return message
        error = from_payload(message.status, message.payload.encode())
        error.fields.setdefault("last_words", words)
        return msgspec.structs.replace(message, payload=error.to_payload().decode())

    def take_manifest(self, set_id: int) -> int:
        """The manifest that came with `reserve`; the caller owns it."""
        return self._manifests.pop(set_id)

    def _report(self, ticket: Ticket, session: int, message: wire.Report) -> list[Action]:
        actions = self._answer(ticket, wire.Done())
        now = time.monotonic()
        if now - self._reported.get(session, 0.0) < REPORT_SECONDS:
            return actions
        self._reported[session] = now
        actions += self._broker.books.report(session, message)
        claims = self._broker.books.sessions[session].claims
        self._broker.times.progressed(claims[message.claim], message.stage, message.done)
        return actions

    def _peer_of(self, ticket: Ticket) -> SessionPeer:
        """Who has sent a request that a descriptor goes with."""
        peer = self._broker.peers.get(ticket.session or 0)
        if peer is None or not ticket.envelope:
            raise BadRequest(f"{ticket.operation} needs a request id as its first frame")
        return peer

    def _take(self, ticket: Ticket, what: str) -> int:
        return self._peer_of(ticket).take(ticket.envelope[0], what)

    # --- sessions -------------------------------------------------------------------------

    def session_of(self, routing: bytes) -> int | None:
        """The session whose conversation this is."""
        return self._session_of.get(routing)

    def lag(self, session: int) -> float:
        """Seconds since an answer could first not be sent to the session; 0: it reads them all."""
        routing = self._routing_of.get(session)
        return 0.0 if routing is None else self._broker.conversation.lag(routing)

    def end(self, session: int) -> None:
        """The session is over. What its conversation still says, a `release` mostly, is no fault:
        the end may overtake it."""
        routing = self._routing_of.get(session)
        if routing is not None:
            self._ended.append(routing)
        self.untie(session)

    def untie(self, session: int) -> None:
        """The session has no conversation any more. Idempotent."""
        self._reported.pop(session, None)
        routing = self._routing_of.pop(session, None)
        if routing is not None:
            self._session_of.pop(routing, None)
            self._broker.conversation.forget(routing)

    def broadcast(self, event: wire.Event) -> None:
        """Tell every engine; one that does not read misses it."""
        for session in self._routing_of:
            self.notify(session, event)

    def notify(self, session: int, event: wire.Event) -> None:
        """Tell one engine, if it has a conversation and reads."""
        routing = self._routing_of.get(session)
        if routing is not None:
            payload = wire.encode(event)
            self._broker.conversation.tell(routing, [b"", wire.EVENT.encode(), payload])
