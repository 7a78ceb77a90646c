"""Taking over from an earlier server: its sets, sessions and leases; not what was unfinished."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from broker.custody.actions import Action, DropLease
from broker.custody.records import KeptLease, KeptSet, SessionRecord, WeightSet, line_of
from broker.custody.states import State, Trigger
from broker.custody.writing import Writing

SETS_PER_SERVER = 1_000_000
"""More than one server will ever hold: a checkpoint a second for eleven days."""


class Restoring(Writing):
    def restore(
        self,
        sets: Iterable[KeptSet],
        sessions: Iterable[int],
        leases: Iterable[KeptLease],
        *,
        restarts: int = 0,
    ) -> list[Action]:
        """Put on empty books what an earlier server had told the keeper.

        Claims and waiting requests are not among it: nobody could finish them. A lease whose set or
        session is gone is dropped; a set that only such a lease held is freed.

        Args:
            restarts: how many servers there were before: no id of theirs is given out again.
        """
        for session in sessions:
            self.sessions[session] = SessionRecord(session, taken_over=True)
        for kept in sorted(sets, key=lambda kept: kept.id):
            self._restore_set(kept)
        for line in self._lines:
            self._lines[line].sort(key=lambda set_id: self.sets[set_id].places[line])
        for lease in leases:
            self._restore_lease(lease)
        for record in list(self.sets.values()):
            if not record.leases:
                self._end_unwanted(record)
        self._count_on(restarts)
        return self._take()

    def _restore_set(self, kept: KeptSet) -> None:
        record = WeightSet(
            kept.id,
            kept.key,
            state=State.DRAINING if kept.is_draining else State.SEALED,
            nbytes=kept.nbytes,
            tensors=kept.tensors,
            pinned=kept.pinned,
            superseded=kept.superseded,
            loaded_by_broker=kept.loaded_by_broker,
            source=kept.source,
        )
        self.sets[record.id] = record
        self.budgets[record.key.device].free -= record.nbytes
        for name, (label, place) in kept.lines.items():
            line = line_of(record.key, name)
            record.generations[line], record.places[line] = label, place
            self._lines.setdefault(line, []).append(record.id)
            self._note_number(line, label)
        for identity in kept.identities:
            self._remember_files(record, identity)

    def _restore_lease(self, lease: KeptLease) -> None:
        record, session = self.sets.get(lease.set), self.sessions.get(lease.session)
        if record is None or session is None:
            self._actions.append(DropLease(lease.session, lease.lease))
            return
        record.leases.add((lease.session, lease.lease))
        session.leases[lease.lease] = record.id
        session.restored.add(lease.lease)

    def _end_unwanted(self, record: WeightSet) -> None:
        """The last lease of a set that was to go with it has ended meanwhile."""
        if record.state is State.DRAINING:
            self._end(record, Trigger.LAST_RELEASE)
        elif record.superseded and not record.pinned:
            self._end(record, Trigger.EVICT)

    def _count_on(self, restarts: int) -> None:
        """Ids go on behind all that earlier servers gave out, also those of sets that are gone: an
        engine may come back to one and must not get another set."""
        places = [place for record in self.sets.values() for place in record.places.values()]
        first = restarts * SETS_PER_SERVER
        self._set_ids = itertools.count(max(first, *self.sets, 0) + 1)
        self._session_ids = itertools.count(max(self.sessions, default=0) + 1)
        self._clock = itertools.count(max(places, default=0) + 1)
