"""Everything that a page of metrics says, copied on the loop as plain data.

A thread makes the page of it, and never sees the books. Of sets and sessions, which peers can make
by the thousand, the most telling are named; the rest is added up, so that a page has a bound.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker import VERSION
from broker.commands.text import shown
from broker.custody.audit import purpose, usage
from broker.custody.records import WeightSet
from broker.custody.states import IN_PROGRESS, State
from broker.metrics.measures import Histogram

if TYPE_CHECKING:
    from broker.server import Server

NAMED_SETS = 100
NAMED_SESSIONS = 100
NAME_CHARACTERS = 80
"""Of a name or label, which peers choose."""
OTHERS = "other"
"""What stands for all that is not named."""


@dataclass(frozen=True)
class SetNumbers:
    """One weight set; or, with `OTHERS` for its number, all that are not named.

    `writing`, `quiet` and `draining` are seconds: since it was begun, since its writer was last
    heard of, since it is not wanted any more; None if that is not so, or not known.
    """

    device: str
    number: str
    name: str
    use: str
    nbytes: int
    leases: int
    waiting: int
    writing: float | None = None
    quiet: float | None = None
    draining: float | None = None


@dataclass(frozen=True)
class SessionNumbers:
    """One process with a session; `nbytes` of all sets it leases."""

    number: str
    pid: str
    label: str
    nbytes: int
    leases: int


@dataclass(frozen=True)
class Snapshot:
    """The broker at one moment. Times are seconds; `started` and `server_started` since 1970."""

    version: str
    name: str
    platform: str
    started: float
    server_started: float
    slowest_turn: float
    devices: dict[str, dict[str, int]]
    states: Counter[tuple[str, str]]
    sets: list[SetNumbers]
    engines: int
    loaders: int
    sessions: list[SessionNumbers]
    leases: int
    waiting: dict[str, tuple[int, float]]
    """By operation: how many requests wait for weights, and the longest wait."""
    loads_queued: int
    connections: int
    counters: dict[str, int]
    requests: dict[str, Histogram]
    request_errors: Counter[tuple[str, str]]
    load_seconds: Histogram
    loaded_bytes: int
    load_failures: Counter[str]
    publication_failures: Counter[str]


def take_snapshot(broker: Server) -> Snapshot:
    """The numbers of this moment. From the loop's thread."""
    books, measures = broker.books, broker.measures
    loaders = sum(record.is_loader for record in books.sessions.values())
    return Snapshot(
        version=VERSION,
        name=broker.config.name,
        platform=broker.platform,
        started=broker.first_started,
        server_started=broker.started,
        slowest_turn=broker.loop.slowest_turn,
        devices={uuid: usage(books, uuid) for uuid in broker.devices},
        states=Counter((record.key.device, record.state.value) for record in books.sets.values()),
        sets=_sets(broker),
        engines=len(books.sessions) - loaders,
        loaders=loaders,
        sessions=_sessions(broker),
        leases=sum(len(record.leases) for record in books.sets.values()),
        waiting=broker.tickets.waiting(),
        loads_queued=broker.loading.queued,
        connections=len(broker.conversation.connections),
        counters={**books.counters, **broker.conversation.counters},
        requests={name: histogram.copy() for name, histogram in measures.requests.items()},
        request_errors=Counter(measures.request_errors),
        load_seconds=measures.load_seconds.copy(),
        loaded_bytes=measures.loaded_bytes,
        load_failures=Counter(measures.load_failures),
        publication_failures=Counter(measures.publication_failures),
    )


# --- sets ---------------------------------------------------------------------------------------


def _sets(broker: Server) -> list[SetNumbers]:
    records = broker.books.sets
    named = heapq.nlargest(NAMED_SETS, records.values(), key=_urgency)
    unnamed = records.keys() - {record.id for record in named}
    return [
        *(_set(broker, record) for record in named),
        *_added_up(records[number] for number in unnamed),
    ]


def _urgency(record: WeightSet) -> tuple[bool, bool, int]:
    """In progress and not wanted any more before others: there somebody may be stuck."""
    return record.state in IN_PROGRESS, record.state is State.DRAINING, record.nbytes


def _set(broker: Server, record: WeightSet) -> SetNumbers:
    times, now = broker.times.of(record.id), broker.times.wall()
    is_written, is_unwanted = record.state in IN_PROGRESS, record.state is State.DRAINING
    # What an earlier server saw begin is at least as old as this one.
    since = broker.started if times.unwanted is None else times.unwanted
    return SetNumbers(
        device=record.key.device,
        number=str(record.id),
        name=_label(next(iter(record.names), record.key.name)),
        use=purpose(record),
        nbytes=record.nbytes,
        leases=len(record.leases),
        waiting=len(record.waiters),
        writing=now - times.begun if is_written and times.begun is not None else None,
        quiet=times.pace.quiet(broker.times.monotonic()) if is_written and times.pace else None,
        draining=now - since if is_unwanted else None,
    )


def _added_up(records: Iterable[WeightSet]) -> list[SetNumbers]:
    nbytes: Counter[tuple[str, str]] = Counter()
    leases: Counter[tuple[str, str]] = Counter()
    waiting: Counter[tuple[str, str]] = Counter()
    for record in records:
        place = (record.key.device, purpose(record))
        nbytes[place] += record.nbytes
        leases[place] += len(record.leases)
        waiting[place] += len(record.waiters)
    return [
        SetNumbers(device, OTHERS, "", use, held, leases[device, use], waiting[device, use])
        for (device, use), held in nbytes.items()
    ]


# --- sessions -----------------------------------------------------------------------------------


def _sessions(broker: Server) -> list[SessionNumbers]:
    """Of those that lease weights: the ones with the most."""
    sets = broker.books.sets
    held = {
        session: sum(sets[number].nbytes for number in set(record.leases.values()))
        for session, record in broker.books.sessions.items()
        if record.leases and session in broker.peers
    }
    named = heapq.nlargest(NAMED_SESSIONS, held, key=lambda session: held[session])
    numbers = [_session(broker, session, held[session]) for session in named]
    if len(held) > len(named):
        left = sum(len(broker.books.sessions[each].leases) for each in held.keys() - set(named))
        numbers.append(SessionNumbers(OTHERS, "", "", sum(held.values()) - _sum(numbers), left))
    return numbers


def _session(broker: Server, session: int, nbytes: int) -> SessionNumbers:
    peer = broker.peers[session]
    return SessionNumbers(
        number=str(session),
        pid=str(peer.identity.pid),
        label=_label(peer.label or peer.identity.command),
        nbytes=nbytes,
        leases=len(broker.books.sessions[session].leases),
    )


def _sum(numbers: list[SessionNumbers]) -> int:
    return sum(each.nbytes for each in numbers)


def _label(text: str) -> str:
    """What a peer calls something: printable, and not too long."""
    return shown(text)[:NAME_CHARACTERS] if text else ""
