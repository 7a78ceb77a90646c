"""What is on the books and the small steps that change it; the events are in the classes above."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from broker import wire
from broker.custody.actions import (
    Action,
    FreeSlab,
    Log,
    Reply,
)
from broker.custody.records import (
    MAX_IDENTITIES,
    Budget,
    FileIdentity,
    Line,
    SessionRecord,
    Waiter,
    WeightSet,
    line_of,
)
from broker.custody.states import TABLE, WITH_MEMORY, State, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    Busy,
)
from broker.weights import WeightKey


class Ledger:
    """All weight sets, sessions, leases and bytes of one broker. Not thread-safe: the loop owns it.

    Args:
        budgets: the devices this broker serves, by UUID.
        epoch: changes with every start of the broker; travels with each grant.
    """

    def __init__(self, budgets: Mapping[str, Budget], epoch: str = "") -> None:
        self.epoch = epoch
        self.budgets = dict(budgets)
        self.sets: dict[int, WeightSet] = {}
        self.sessions: dict[int, SessionRecord] = {}
        self.counters: Counter[str] = Counter()
        self._numbers: Counter[Line] = Counter()
        self._lines: dict[Line, list[int]] = {}
        self._by_files: dict[tuple[str, FileIdentity], int] = {}
        self._set_ids = itertools.count(1)
        self._session_ids = itertools.count(1)
        self._clock = itertools.count(1)
        self._actions: list[Action] = []

    def files(self) -> Mapping[tuple[str, FileIdentity], int]:
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

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _reply(self, ticket: int, body: msgspec.Struct | BrokerError) -> None:
        self._actions.append(Reply(ticket, body))

    def _answer_writer(self, record: WeightSet, body: msgspec.Struct | BrokerError) -> None:
        if record.pending is not None:
            self._reply(record.pending, body)
            record.pending = None

    def _log(self, event: str, **detail: object) -> None:
        self._actions.append(Log(event, detail))

    def _move(self, record: WeightSet, trigger: Trigger) -> None:
        following = TABLE[record.state].get(trigger)
        if following is None:
            raise Busy(f"set {record.id} is {record.state.value}: {trigger.value} is not possible")
        record.state = following

    def _check_lease(self, session: int, lease: str) -> None:
        record = self.sessions[session]
        if lease in record.leases or lease in record.claims or lease in record.waiting:
            raise BadRequest(f"the lease id {lease!r} is in use in this session")

    def _check_device(self, device: str) -> None:
        if device not in self.budgets:
            raise BadRequest(
                f"this broker does not serve device {device!r}; it serves "
                + ", ".join(sorted(self.budgets))
            )

    def _new_set(self, key: WeightKey, writer: int, claim: str) -> WeightSet:
        record = WeightSet(next(self._set_ids), key, writer=writer, claim=claim)
        self._move(record, Trigger.ASK)
        self.sets[record.id] = record
        self.sessions[writer].claims[claim] = record.id
        return record

    def _claimed_by(self, session: int, claim: str) -> WeightSet:
        set_id = self.sessions[session].claims.get(claim)
        if set_id is None:
            raise BadRequest(f"this session holds no claim {claim!r}: it ended or never was")
        return self.sets[set_id]

    def _by_identity(self, device: str, source: wire.Source) -> WeightSet | None:
        set_id = self._by_files.get((device, tuple(source.files)))
        return None if set_id is None else self.sets[set_id]

    def _remember_files(self, record: WeightSet, files: Iterable[wire.FileStamp]) -> None:
        identity = tuple(files)
        if not identity or identity in record.identities:
            return
        previous = self._by_files.get((record.key.device, identity))
        if previous is not None:
            self.sets[previous].identities.remove(identity)
        record.identities.append(identity)
        self._by_files[record.key.device, identity] = record.id
        if len(record.identities) > MAX_IDENTITIES:
            del self._by_files[record.key.device, record.identities.pop(0)]

    def _unwait(self, waiter: Waiter) -> None:
        session = self.sessions.get(waiter.session)
        if session is not None:
            session.waiting.pop(waiter.lease, None)

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
        for identity in record.identities:
            self._by_files.pop((record.key.device, identity), None)
        for line in record.generations:
            self._lines[line].remove(record.id)
            if not self._lines[line]:
                del self._lines[line]
        del self.sets[record.id]

    def _end_lease(self, record: WeightSet, session: int, lease: str) -> None:
        record.leases.discard((session, lease))
        record.used = next(self._clock)
        self._log("lease-ended", set=record.id, session=session)
        if not record.leases:
            if record.state is State.DRAINING:
                self._log("set-freed", set=record.id, nbytes=record.nbytes)
                self._end(record, Trigger.LAST_RELEASE)
            else:
                self._move(record, Trigger.LAST_RELEASE)

    def _retire(self, record: WeightSet) -> None:
        """No longer wanted: absent at once, or with the last lease."""
        if record.leases:
            self._move(record, Trigger.RETIRE)
        else:
            self._end(record, Trigger.EVICT)

    def _join_line(self, record: WeightSet, name: str, label: str | None) -> None:
        """Make the set its line's newest generation; older ones are superseded."""
        line = line_of(record.key, name)
        generations = self._lines.setdefault(line, [])
        if generations and generations[-1] == record.id:
            return
        if record.id in generations:
            generations.remove(record.id)
        generations.append(record.id)
        self._numbers[line] += 1
        record.generations[line] = label or str(self._numbers[line])
        for older in [self.sets[set_id] for set_id in generations[:-1]]:
            is_newest_elsewhere = any(
                self._lines[other][-1] == older.id for other in older.generations
            )
            if older.state is State.SEALED and not older.pinned and not is_newest_elsewhere:
                self._log("set-superseded", set=older.id, by=record.id, name=name)
                self._retire(older)
