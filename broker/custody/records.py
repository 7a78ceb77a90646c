"""What is on the books. Plain data; only books.py changes it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from broker.custody.states import State
from broker.errors import BrokerError
from broker.weights import WeightKey
from broker.wire import Conversion, Demand, Progress, Source, SourceIdentity

Line: TypeAlias = tuple[object, ...]
"""A key without `checkpoint`, hashable: sets sealed in one line are its generations."""

MAX_IDENTITIES = 64
"""Identities remembered per set; a mount that chowns makes a new one every time."""


class Budget(msgspec.Struct):
    """The bytes the broker may hold on one device, all of them accounted for."""

    limit: int
    granularity: int = 1
    free: int = 0

    def __post_init__(self) -> None:
        self.free = self.limit


class Waiter(msgspec.Struct):
    """A request that waits for a set in progress."""

    ticket: int
    session: int
    lease: str
    demand: Demand
    source: Source | None = None
    key: WeightKey | None = None
    """What a `claim` would write."""
    willing: bool = False
    """Takes the claim over if the writer is lost."""
    follows: bool = False
    """Perhaps means another set: asks again when this one is sealed or has failed."""


class WeightSet(msgspec.Struct):
    """One weight set from its claim to its last byte."""

    id: int
    key: WeightKey
    asked: WeightKey = WeightKey("")
    """The key as it was claimed, set at the beginning; `key` learns dtype and checkpoint as they
    become known."""
    label: str | None = None
    """What its publisher wants it to be called in its line."""
    state: State = State.ABSENT
    writer: int | None = None
    claim: str = ""
    loaded_by_broker: bool = False
    source: Source | None = None
    nbytes: int = 0
    tensors: int = 0
    keep: bool = False
    """The writer's claim becomes its lease at the seal."""
    pending: int | None = None
    """The writer's request that the device is working for."""
    pinned: bool = False
    superseded: bool = False
    """A newer generation is there: freed with the last lease, also if an engine that demanded this
    one has had it sealed again."""
    used: int = 0
    """Logical time of the last grant or release: least recently used goes first."""
    progress: Progress | None = None
    initiator: int | None = None
    """The ticket that caused the load."""
    waiters: dict[int, Waiter] = {}
    leases: set[tuple[int, str]] = set()
    identities: list[SourceIdentity] = []
    generations: dict[Line, str] = {}
    """The label this set has in each line it belongs to."""
    places: dict[Line, int] = {}
    """When it became the newest of each line, in logical time."""

    def __post_init__(self) -> None:
        self.asked = self.key

    @property
    def conversion(self) -> Conversion | None:
        """What a loader does to the stored dtypes; None for an engine's own weights."""
        return None if self.source is None else self.source.conversion

    @property
    def names(self) -> list[str]:
        return sorted({str(line[0]) for line in self.generations})


class KeptSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A resident set as a successor of this server needs it. `lines`: name → label and place."""

    id: int
    key: WeightKey
    is_draining: bool
    nbytes: int
    tensors: int
    pinned: bool
    superseded: bool
    loaded_by_broker: bool
    source: Source | None
    identities: list[SourceIdentity]
    lines: dict[str, tuple[str, int]]
    sealed: float = 0.0
    """When, in seconds since 1970: the server adds it, the books have no clock. 0: not known."""


class KeptLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease as a successor needs it."""

    session: int
    lease: str
    set: int


class SessionRecord(msgspec.Struct):
    """A live process with a session."""

    id: int
    is_loader: bool = False
    taken_over: bool = False
    """An earlier server opened it; claims of that time are over."""
    who: str = ""
    """The process, for messages."""
    watches: set[str] = set()
    """Names whose events it wants; "" for all."""
    leases: dict[str, int] = {}
    claims: dict[str, int] = {}
    restored: set[str] = set()
    """Leases an earlier server granted: the engine may not have seen it, and ask again."""
    lost: dict[str, BrokerError] = {}
    """Claim → why it is over, for a writer that goes on."""
    waiting: dict[str, int] = {}
    """Lease id → the ticket of the request that waits for it."""


class Failure(msgspec.Struct):
    """Why a set in progress ends, and whether a waiting request may take it over."""

    error: BrokerError
    inheritable: bool = True


def content_of(key: WeightKey) -> tuple[object, ...]:
    """Equal for two sets of equal bytes; the name is not part of it when the content is known."""
    name = "" if key.checkpoint else key.name
    return (name, key.checkpoint, *_variant(key))


def line_of(key: WeightKey, name: str) -> Line:
    return (name, *_variant(key))


def is_variant(wanted: WeightKey, key: WeightKey) -> bool:
    """Do two keys differ in name and checkpoint at most? A dtype may be left open."""
    return _variant(wanted) == _variant(key if wanted.dtype else replace(key, dtype=""))


def _variant(key: WeightKey) -> tuple[object, ...]:
    layout = tuple(sorted(key.layout.items()))
    return (key.device, key.dtype, layout, key.format, key.quantization)


def kept_set(record: WeightSet) -> KeptSet:
    """What a successor needs to know of a resident set."""
    return KeptSet(
        id=record.id,
        key=record.key,
        is_draining=record.state is State.DRAINING,
        nbytes=record.nbytes,
        tensors=record.tensors,
        pinned=record.pinned,
        superseded=record.superseded,
        loaded_by_broker=record.loaded_by_broker,
        source=record.source,
        identities=list(record.identities),
        lines={
            str(line[0]): (label, record.places.get(line, 0))
            for line, label in record.generations.items()
        },
    )
