"""What the books tell the server to do. Values: tests compare them.

`ticket` is the server's number for the request that an action answers; `set` a set's id.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from broker.custody.records import KeptLease, KeptSet
from broker.errors import BrokerError
from broker.wire import Event, Source


class Reply(msgspec.Struct, frozen=True):
    """The final answer to a request: a wire struct (`ok`) or an error."""

    ticket: int
    body: msgspec.Struct | BrokerError


class Tell(msgspec.Struct, frozen=True):
    """A progress message for a request that still waits."""

    ticket: int
    body: msgspec.Struct


class StartLoader(msgspec.Struct, frozen=True):
    """Spawn a loader process; its session has this id already and holds the claim on the set.

    `hash_first`: a resident set may hold equal bytes, so read and digest before writing anything.
    """

    set: int
    session: int
    claim: str
    ticket: int
    source: Source
    hash_first: bool


class StartShipped(msgspec.Struct, frozen=True):
    """As `StartLoader`, for code that an engine shipped; ended after `seconds`."""

    set: int
    session: int
    claim: str
    ticket: int
    device: str
    description: str
    seconds: float


class Notify(msgspec.Struct, frozen=True):
    """An event for a session's conversation; dropped if it has none or does not read."""

    session: int
    event: Event


class StopLoader(msgspec.Struct, frozen=True):
    """End a loader process whose set is not wanted any more."""

    session: int


class CreateSlab(msgspec.Struct, frozen=True):
    set: int
    device: str
    nbytes: int


class FreezeSlab(msgspec.Struct, frozen=True):
    set: int
    device: str


class FreeSlab(msgspec.Struct, frozen=True):
    """Close the slab's and the manifest's descriptors, after any call under way for this set."""

    set: int


class KeepSet(msgspec.Struct, frozen=True):
    """What a successor needs to know of a resident set. Before any reply that depends on it."""

    record: KeptSet


class KeepLease(msgspec.Struct, frozen=True):
    """A lease for a successor to know. Before its grant."""

    record: KeptLease


class DropLease(msgspec.Struct, frozen=True):
    session: int
    lease: str


class Log(msgspec.Struct, frozen=True):
    """A life-cycle event for the log; the same ids as in `status`.

    `trouble`: somebody should perhaps look at it.
    """

    event: str
    detail: dict[str, Any] = {}
    trouble: bool = False


Action: TypeAlias = (
    Reply
    | Tell
    | Notify
    | StartLoader
    | StartShipped
    | StopLoader
    | CreateSlab
    | FreezeSlab
    | FreeSlab
    | KeepSet
    | KeepLease
    | DropLease
    | Log
)
