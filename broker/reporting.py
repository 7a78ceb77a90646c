"""What `status` says (docs/status.schema.json), within the bound of one reply.

The broker's books may hold more than a reply can: what does not fit is left off and counted in
`broker.left_off`. Sets in progress and leased, sessions that wait or hold, come before others.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from broker import VERSION, wire
from broker.custody.audit import newest_of_lines, set_entry, usage
from broker.custody.records import SessionRecord, WeightSet
from broker.custody.states import IN_PROGRESS

if TYPE_CHECKING:
    from broker.server import Server

REPLY_BYTES = wire.MAX_FRAME_BYTES - 16 * 1024
"""Of a whole status, with room for what the parts below do not count."""
PRELOAD_BYTES = 8 * 1024
SET_BYTES = 88 * 1024
"""What the sets may take of it; the sessions get what is left."""
MISFITS = 16
"""Entries that were larger than what was left: smaller ones may follow, but not for ever."""
SHOWN_LEASES = 256
SHOWN_NAMES = 32
"""Of one set."""
PATH_CHARACTERS = 512


def status_report(broker: Server) -> wire.StatusReport:
    """Everything on the books at this moment, and the counters of docs/reliability.md."""
    facts, devices = _facts(broker), _devices(broker)
    counters = dict(sorted({**broker.books.counters, **broker.conversation.counters}.items()))
    budget = Room(REPLY_BYTES)
    for part in (facts, devices, counters):
        budget.take(part)
    preloads = budget.fill(_preloads(broker), PRELOAD_BYTES)
    sets = budget.fill(_sets(broker), SET_BYTES)
    sessions = budget.fill(_sessions(broker), REPLY_BYTES)
    left_off = {
        "preloads": len(broker.preloads) - len(preloads),
        "sets": len(broker.books.sets) - len(sets),
        "sessions": len(broker.peers) - len(sessions),
    }
    return wire.StatusReport(
        broker={**facts, "preloads": preloads, "left_off": left_off},
        devices=devices,
        sets=sorted(sets, key=lambda entry: entry["id"]),
        sessions=sorted(sessions, key=lambda entry: entry["id"]),
        counters=counters,
    )


class Room:
    """Bytes of a reply that are still free."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes

    def take(self, part: object) -> None:
        """Of what is there in any case."""
        self._free -= len(msgspec.msgpack.encode(part))

    def fill(self, entries: Iterable[dict[str, Any]], most: int) -> list[dict[str, Any]]:
        """The entries that fit, at most so many bytes of them; not much longer than that takes."""
        shown: list[dict[str, Any]] = []
        room, misfits = min(most, self._free), 0
        for entry in entries:
            nbytes = len(msgspec.msgpack.encode(entry))
            if nbytes <= room:
                room -= nbytes
                self._free -= nbytes
                shown.append(entry)
            elif (misfits := misfits + 1) > MISFITS:
                break
        return shown


def _facts(broker: Server) -> dict[str, Any]:
    return {
        "name": broker.config.name,
        "version": VERSION,
        "pid": os.getpid(),
        "keeper_pid": os.getppid(),
        "restarts": broker.restarts,
        "epoch": broker.epoch,
        "protocol": wire.PROTOCOL,
        "platform": broker.platform,
        "simulated": broker.platform == "simulated",
        "now": time.time(),
        "started": broker.first_started,
        "server_started": broker.started,
        "slowest_turn_ms": round(broker.loop.slowest_turn * 1000, 3),
        "requests_waiting": len(broker.tickets) - 1,
        "connections": len(broker.conversation.connections),
        "loads_queued": broker.loading.queued,
        "troubles": broker.troubles.latest(),
    }


def _devices(broker: Server) -> dict[str, Any]:
    return {
        uuid: {
            **usage(broker.books, uuid),
            "name": device.properties.name,
            "total": device.properties.total_bytes,
        }
        for uuid, device in broker.devices.items()
    }


def _preloads(broker: Server) -> list[dict[str, Any]]:
    return [
        {**dataclasses.asdict(preload), "path": _cut(preload.path), "cause": _cut(preload.cause)}
        for preload in broker.preloads
    ]


# --- sets ---------------------------------------------------------------------------------------


def _sets(broker: Server) -> Iterable[dict[str, Any]]:
    newest = newest_of_lines(broker.books)
    for record in sorted(broker.books.sets.values(), key=_urgency):
        yield _set(broker, record, newest)


def _urgency(record: WeightSet) -> tuple[bool, int, int]:
    return record.state not in IN_PROGRESS, -len(record.leases), -record.id


def _set(broker: Server, record: WeightSet, newest: set[tuple[int, str]]) -> dict[str, Any]:
    entry, times = set_entry(record, newest), broker.times.of(record.id)
    leases, names = entry["leases"], entry["names"]
    for lease in leases[:SHOWN_LEASES]:
        lease["since"] = broker.times.leases.get((lease["session"], lease["lease"]))
    return {
        **entry,
        "path": _cut(entry["path"]),
        "names": dict(list(names.items())[:SHOWN_NAMES]),
        "names_left_off": max(0, len(names) - SHOWN_NAMES),
        "leases": leases[:SHOWN_LEASES],
        "leases_left_off": max(0, len(leases) - SHOWN_LEASES),
        "begun": times.begun,
        "sealed": times.sealed,
        "used": times.used,
        "progress": _progress(broker, record, entry["progress"]),
    }


def _progress(
    broker: Server, record: WeightSet, reported: dict[str, Any] | None
) -> dict[str, Any] | None:
    """How far the writer of a set in progress is, how fast, and when it was last heard of."""
    pace = broker.times.of(record.id).pace
    if record.state not in IN_PROGRESS or pace is None:
        return None
    progress = reported or {"stage": "", "done": 0, "total": 0}
    now = time.monotonic()
    rate, left = pace.rate(now), progress["total"] - progress["done"]
    return {
        **progress,
        "rate": rate,
        "seconds_left": None if not rate or left < 0 else left / rate,
        "quiet_seconds": pace.quiet(now),
    }


# --- sessions -----------------------------------------------------------------------------------


def _sessions(broker: Server) -> Iterable[dict[str, Any]]:
    waits, records = broker.tickets.waits(), broker.books.sessions
    for record in sorted((records[session] for session in broker.peers), key=_idleness):
        yield _session(broker, record.id, waits.get(record.id))


def _idleness(record: SessionRecord) -> tuple[bool, bool, int]:
    return not record.waiting, not record.leases, -record.id


def _session(broker: Server, session: int, wait: float | None) -> dict[str, Any]:
    peer, record = broker.peers[session], broker.books.sessions[session]
    return {
        "id": session,
        "pid": peer.identity.pid,
        "uid": peer.identity.uid,
        "command": peer.identity.command,
        "label": peer.label,
        "loader": record.is_loader,
        "since": peer.since or None,
        "leases": len(record.leases),
        "waiting": len(record.waiting),
        "waiting_seconds": wait,
        "requests": broker.tickets.asked(session),
        "lag_seconds": broker.dispatcher.lag(session),
    }


def _cut(text: str | None) -> str | None:
    """A path or a sentence, the end of a very long one left off."""
    is_long = text is not None and len(text) > PATH_CHARACTERS
    return f"{text[:PATH_CHARACTERS]}…" if is_long and text is not None else text
