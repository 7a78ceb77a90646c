"""The events: what engines, loaders and the device say, and what follows from it.

Every method takes one event and returns the actions it causes, in order. A method that raises a
`BrokerError` has refused the event and changed nothing; the caller answers with the error.
"""

from __future__ import annotations

from broker import wire
from broker.amounts import counted
from broker.custody.actions import (
    Action,
)
from broker.custody.records import (
    Failure,
    WeightSet,
)
from broker.custody.restoring import Restoring
from broker.custody.states import IN_PROGRESS, State, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    Busy,
    Cancelled,
    LoadFailed,
    NotFound,
)
from broker.suggest import did_you_mean


class Books(Restoring):
    """All of them: asking, claiming, writing, restoring, and here sessions and giving back."""

    def end_session(
        self, session: int, cause: BrokerError, *, closed: bool = False
    ) -> list[Action]:
        """The process behind a session is gone: its leases, claims and requests end now.

        Args:
            cause: what the requests that wait for a set it was writing are told.
            closed: it ended the session itself; else it has died, as far as anybody knows.
        """
        record = self.sessions.pop(session, None)
        if record is None:
            return self._take()
        for ticket in record.waiting.values():
            self._forget_waiter(ticket)
        for lease, set_id in record.leases.items():
            self.counters["leases_reclaimed"] += 1
            self._end_lease(self.sets[set_id], session, lease)
        for set_id in record.claims.values():
            self.counters["claims_lost"] += 1
            self._lose_writer(self.sets[set_id], Failure(cause))
        self._log(
            "session-ended",
            trouble=not closed,
            session=session,
            how="closed" if closed else "died",
            cause=cause.sentence,
            leases=len(record.leases),
            requests=len(record.waiting),
            claims=len(record.claims),
        )
        return self._take()

    def writer_stalled(self, set_id: int) -> list[Action]:
        """The time to seal a reserved slab is up: the claim is over, as if its writer had died.

        Nothing happens if the set is sealed, being sealed or gone.
        """
        record = self.sets.get(set_id)
        if record is None or record.state not in (State.RESERVING, State.WRITING):
            return self._take()
        error = LoadFailed(
            f"{self._who(record.writer)} reserved memory for weights and did not seal them in time "
            f"{self.limits.reached('seal_seconds')}",
            reason="writer-stalled",
            limit="seal_seconds",
        )
        self.counters["writers_stalled"] += 1
        cause, writer = error.sentence, record.writer
        self._log("writer-stalled", trouble=True, session=writer, set=record.id, cause=cause)
        self._fail(record, Failure(error))
        return self._take()

    def conversation_lost(self, session: int) -> None:
        """Replies to the session may not have arrived: it may ask again for what it holds."""
        record = self.sessions[session]
        record.restored.update(record.leases, record.claims)

    def release(self, session: int, ticket: int, request: wire.Release) -> list[Action]:
        """End a lease. Raises `BadRequest` if this session holds no such lease."""
        set_id = self.sessions[session].leases.get(request.lease)
        if set_id is None:
            raise BadRequest(f"this session holds no lease {request.lease!r}")
        self._end_lease(self.sets[set_id], session, request.lease)
        del self.sessions[session].leases[request.lease]
        self._reply(ticket, wire.Done())
        return self._take()

    def cancel(self, session: int, ticket: int, request: wire.Cancel) -> list[Action]:
        """Whatever became of the lease: withdrawn, given back or abandoned. Idempotent."""
        record = self.sessions[session]
        waiting = record.waiting.get(request.lease)
        cause = Cancelled("the request was withdrawn by the engine that made it")
        if waiting is not None:
            self._forget_waiter(waiting)
            self._reply(waiting, cause)
        elif request.lease in record.leases:
            self._end_lease(self.sets[record.leases.pop(request.lease)], session, request.lease)
        elif request.lease in record.claims:
            self._lose_writer(self.sets[record.claims[request.lease]], Failure(cause))
        self._reply(ticket, wire.Done())
        return self._take()

    def evict(self, ticket: int, request: wire.Evict) -> list[Action]:
        """Forget sets as soon as nobody leases them; one in progress ends at once.

        Raises:
            NotFound: no set has this id, name or identity.
            BadRequest: it is one set's id and the name of another.
        """
        meant = self._meant(request.set)
        draining = [record.id for record in meant if record.leases]
        for record in meant:
            self._log("set-evicted", set=record.id, cause="evict", leases=len(record.leases))
            self.counters["evictions"] += 1
            self._remember_end(record, "it was evicted")
            self._announce("evicted", record.names, set=record.id, cause="evict")
            if record.state in IN_PROGRESS:
                error = Cancelled(
                    f"weight set {record.id} was evicted while it was being written; ask again if "
                    "it is wanted"
                )
                self._fail(record, Failure(error, inheritable=False))
            else:
                self._retire(record)
        self._reply(ticket, wire.Evicted([record.id for record in meant], draining))
        return self._take()

    def pin(self, ticket: int, request: wire.Pin) -> list[Action]:
        """Keep sets although nobody leases them, whatever memory is needed or generation comes.

        A set that is to go with its last lease stays as well, and the answer says so.

        Raises:
            NotFound: as `evict`.
        """
        meant = self._meant(request.set)
        kept = [record.id for record in meant if record.state is State.DRAINING]
        for record in meant:
            record.pinned = True
            self._touch(record)
            if record.state is State.DRAINING:
                self._move(record, Trigger.ASK)
            self._log("set-pinned", set=record.id, saved=record.id in kept or None)
        self._reply(ticket, wire.Pinned([record.id for record in meant], kept))
        return self._take()

    def unpin(self, ticket: int, request: wire.Unpin) -> list[Action]:
        """The opposite of `pin`; a superseded set that nobody leases ends now.

        Raises:
            NotFound: as `evict`.
        """
        meant = self._meant(request.set)
        for record in meant:
            record.pinned = False
            self._touch(record)
            self._log("set-unpinned", set=record.id)
            if record.superseded and record.state is State.SEALED:
                self._retire(record)
        self._reply(ticket, wire.Pinned([record.id for record in meant]))
        return self._take()

    def watch(self, session: int, ticket: int, request: wire.Watch) -> list[Action]:
        """Send the session events about a name from now on. Raises `Busy` past the limit."""
        watches = self.sessions[session].watches
        if request.name not in watches and len(watches) >= self.limits.watches:
            raise Busy(
                f"this session watches {counted(len(watches), 'name')} already "
                f"{self.limits.reached('watches')}",
                limit="watches",
                value=len(watches),
            )
        watches.add(request.name)
        self._reply(ticket, wire.Done())
        return self._take()

    def unwatch(self, session: int, ticket: int, request: wire.Unwatch) -> list[Action]:
        """No more events about a name. Idempotent."""
        self.sessions[session].watches.discard(request.name)
        self._reply(ticket, wire.Done())
        return self._take()

    def _meant(self, text: str) -> list[WeightSet]:
        meant = self._named(text)
        if not meant:
            names = sorted({name for record in self.sets.values() for name in record.names})
            near = did_you_mean(text, names)
            hint = f"{near} " if near else ""
            raise NotFound(f"no weight set {text!r}; {hint}`status` lists ids and names", set=text)
        return meant

    def _named(self, text: str) -> list[WeightSet]:
        """The set of this id, or those of this name or identity: a name may look like an id."""
        named = [
            record
            for record in self.sets.values()
            if text and text in (record.key.checkpoint, record.key.name, *record.names)
        ]
        numbered = self.sets.get(int(text)) if text.isdecimal() else None
        if numbered is None:
            return named
        others = [str(record.id) for record in named if record is not numbered]
        if others:
            raise BadRequest(
                f"{text!r} is the id of set {numbered.id} and the name of set {', '.join(others)}: "
                "say which by another id, a name or a content identity",
                set=text,
            )
        return [numbered]

    def leases(self) -> list[tuple[int, int, str]]:
        """(set, session, lease) of every lease."""
        return [(record.id, *lease) for record in self.sets.values() for lease in record.leases]

    def attachment(self, session: int, lease: str) -> tuple[WeightSet, bool]:
        """The set that `attach` delivers, and whether it is for writing.

        Raises:
            BadRequest: no such lease or claim, or the claim has no memory yet.
            StaleEpoch: the claim has ended with an earlier server.
        """
        record = self.sessions[session]
        if lease in record.leases:
            return self.sets[record.leases[lease]], False
        if lease in record.claims and self.sets[record.claims[lease]].state is State.WRITING:
            return self.sets[record.claims[lease]], True
        if record.taken_over and lease not in record.claims:
            raise self._no_claim(session, lease)
        raise BadRequest(f"attach: this session holds no lease or reserved claim {lease!r}")
