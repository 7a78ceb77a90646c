"""The accounting invariant, and the books as `status` shows them."""

from __future__ import annotations

from typing import Any

from broker.custody.books import Books
from broker.custody.records import WeightSet
from broker.custody.states import IN_PROGRESS, RESIDENT, WITH_MEMORY, State


def check_invariant(books: Books) -> None:
    """Raise `AssertionError` with the numbers unless the books are consistent.

    Every byte is free, reserved, leased or idle, and they add up to the budget; every lease, claim
    and waiting request belongs to a live session and is known on both sides.
    """
    for check in (_bytes, _sets, _sessions, _files, _lines):
        for problem in check(books):
            raise AssertionError(problem)


def usage(books: Books, device: str) -> dict[str, int]:
    """Bytes of a device by what they are for: reserved, leased, idle, free; and the limit."""
    result = {"reserved": 0, "leased": 0, "idle": 0}
    for record in books.sets.values():
        if record.key.device == device and record.state in WITH_MEMORY:
            result[purpose(record)] += record.nbytes
    budget = books.budgets[device]
    return {**result, "free": budget.free, "limit": budget.limit}


def purpose(record: WeightSet) -> str:
    """What the bytes of a set are for: reserved, leased or idle."""
    if record.state not in RESIDENT:
        return "reserved"
    return "leased" if record.leases else "idle"


def _bytes(books: Books) -> list[str]:
    problems = []
    for device in books.budgets:
        numbers = usage(books, device)
        limit = numbers.pop("limit")
        if sum(numbers.values()) != limit or numbers["free"] < 0:
            problems.append(f"device {device}: {numbers} do not add up to the limit of {limit}")
    return problems


def _sets(books: Books) -> list[str]:
    problems = []
    for record in books.sets.values():
        where = f"set {record.id} ({record.state.value})"
        if record.state is State.ABSENT:
            problems.append(f"{where} is on the books though it is absent")
        if record.waiters and record.state not in IN_PROGRESS:
            problems.append(f"{where} has waiters {sorted(record.waiters)}")
        if record.leases and record.state not in RESIDENT:
            problems.append(f"{where} has leases {sorted(record.leases)}")
        if record.state is State.DRAINING and not record.leases:
            problems.append(f"{where} has no lease left and was not freed")
        if (record.nbytes > 0) != (record.state in WITH_MEMORY):
            problems.append(f"{where} holds {record.nbytes} bytes")
        is_wanted = record.leases or record.pinned or not record.superseded
        if record.state is State.SEALED and not is_wanted:
            problems.append(f"{where} is superseded, nobody leases it, and it was not freed")
        needs_writer = record.state in IN_PROGRESS and record.state is not State.SEALING
        if (needs_writer and record.writer is None) or (record.writer and record.state in RESIDENT):
            problems.append(f"{where} has the writer {record.writer}")
    return problems


def _sessions(books: Books) -> list[str]:
    leases = {(s.id, lease, n) for s in books.sessions.values() for lease, n in s.leases.items()}
    held = {(*lease, record.id) for record in books.sets.values() for lease in record.leases}
    claims = {(s.id, claim, n) for s in books.sessions.values() for claim, n in s.claims.items()}
    writers = {
        (record.writer, record.claim, record.id)
        for record in books.sets.values()
        if record.writer is not None
    }
    waiting = {(s.id, *wait) for s in books.sessions.values() for wait in s.waiting.items()}
    waited = {
        (waiter.session, waiter.lease, waiter.ticket)
        for record in books.sets.values()
        for waiter in record.waiters.values()
    }
    return [
        f"sessions and sets disagree on {what}: {left ^ right}"
        for what, left, right in (
            ("leases", leases, held),
            ("claims", claims, writers),
            ("waiting requests", waiting, waited),
        )
        if left != right
    ]


def _files(books: Books) -> list[str]:
    indexed = {(device, identity, n) for (device, identity), n in books.files().items()}
    known = {
        (record.key.device, identity, record.id)
        for record in books.sets.values()
        for identity in record.identities
    }
    return [f"index and sets disagree on files: {indexed ^ known}"] if indexed != known else []


def _lines(books: Books) -> list[str]:
    indexed = {(line, n) for line, members in books.lines().items() for n in members}
    known = {(line, record.id) for record in books.sets.values() for line in record.generations}
    if indexed != known:
        return [f"index and sets disagree on lines: {indexed ^ known}"]
    problems = []
    for line, members in books.lines().items():
        labels = [books.sets[set_id].generations[line] for set_id in members]
        if len(set(labels)) < len(members) or len(set(members)) < len(members):
            problems.append(f"line {line} has the sets {members} under the labels {labels}")
    return problems


def snapshot(books: Books) -> dict[str, Any]:
    """Devices, sets and counters as plain data for `status`."""
    newest = newest_of_lines(books)
    return {
        "devices": {device: usage(books, device) for device in books.budgets},
        "sets": [set_entry(record, newest) for record in books.sets.values()],
        "counters": dict(sorted(books.counters.items())),
    }


def newest_of_lines(books: Books) -> set[tuple[int, str]]:
    """(set, name) of the newest generation of each line."""
    return {(members[-1], str(line[0])) for line, members in books.lines().items()}


def set_entry(record: WeightSet, newest: set[tuple[int, str]]) -> dict[str, Any]:
    """One set as `status` shows it. `newest`: from `newest_of_lines`."""
    progress = record.progress
    return {
        "id": record.id,
        "state": record.state.value,
        "names": {str(line[0]): label for line, label in record.generations.items()},
        "key": record.key,
        "path": record.source.path if record.source else None,
        "nbytes": record.nbytes,
        "tensors": record.tensors,
        "leases": [
            {"session": session, "lease": lease} for session, lease in sorted(record.leases)
        ],
        "waiting": len(record.waiters),
        "writer": record.writer,
        "pinned": record.pinned,
        "superseded": record.superseded,
        "newest": [name for name in record.names if (record.id, name) in newest],
        "progress": None
        if progress is None
        else {"stage": progress.stage, "done": progress.done, "total": progress.total},
    }
