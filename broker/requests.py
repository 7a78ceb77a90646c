"""Requests under way: whose they are, where their answers go, what they carry."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from broker import wire
from broker.conversation import Conversation
from broker.errors import BrokerError, Busy
from broker.limits import Limits
from broker.metrics.measures import Measures
from broker.packets import close_received

WAITING = frozenset({"acquire", "claim", "load"})
"""Operations that may wait for somebody else, for as long as that takes."""
DONE_ANEW = frozenset({"ping", "status", "hello", "report"})
"""Operations that may as well be done again if they come again."""
REMEMBERED = 256
"""Answers remembered for each session: more than its threads can be waiting for."""
REMEMBERED_BYTES = 256 * 1024
"""The same in bytes; an answer has a few hundred, the odd error some thousand."""

_WAIT = "requests wait for weights"
_SESSION_WAIT = f"of this session {_WAIT}"
_PAYLOAD = "bytes of payload are under way"
_SESSION_PAYLOAD = f"of this session {_PAYLOAD}"
_OK = wire.OK.encode()

RequestKey: TypeAlias = tuple[int, bytes, int]
"""Session, request id, and a hash of what it says: one id for two requests is no repetition."""


class Encoded(msgspec.Struct):
    """The body of an answer to several, encoded once."""

    payload: bytes


class Ticket(msgspec.Struct, eq=False):
    """One request that has no final answer yet.

    `source` is the descriptor of a checkpoint's folder, or of code, closed with the answer.
    `on_reply` takes the answer instead of a peer, for what the broker asks itself.
    """

    number: int
    routing: bytes
    envelope: tuple[bytes, ...]
    operation: str
    session: int | None
    nbytes: int = 0
    """Of its payload."""
    key: RequestKey | None = None
    source: int | None = None
    on_reply: Callable[[msgspec.Struct | BrokerError], None] | None = None
    opened: float = msgspec.field(default_factory=time.monotonic)


class Tickets:
    """All requests under way, each answered exactly once or dropped with its session.

    When a conversation breaks, an engine cannot know which of its requests, or of their answers,
    have arrived, and sends them again: such a request is done once, and answered as often as asked.
    """

    def __init__(self, conversation: Conversation, limits: Limits, measures: Measures) -> None:
        self._conversation = conversation
        self._limits = limits
        self._open: dict[int, Ticket] = {}
        self._by_key: dict[RequestKey, Ticket] = {}
        self._answers: dict[int, _Answers] = {}
        self._use: dict[int, _Use] = {}
        self._total = _Use()
        self._numbers = itertools.count(1)
        self._measures = measures

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        operation: str,
        session: int | None,
        *,
        routing: bytes = b"",
        envelope: tuple[bytes, ...] = (),
        nbytes: int = 0,
        key: RequestKey | None = None,
        on_reply: Callable[[msgspec.Struct | BrokerError], None] | None = None,
    ) -> Ticket:
        """A ticket for a request that is about to be decided."""
        number = next(self._numbers)
        ticket = Ticket(
            number, routing, envelope, operation, session, nbytes, key, on_reply=on_reply
        )
        self._open[number] = ticket
        if key is not None:
            self._by_key[key] = ticket
        if session is not None:
            own = self._use_of(session)
            own.asked += 1
            own.requests += 1
            own.nbytes += nbytes
            self._total.nbytes += nbytes
            if operation in WAITING:
                own.waiting += 1
                self._total.waiting += 1
        return ticket

    def _use_of(self, session: int) -> _Use:
        use = self._use.get(session)
        if use is None:
            use = self._use[session] = _Use()
        return use

    def check_limits(self, ticket: Ticket) -> None:
        """Raise `Busy` if its session, or all of them, have too much under way, this included."""
        if ticket.session is None:
            return
        own, total, limits = self._use[ticket.session], self._total, self._limits
        for used, allowed, limit, what in (
            (own.requests, limits.requests, "requests", "requests of this session are under way"),
            (own.nbytes, limits.request_bytes, "request_bytes", _SESSION_PAYLOAD),
            (total.nbytes, limits.all_request_bytes, "all_request_bytes", _PAYLOAD),
            (own.waiting, limits.waiting, "waiting", _SESSION_WAIT),
            (total.waiting, limits.all_waiting, "all_waiting", _WAIT),
        ):
            if used > allowed:
                raise Busy(
                    f"{ticket.operation}: {allowed} {what} already; let some of them end first "
                    f"{limits.reached(limit)}",
                    limit=limit,
                    value=allowed,
                )

    def is_repeated(self, key: RequestKey, routing: bytes, envelope: tuple[bytes, ...]) -> bool:
        """Whether this very request has come before; it is, or will be, answered at `routing`."""
        ticket = self._by_key.get(key)
        if ticket is not None:
            ticket.routing = routing
            return True
        answers = self._answers.get(key[0])
        frames = None if answers is None else answers.by_key.get(key)
        if frames is None:
            return False
        self._conversation.reply(routing, [*envelope, *frames])
        return True

    def move(self, session: int, routing: bytes) -> None:
        """The session has another conversation from now on: its answers go there."""
        for ticket in self._open.values():
            if ticket.session == session:
                ticket.routing = routing

    def count(self, session: int) -> None:
        """The session has made a request."""
        self._use_of(session).asked += 1

    def asked(self, session: int) -> int:
        """How many requests the session has made."""
        use = self._use.get(session)
        return 0 if use is None else use.asked

    def waits(self) -> dict[int, float]:
        """Seconds that the oldest request of each session has waited for weights, of those with
        one."""
        now = time.monotonic()
        waits: dict[int, float] = {}
        for ticket in self._open.values():  # oldest first
            if ticket.operation in WAITING and ticket.session is not None:
                waits.setdefault(ticket.session, now - ticket.opened)
        return waits

    def waiting(self) -> dict[str, tuple[int, float]]:
        """By operation that may wait for weights: how many requests do, and the longest wait in
        seconds."""
        now = time.monotonic()
        waiting = dict.fromkeys(sorted(WAITING), (0, 0.0))
        for ticket in self._open.values():  # oldest first
            if ticket.operation in WAITING:
                count, longest = waiting[ticket.operation]
                waiting[ticket.operation] = (count + 1, max(longest, now - ticket.opened))
        return waiting

    def get(self, number: int) -> Ticket | None:
        return self._open.get(number)

    def reply(self, number: int, body: msgspec.Struct | BrokerError) -> None:
        """The final answer. A ticket that was dropped with its session is no error."""
        ticket = self._close(number)
        if ticket is None:
            return
        status = body.status if isinstance(body, BrokerError) else None
        self._measures.answered(ticket.operation, status, ticket.opened)
        if ticket.on_reply is not None:
            ticket.on_reply(body)
            return
        frames = answer(body)
        self._remember(ticket, frames)
        self._conversation.reply(ticket.routing, [*ticket.envelope, *frames])

    def _remember(self, ticket: Ticket, frames: list[bytes]) -> None:
        if ticket.key is None:
            return
        answers = self._answers.get(ticket.key[0])
        if answers is None:
            answers = self._answers[ticket.key[0]] = _Answers()
        answers.add(ticket.key, frames)

    def tell(self, number: int, body: msgspec.Struct) -> None:
        """A progress message ahead of the answer; dropped if the peer does not read."""
        ticket = self._open.get(number)
        if ticket is not None and ticket.on_reply is None:
            progress = [wire.PROGRESS.encode(), wire.encode(body)]
            self._conversation.tell(ticket.routing, [*ticket.envelope, *progress])

    def drop_session(self, session: int) -> None:
        """Its process is gone: nobody is left to answer."""
        for ticket in [ticket for ticket in self._open.values() if ticket.session == session]:
            self._close(ticket.number)
        self._answers.pop(session, None)
        self._use.pop(session, None)

    def reply_all(self, error: BrokerError) -> None:
        for number in list(self._open):
            self.reply(number, error)

    def _close(self, number: int) -> Ticket | None:
        ticket = self._open.pop(number, None)
        if ticket is None:
            return None
        if ticket.key is not None and self._by_key.get(ticket.key) is ticket:
            del self._by_key[ticket.key]
        if ticket.source is not None:
            close_received(ticket.source)
        if ticket.session is not None:
            own = self._use[ticket.session]
            own.requests -= 1
            own.nbytes -= ticket.nbytes
            self._total.nbytes -= ticket.nbytes
            if ticket.operation in WAITING:
                own.waiting -= 1
                self._total.waiting -= 1
        return ticket


class _Answers(msgspec.Struct):
    """The latest final answers of a session, oldest first."""

    by_key: dict[RequestKey, list[bytes]] = {}
    nbytes: int = 0

    def add(self, key: RequestKey, frames: list[bytes]) -> None:
        self.by_key[key] = frames
        self.nbytes += sum(map(len, frames))
        while len(self.by_key) > REMEMBERED or self.nbytes > REMEMBERED_BYTES:
            self.nbytes -= sum(map(len, self.by_key.pop(next(iter(self.by_key)))))


class _Use(msgspec.Struct):
    """What is under way, of one session or of all; and how much one has asked since it came."""

    requests: int = 0
    nbytes: int = 0
    waiting: int = 0
    asked: int = 0


def request_key(session: int | None, request: wire.Frames) -> RequestKey | None:
    """By what a repetition of the request is known; None if it may as well be done again."""
    if session is None or not request.envelope or request.operation in DONE_ANEW:
        return None
    return session, request.envelope[0], hash((request.operation, request.payload))


def answer(body: msgspec.Struct | BrokerError) -> list[bytes]:
    """`[status, payload]`, whole, before anything is sent."""
    if isinstance(body, BrokerError):
        return [body.status.encode(), body.to_payload()]
    return [_OK, body.payload if isinstance(body, Encoded) else wire.encode(body)]
