"""Requests under way: whose they are, where their answers go, what they carry."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from broker import wire
from broker.conversation import Conversation
from broker.errors import BrokerError, Busy

WAITING = frozenset({"acquire", "claim", "load"})
"""Operations that may wait for somebody else, for as long as that takes."""


@dataclass
class Ticket:
    """One request that has no final answer yet.

    `source` is the descriptor of a checkpoint's folder, closed with the answer. `on_reply` takes
    the answer instead of a peer, for what the broker asks itself.
    """

    number: int
    routing: bytes
    envelope: tuple[bytes, ...]
    operation: str
    session: int | None
    source: int | None = None
    on_reply: Callable[[msgspec.Struct | BrokerError], None] | None = None


class Tickets:
    """All requests under way, each answered exactly once or dropped with its session."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._open: dict[int, Ticket] = {}
        self._waiting: Counter[int] = Counter()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        operation: str,
        session: int | None,
        *,
        routing: bytes = b"",
        envelope: tuple[bytes, ...] = (),
        on_reply: Callable[[msgspec.Struct | BrokerError], None] | None = None,
    ) -> Ticket:
        """A ticket for a request that is about to be decided."""
        if session is not None and operation in WAITING:
            self._waiting[session] += 1
        ticket = Ticket(
            next(self._numbers), routing, envelope, operation, session, on_reply=on_reply
        )
        self._open[ticket.number] = ticket
        return ticket

    def check_may_wait(self, ticket: Ticket) -> None:
        """Raise `Busy` if too many requests of its session wait already."""
        if ticket.session is not None and self._waiting[ticket.session] > wire.MAX_WAITING:
            raise Busy(
                f"{ticket.operation}: {wire.MAX_WAITING} requests of this session wait for weights "
                "already; let one of them end first",
                limit=wire.MAX_WAITING,
            )

    def get(self, number: int) -> Ticket | None:
        return self._open.get(number)

    def reply(self, number: int, body: msgspec.Struct | BrokerError) -> None:
        """The final answer. A ticket that was dropped with its session is no error."""
        ticket = self._close(number)
        if ticket is None:
            return
        if ticket.on_reply is not None:
            ticket.on_reply(body)
            return
        self._conversation.reply(ticket.routing, [*ticket.envelope, *answer(body)])

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

    def reply_all(self, error: BrokerError) -> None:
        for number in list(self._open):
            self.reply(number, error)

    def _close(self, number: int) -> Ticket | None:
        ticket = self._open.pop(number, None)
        if ticket is None:
            return None
        if ticket.source is not None:
            os.close(ticket.source)
        if ticket.session is not None and ticket.operation in WAITING:
            self._waiting[ticket.session] -= 1
            if not self._waiting[ticket.session]:
                del self._waiting[ticket.session]
        return ticket


def answer(body: msgspec.Struct | BrokerError) -> list[bytes]:
    """`[status, payload]`, whole, before anything is sent."""
    if isinstance(body, BrokerError):
        return [body.status.encode(), body.to_payload()]
    return [wire.OK.encode(), wire.encode(body)]
