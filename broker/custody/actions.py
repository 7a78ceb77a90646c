"""What the books tell the server to do. Values: tests compare them.

`ticket` is the server's number for the request that an action answers; `set` a set's id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from broker.custody.records import KeptLease, KeptSet
from broker.errors import BrokerError
from broker.wire import Event, Source


@dataclass(frozen=True)
class Reply:
    """The final answer to a request: a wire struct (`ok`) or an error."""

    ticket: int
    body: msgspec.Struct | BrokerError


@dataclass(frozen=True)
class Tell:
    """A progress message for a request that still waits."""

    ticket: int
    body: msgspec.Struct


@dataclass(frozen=True)
class StartLoader:
    """Spawn a loader process; its session has this id already and holds the claim on the set.

    `hash_first`: a resident set may hold equal bytes, so read and digest before writing anything.
    """

    set: int
    session: int
    claim: str
    ticket: int
    source: Source
    hash_first: bool


@dataclass(frozen=True)
class StartShipped:
    """As `StartLoader`, for code that an engine shipped; ended after `seconds`."""

    set: int
    session: int
    claim: str
    ticket: int
    device: str
    description: str
    seconds: float


@dataclass(frozen=True)
class Notify:
    """An event for a session's conversation; dropped if it has none or does not read."""

    session: int
    event: Event


@dataclass(frozen=True)
class StopLoader:
    """End a loader process whose set is not wanted any more."""

    session: int


@dataclass(frozen=True)
class CreateSlab:
    set: int
    device: str
    nbytes: int


@dataclass(frozen=True)
class FreezeSlab:
    set: int
    device: str


@dataclass(frozen=True)
class FreeSlab:
    """Close the slab's and the manifest's descriptors, after any call under way for this set."""

    set: int


@dataclass(frozen=True)
class KeepSet:
    """What a successor needs to know of a resident set. Before any reply that depends on it."""

    record: KeptSet


@dataclass(frozen=True)
class KeepLease:
    """A lease for a successor to know. Before its grant."""

    record: KeptLease


@dataclass(frozen=True)
class DropLease:
    session: int
    lease: str


@dataclass(frozen=True)
class Log:
    """A life-cycle event for the log; the same ids as in `status`.

    `trouble`: somebody should perhaps look at it.
    """

    event: str
    detail: dict[str, Any] = field(default_factory=dict)
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
