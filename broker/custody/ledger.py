"""What is on the books and the small steps that change it; the events are in the classes above."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from broker import wire
from broker.amounts import counted
from broker.custody.actions import (
    Action,
    DropLease,
    FreeSlab,
    KeepSet,
    Log,
    Notify,
    Reply,
)
from broker.custody.records import (
    MAX_IDENTITIES,
    Budget,
    Line,
    SessionRecord,
    Waiter,
    WeightSet,
    kept_set,
    line_of,
)
from broker.custody.states import IN_PROGRESS, RESIDENT, TABLE, WITH_MEMORY, State, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    Busy,
    StaleEpoch,
)
from broker.limits import DEFAULTS, Limits
from broker.weights import WeightKey

MAX_ENDED = 1024
"""Sets whose end is remembered."""
MAX_NUMBERED = 65_536
"""Lines without a resident set whose numbering is remembered."""
MAX_NUMBER_DIGITS = 18
"""Longer labels are taken for words: no line will ever count that far."""


class Ledger:
    """All weight sets, sessions, leases and bytes of one broker. Not thread-safe: the loop owns it.

    Args:
        budgets: the devices this broker serves, by UUID.
        epoch: changes with every start of the broker; travels with each grant.
        keeping: say with `KeepSet`, `KeepLease`, `DropLease` what a successor needs to know.
        limits: what sessions may use.
    """

    def __init__(
        self,
        budgets: Mapping[str, Budget],
        epoch: str = "",
        *,
        keeping: bool = False,
        limits: Limits = DEFAULTS,
    ) -> None:
        self.epoch = epoch
        self.limits = limits
        self.budgets = dict(budgets)
        self.sets: dict[int, WeightSet] = {}
        self.sessions: dict[int, SessionRecord] = {}
        self.counters: Counter[str] = Counter()
        self._numbers: Counter[Line] = Counter()
        self._lines: dict[Line, list[int]] = {}
        self._by_files: dict[tuple[str, wire.SourceIdentity], int] = {}
        self._set_ids = itertools.count(1)
        self._session_ids = itertools.count(1)
        self._clock = itertools.count(1)
        self._ended: dict[int, str] = {}
        self._keeping = keeping
        self._changed: set[int] = set()
        self._kept_leases: list[Action] = []
        self._actions: list[Action] = []

    def files(self) -> Mapping[tuple[str, wire.SourceIdentity], int]:
        """Which set the files of a checkpoint, as the kernel describes them, were loaded into."""
        return self._by_files

    def lines(self) -> Mapping[Line, list[int]]:
        """The generations of each line, oldest first."""
        return self._lines

    def open_session(self) -> int:
        """A process has connected: its session's id."""
        session = next(self._session_ids)
        self.sessions[session] = SessionRecord(session)
        return session

    def introduce(self, session: int, who: str) -> None:
        """What messages call the process behind a session, e.g. "pid 12 (vllm)"."""
        if session in self.sessions:
            self.sessions[session].who = who

    def _who(self, session: int | None) -> str:
        record = self.sessions.get(session or 0)
        return record.who if record is not None and record.who else f"session {session}"

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        if not self._keeping:
            return actions
        leases, self._kept_leases = self._kept_leases, []
        if not self._changed:
            return leases + actions
        changed, self._changed = sorted(self._changed), set()
        resident = (self.sets[set_id] for set_id in changed if set_id in self.sets)
        kept: list[Action] = [
            KeepSet(kept_set(record)) for record in resident if record.state in RESIDENT
        ]
        return kept + leases + actions

    def _touch(self, record: WeightSet) -> None:
        """What a successor needs to know of the set has changed."""
        self._changed.add(record.id)

    def _reply(self, ticket: int, body: msgspec.Struct | BrokerError) -> None:
        self._actions.append(Reply(ticket, body))

    def _answer_writer(self, record: WeightSet, body: msgspec.Struct | BrokerError) -> None:
        """Answer what the writer waits for, if it waits and lives."""
        if record.pending is not None and record.writer in self.sessions:
            self._reply(record.pending, body)
        record.pending = None

    def _log(self, event: str, *, trouble: bool = False, **detail: object) -> None:
        self._actions.append(Log(event, detail, trouble))

    def _announce(self, event: str, names: Iterable[str], **detail: object) -> None:
        """Tell every session that watches one of the names (or all of them)."""
        known = set(names)
        for session in self.sessions.values():
            if session.watches & known or "" in session.watches:
                for name in sorted(known):
                    if name in session.watches or "" in session.watches:
                        told = wire.Event(event, {"name": name, **detail})
                        self._actions.append(Notify(session.id, told))

    def _remember_end(self, record: WeightSet, how: str) -> None:
        """What became of a set, for an engine that comes back to it."""
        self._ended[record.id] = how
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _move(self, record: WeightSet, trigger: Trigger) -> None:
        following = TABLE[record.state].get(trigger)
        if following is None:
            raise Busy(f"set {record.id} is {record.state.value}: {trigger.value} is not possible")
        if record.state is not following:
            self._touch(record)
        record.state = following

    def _check_lease(self, session: int, lease: str) -> None:
        record = self.sessions[session]
        if lease in record.leases or lease in record.claims or lease in record.waiting:
            raise BadRequest(f"the lease id {lease!r} is in use in this session")

    def _not_served(self, device: str) -> BadRequest:
        return BadRequest(
            f"this broker does not serve device {device!r}; it serves "
            + ", ".join(sorted(self.budgets))
        )

    def _new_set(self, key: WeightKey, writer: int, claim: str) -> WeightSet:
        record = WeightSet(next(self._set_ids), key, writer=writer, claim=claim)
        self._move(record, Trigger.ASK)
        self.sets[record.id] = record
        self.sessions[writer].claims[claim] = record.id
        return record

    def _check_may_write(self, session: int) -> None:
        """Raise `Busy` if the session, or all together, have too many sets in progress."""
        in_progress = [record for record in self.sets.values() if record.state in IN_PROGRESS]
        own = sum(self._is_caused_by(record, session) for record in in_progress)
        for used, limit, whose in (
            (own, "claims", "by this session"),
            (len(in_progress), "all_claims", "or loaded"),
        ):
            if used >= getattr(self.limits, limit):
                written = counted(used, "weight set is", "weight sets are")
                raise Busy(
                    f"{written} being written {whose} already; let one of them end "
                    f"first {self.limits.reached(limit)}",
                    limit=limit,
                    value=used,
                )

    def _is_caused_by(self, record: WeightSet, session: int) -> bool:
        waiter = record.waiters.get(record.initiator or 0)
        return record.writer == session or (waiter is not None and waiter.session == session)

    def _check_may_name(self, line: Line, record: WeightSet | None = None) -> None:
        """Raise `Busy` if there are too many names: in all, or of this set."""
        full = ""
        if record is not None and line not in record.generations:
            full = "set_names" if len(record.generations) >= self.limits.set_names else ""
        if line not in self._lines and len(self._lines) >= self.limits.names:
            full = "names"
        if full:
            known = counted(getattr(self.limits, full), "name is", "names are")
            raise Busy(
                f"{line[0]!r} cannot become a name of weights: {known} on the books already; "
                f"evict sets, or use fewer {self.limits.reached(full)}",
                limit=full,
                value=getattr(self.limits, full),
            )

    def _claimed_by(self, session: int, claim: str) -> WeightSet:
        set_id = self.sessions[session].claims.get(claim)
        if set_id is None:
            raise self._no_claim(session, claim)
        return self.sets[set_id]

    def _no_claim(self, session: int, claim: str) -> BrokerError:
        record = self.sessions[session]
        error = record.lost.get(claim)
        if error is not None:
            return type(error)(f"the claim {claim!r} has ended: {error.sentence}", **error.fields)
        if record.taken_over:
            return StaleEpoch(
                f"the claim {claim!r} has ended: the broker's server was replaced, and what was "
                "not sealed yet is not published; publish again"
            )
        return BadRequest(f"this session holds no claim {claim!r}: it ended or never was")

    def _remember_lost(self, record: WeightSet, error: BrokerError) -> None:
        """The writer will hear of its claim's end when it comes back to it."""
        session = self.sessions.get(record.writer or 0)
        if session is not None:
            session.lost[record.claim] = error
            if len(session.lost) > self.limits.claims:
                del session.lost[next(iter(session.lost))]

    def _by_identity(self, device: str, source: wire.Source) -> WeightSet | None:
        set_id = self._by_files.get((device, source.identity))
        return None if set_id is None else self.sets[set_id]

    def _remember_files(self, record: WeightSet, identity: wire.SourceIdentity) -> None:
        if not identity.files or identity in record.identities:
            return
        previous = self._by_files.get((record.key.device, identity))
        if previous is not None:
            self.sets[previous].identities.remove(identity)
            self._touch(self.sets[previous])
        record.identities.append(identity)
        self._touch(record)
        self._by_files[record.key.device, identity] = record.id
        if len(record.identities) > MAX_IDENTITIES:
            del self._by_files[record.key.device, record.identities.pop(0)]

    def _unwait(self, waiter: Waiter) -> None:
        session = self.sessions.get(waiter.session)
        if session is not None:
            session.waiting.pop(waiter.lease, None)

    def _detach_waiters(self, record: WeightSet) -> list[Waiter]:
        """Nobody waits for the set any more: the requests that did, for the caller to answer."""
        waiters, record.waiters = list(record.waiters.values()), {}
        for waiter in waiters:
            self._unwait(waiter)
        return waiters

    def _forget_waiter(self, ticket: int) -> None:
        for record in self.sets.values():
            waiter = record.waiters.pop(ticket, None)
            if waiter is not None:
                self._unwait(waiter)
                return

    def _drop_claim(self, record: WeightSet) -> None:
        if record.writer is not None and record.writer in self.sessions:
            self.sessions[record.writer].claims.pop(record.claim, None)
        record.writer = None

    def _free(self, record: WeightSet) -> None:
        if record.state in WITH_MEMORY:
            self.budgets[record.key.device].free += record.nbytes
            self._actions.append(FreeSlab(record.id))
        record.nbytes = record.tensors = 0

    def _end(self, record: WeightSet, trigger: Trigger) -> None:
        """The set becomes absent: its memory is freed and nothing points to it any more."""
        self._free(record)
        self._move(record, trigger)
        self._unlist(record)

    def _unlist(self, record: WeightSet) -> None:
        for identity in record.identities:
            self._by_files.pop((record.key.device, identity), None)
        for line in record.generations:
            self._lines[line].remove(record.id)
            if not self._lines[line]:
                del self._lines[line]
        del self.sets[record.id]

    def _end_lease(self, record: WeightSet, session: int, lease: str) -> None:
        record.leases.discard((session, lease))
        if session in self.sessions:
            self.sessions[session].restored.discard(lease)
        if self._keeping:
            self._actions.append(DropLease(session, lease))
        record.used = next(self._clock)
        self._log("lease-ended", set=record.id, session=session, lease=lease)
        if record.leases:
            return
        is_superseded = record.superseded and not record.pinned
        if record.state is State.SEALED and not is_superseded:
            self._move(record, Trigger.LAST_RELEASE)
            return
        self._log("set-freed", set=record.id, nbytes=record.nbytes)
        draining = record.state is State.DRAINING
        self._end(record, Trigger.LAST_RELEASE if draining else Trigger.EVICT)

    def _retire(self, record: WeightSet) -> None:
        """No longer wanted: absent at once, or with the last lease."""
        if record.leases:
            self._move(record, Trigger.RETIRE)
        else:
            self._end(record, Trigger.EVICT)

    def _join_line(
        self, record: WeightSet, name: str, label: str | None, *, newest: bool = True
    ) -> None:
        """The set becomes its line's newest generation; older ones are superseded.

        One that is a generation already keeps its label, and its place unless `newest`.
        """
        line = line_of(record.key, name)
        generations = self._lines.setdefault(line, [])
        if record.id in generations:
            if not newest or generations[-1] == record.id:
                return
            generations.remove(record.id)
        else:
            record.generations[line] = self._free_label(line, label)
        generations.append(record.id)
        record.places[line] = next(self._clock)
        self._touch(record)
        record.superseded = False
        label = record.generations[line]
        self._log("set-named", set=record.id, name=name, generation=label)
        self._announce("new-generation", [name], generation=label, set=record.id)
        for older in [self.sets[set_id] for set_id in generations[:-1]]:
            self._supersede(older, record, name)

    def _free_label(self, line: Line, wanted: str | None) -> str:
        """The label that is wanted, or a number no generation of the line has ever had."""
        if wanted is None or self._labelled(line, wanted) is not None:
            self._numbers[line] += 1
            wanted = str(self._numbers[line])
        self._note_number(line, wanted)
        self._forget_a_number()
        return wanted

    def _forget_a_number(self) -> None:
        if len(self._numbers) > MAX_NUMBERED + len(self._lines):
            gone = next(line for line in self._numbers if line not in self._lines)
            del self._numbers[gone]

    def _note_number(self, line: Line, label: str) -> None:
        if label.isdecimal() and len(label) <= MAX_NUMBER_DIGITS:
            self._numbers[line] = max(self._numbers[line], int(label))

    def _labelled(self, line: Line, label: str) -> WeightSet | None:
        """The generation of a line that has this label."""
        members = (self.sets[set_id] for set_id in self._lines.get(line, ()))
        return next((record for record in members if record.generations[line] == label), None)

    def _supersede(self, older: WeightSet, newer: WeightSet, name: str) -> None:
        if any(self._lines[line][-1] == older.id for line in older.generations):
            return  # the newest of another name
        older.superseded = True
        self._touch(older)
        self._remember_end(older, f"it was superseded by a newer generation of {name!r}")
        if older.state is State.SEALED and not older.pinned:
            self._log("set-superseded", set=older.id, by=newer.id, name=name)
            self._retire(older)
