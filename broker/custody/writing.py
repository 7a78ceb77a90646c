"""Writing weights: from `reserve` to `seal`, and what happens when a writer fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from broker import wire
from broker.custody.actions import (
    Action,
    CreateSlab,
    FreezeSlab,
    StopLoader,
    Tell,
)
from broker.custody.claiming import Claiming
from broker.custody.matching import generation_of, mismatch
from broker.custody.records import (
    Failure,
    Waiter,
    WeightSet,
    content_of,
    line_of,
)
from broker.custody.shortage import over_budget
from broker.custody.states import IN_PROGRESS, RESIDENT, State, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    Busy,
    Cancelled,
    OverBudget,
    from_payload,
)
from broker.weights import WeightKey, align_up

MAX_HOLDERS = 8
"""Sets, and holders of each, that an over-budget sentence names: it must stay one to read."""


class Writing(Claiming):
    def resolve(self, session: int, ticket: int, request: wire.Resolve) -> list[Action]:
        """A loader knows the content's identity before writing: are the bytes resident already?

        If so, everybody who waits is served from the resident set and the claim is over.
        """
        record = self._claimed_by(session, request.claim)
        if record.state is not State.CLAIMED:
            raise BadRequest(
                f"set {record.id} is {record.state.value}: resolve comes before reserve"
            )
        self._check_checkpoint(record, request.checkpoint)
        self._remember_read(record, request.files)
        resident = self._resident_twin(record, request.checkpoint)
        if resident is not None:
            self._merge(record, resident)
        self._reply(ticket, wire.Resolved(resident is not None))
        return self._take()

    def reserve(self, session: int, ticket: int, request: wire.Reserve) -> list[Action]:
        """Account for the slab and have it created; answered when the device has done it.

        Unleased sets make room, least recently used first, if that is enough.

        Raises:
            BadRequest: no such claim, its memory is reserved already, or the claim was for another
                dtype or quantisation; the claim stays.
            Busy: a generation of this label is resident; the claim stays.
            OverBudget: it does not fit; the claim stays.
            Mismatch: a loader's set of which none of the engines that wait for it can use this
                dtype; the claim stays.
        """
        record = self._claimed_by(session, request.claim)
        if record.state is State.WRITING and request.claim in self.sessions[session].restored:
            self._reply(ticket, wire.Reserved(record.claim, record.nbytes))
            return self._take()  # the first answer may not have arrived
        if record.state is not State.CLAIMED:
            raise BadRequest(f"set {record.id} is {record.state.value}: it has its memory already")
        if request.nbytes < 0 or request.tensors < 0:
            raise BadRequest("reserve: nbytes and tensors must not be negative")
        if request.tensors > self.limits.tensors:
            raise BadRequest(
                f"reserve: {request.tensors} tensors are more than a weight set may have "
                f"{self.limits.reached('tensors')}",
                limit="tensors",
            )
        key = self._completed_key(record, request)
        self._check_label_is_free(line_of(key, key.name), record.label)
        misled = self._misled_waiters(record, key)
        if misled and len(misled) == len(record.waiters) and record.loaded_by_broker:
            raise misled[0][1]
        budget = self.budgets[record.key.device]
        nbytes = align_up(max(request.nbytes, 1), budget.granularity)
        self._make_room(record, nbytes)
        self._move(record, Trigger.RESERVE)
        budget.free -= nbytes
        record.nbytes = nbytes
        record.tensors = request.tensors
        record.pending = ticket
        record.key = key
        self._actions.append(CreateSlab(record.id, record.key.device, nbytes))
        for waiter, error in misled:
            self._forget_waiter(waiter.ticket)
            self._reply(waiter.ticket, error)
        return self._take()

    def _completed_key(self, record: WeightSet, request: wire.Reserve) -> WeightKey:
        """The set's key with what a claim may leave open: dtype and quantisation."""
        key, said = record.key, (request.dtype, request.quantization)
        for claimed, reserved in zip((key.dtype, key.quantization), said, strict=True):
            if claimed and reserved and claimed != reserved:
                raise BadRequest(
                    f"set {record.id} was claimed as {claimed!r} and reserve says {reserved!r}: "
                    "abandon it and claim the key that is meant"
                )
        return msgspec.structs.replace(
            key, dtype=key.dtype or said[0], quantization=key.quantization or said[1]
        )

    def _misled_waiters(
        self, record: WeightSet, key: WeightKey
    ) -> list[tuple[Waiter, BrokerError]]:
        """Now that the dtype is known, waiters that demand another need not wait any longer."""
        known = WeightSet(record.id, key, state=State.WRITING)
        return [
            (waiter, error)
            for waiter in record.waiters.values()
            if not waiter.follows and (error := mismatch(waiter.demand, known)) is not None
        ]

    def _make_room(self, asked: WeightSet, nbytes: int) -> None:
        device = asked.key.device
        budget = self.budgets[device]
        idle = sorted(
            (
                record
                for record in self.sets.values()
                if record.key.device == device
                and record.state is State.SEALED
                and not record.leases
                and not record.pinned
            ),
            key=lambda record: record.used,
        )
        if budget.free + sum(record.nbytes for record in idle) < nbytes:
            raise self._over_budget(asked, nbytes, idle)
        for record in idle:
            if budget.free >= nbytes:
                return
            self.counters["evictions"] += 1
            self._log("set-evicted", set=record.id, cause="memory is needed", nbytes=record.nbytes)
            self._remember_end(record, "its memory was needed and nobody leased it")
            self._announce("evicted", record.names, set=record.id, cause="memory is needed")
            self._end(record, Trigger.EVICT)

    def _over_budget(self, asked: WeightSet, nbytes: int, idle: list[WeightSet]) -> OverBudget:
        budget = self.budgets[asked.key.device]
        free = budget.free + sum(record.nbytes for record in idle)
        in_use = [
            record
            for record in self.sets.values()
            if record.key.device == asked.key.device and record.nbytes and record not in idle
        ]
        held = [self._held(record) for record in in_use[:MAX_HOLDERS]]
        return over_budget(asked, nbytes, free, budget.limit, held, len(in_use) - len(held))

    def _held(self, record: WeightSet) -> dict[str, Any]:
        """A set that cannot make room, and why not."""
        sessions = sorted({session for session, _lease in record.leases})
        who = [self._who(session) for session in sessions[:MAX_HOLDERS]]
        why = []
        if sessions:
            more = len(sessions) - len(who)
            why.append(f"leased by {' and '.join(who)}" + (f" and {more} more" if more else ""))
        elif record.writer is not None:
            why.append(f"written by {self._who(record.writer)}")
        if record.pinned:
            why.append("(pinned)")
        name = f" ({record.names[0]})" if record.names else ""
        return {"set": f"set {record.id}{name}", "nbytes": record.nbytes, "why": " ".join(why)}

    def slab_created(self, set_id: int) -> list[Action]:
        """The device has created the slab; a set that ended meanwhile has its `FreeSlab`."""
        record = self.sets.get(set_id)
        if record is not None and record.state is State.RESERVING:
            self._move(record, Trigger.CREATED)
            self._answer_writer(record, wire.Reserved(record.claim, record.nbytes))
        return self._take()

    def seal(self, session: int, ticket: int, request: wire.Seal) -> list[Action]:
        """The writer is done. If another set got the same bytes meanwhile, that one stays.

        Raises:
            BadRequest: no such claim, or nothing has been reserved.
        """
        holder = self.sessions[session]
        is_over = request.claim in holder.restored and request.claim not in holder.claims
        if is_over and request.keep:
            self._repeat_seal(session, ticket, request.claim)
            return self._take()
        record = self._claimed_by(session, request.claim)
        if record.state is not State.WRITING:
            raise BadRequest(f"set {record.id} is {record.state.value}: there is nothing to seal")
        checkpoint = request.checkpoint or record.key.checkpoint
        self._check_checkpoint(record, checkpoint)
        self._remember_read(record, request.files)
        record.keep = request.keep
        twin = self._resident_twin(record, checkpoint)
        if twin is not None:
            record.pending = ticket
            self._merge(record, twin)
            return self._take()
        self._move(record, Trigger.SEAL)
        record.pending = ticket
        record.key = msgspec.structs.replace(record.key, checkpoint=checkpoint)
        self._actions.append(FreezeSlab(record.id, record.key.device))
        return self._take()

    def _repeat_seal(self, session: int, ticket: int, lease: str) -> None:
        """An earlier server sealed it and gave the lease; the engine may not know that."""
        held = self.sets.get(self.sessions[session].leases.get(lease, 0))
        if held is None:
            raise BadRequest(f"this session holds no lease {lease!r}: it ended")
        demand = wire.Demand(device=held.key.device, name=next(iter(held.names), None))
        granted = self._granted(held, Waiter(ticket, session, lease, demand), "published")
        body = wire.Sealed(held.id, held.key.checkpoint, granted.generation, False, granted)
        self._reply(ticket, body)

    def _check_checkpoint(self, record: WeightSet, checkpoint: str) -> None:
        if record.key.checkpoint not in ("", checkpoint):
            raise BadRequest(f"set {record.id} was claimed as {record.key.checkpoint}")

    def _remember_read(self, record: WeightSet, files: list[wire.FileStamp]) -> None:
        """Files as a loader saw them while it read. An engine's word on files proves nothing."""
        if record.loaded_by_broker:
            read = wire.SourceIdentity(tuple(files), record.conversion)
            self._remember_files(record, read)

    def slab_frozen(self, set_id: int) -> list[Action]:
        """The slab is immutable: everybody who waits gets a lease."""
        record = self.sets.get(set_id)
        if record is None or record.state is not State.SEALING:
            return self._take()
        twin = self._resident_twin(record, record.key.checkpoint)
        if twin is not None:
            # Two writers of the same bytes were sealing at once; the first one stays.
            self._merge(record, twin)
            return self._take()
        try:
            # Two writers with the same label may have been sealing at once.
            self._check_label_is_free(line_of(record.key, record.key.name), record.label)
        except Busy as error:
            self._fail(record, Failure(error, inheritable=False))
            return self._take()
        self._move(record, Trigger.FROZEN)
        record.used = next(self._clock)
        record.progress = None
        if record.key.name:
            self._join_line(record, record.key.name, record.label)
        self.counters["sets_sealed"] += 1
        if record.initiator is not None:
            self.counters["loads_finished"] += 1
        self._log(
            "set-sealed", set=record.id, checkpoint=record.key.checkpoint, nbytes=record.nbytes
        )
        writer, pending, record.pending = record.writer, record.pending, None
        self._drop_claim(record)
        self._answer_seal(record, record, writer, pending)
        how = {record.initiator: "loaded", None: "shared"}
        self._serve(record, self._detach_waiters(record), how)
        return self._take()

    def slab_failed(self, set_id: int, error: BrokerError) -> list[Action]:
        """The device could not create or freeze the slab."""
        record = self.sets.get(set_id)
        if record is not None and record.state in IN_PROGRESS:
            self._fail(record, Failure(error, inheritable=False))
        return self._take()

    def abandon(self, session: int, ticket: int, request: wire.Abandon) -> list[Action]:
        """The writer gives up; those who wait get its reason, or one of them the claim."""
        record = self._claimed_by(session, request.claim)
        error = from_payload(request.status, request.payload.encode())
        self._answer_writer(record, error)
        self._drop_claim(record)
        self._fail(record, Failure(error))
        self._reply(ticket, wire.Done())
        return self._take()

    def report(self, session: int, request: wire.Report) -> list[Action]:
        """Progress, told to everybody who waits."""
        record = self._claimed_by(session, request.claim)
        record.progress = wire.Progress(request.stage, request.done, request.total)
        for waiter in record.waiters.values():
            self._actions.append(Tell(waiter.ticket, record.progress))
        return self._take()

    def _lose_writer(self, record: WeightSet, failure: Failure) -> None:
        self._answer_writer(record, failure.error)
        self._drop_claim(record)
        if record.state is State.SEALING:
            # Everything was written and `seal` was asked for: the device's answer decides.
            self._move(record, Trigger.WRITER_LOST)
        else:
            self._fail(record, failure)

    def _resident_twin(self, record: WeightSet, checkpoint: str) -> WeightSet | None:
        """A resident set that makes this one superfluous."""
        if not checkpoint:
            return None
        key = msgspec.structs.replace(record.key, checkpoint=checkpoint)
        for other in self.sets.values():
            if other.state in RESIDENT and _is_twin(record, key, other):
                return other
        return None

    def _merge(self, record: WeightSet, twin: WeightSet) -> None:
        """`record` turned out to hold what `twin` holds: drop it, serve its waiters there.

        Its writer comes first, if it has asked to seal.
        """
        self.counters["loads_shared_by_content"] += 1
        self._log("same-content", set=record.id, resident=twin.id)
        writer, pending, record.pending = record.writer, record.pending, None
        self._drop_claim(record)
        waiters, identities = self._detach_waiters(record), record.identities
        self._end(record, Trigger.EVICT)
        for identity in identities:
            self._remember_files(twin, identity)
        if record.key.name:
            self._move(twin, Trigger.ASK)
            self._join_line(twin, record.key.name, record.label)
        self._answer_seal(record, twin, writer, pending)
        self._serve(twin, waiters, {None: "hashed"})

    def _fail(self, record: WeightSet, failure: Failure) -> None:
        """A set in progress ends: the next willing waiter writes it anew, else all are told why."""
        self._complete(record, failure.error)
        if record.pending is None:
            self._remember_lost(record, failure.error)
        self._answer_writer(record, failure.error)
        failed = "publications_failed" if record.initiator is None else "loads_failed"
        self.counters[failed] += 1
        self._log(
            "set-failed",
            trouble=not isinstance(failure.error, Cancelled),
            set=record.id,
            session=record.writer,
            path=None if record.source is None else record.source.path,
            name=record.key.name or None,
            status=failure.error.status,
            reason=failure.error.fields.get("reason"),
            cause=failure.error.sentence,
        )
        writer = self.sessions.get(record.writer or 0)
        if writer is not None and writer.is_loader:
            self._actions.append(StopLoader(writer.id))
        self._drop_claim(record)
        waiters = self._detach_waiters(record)
        heir = next((w for w in waiters if w.willing), None) if failure.inheritable else None
        if heir is not None and heir.key is not None:
            waiters.remove(heir)
            successor = self._inherit(record, heir, heir.key)
            waiters = self._wait_on(successor, waiters)
        else:
            self._end(record, Trigger.FAIL)
        for waiter in (w for w in waiters if not w.follows):
            self._reply(waiter.ticket, failure.error)
        self._retry(waiters)

    def _complete(self, record: WeightSet, error: BrokerError) -> None:
        """Who ran out of a device's memory does not know what the broker may hold of it."""
        if isinstance(error, OverBudget):
            device = record.key.device
            known = {"requested": record.nbytes, "limit": self.budgets[device].limit}
            error.fields = {**known, "device": device, **error.fields}

    def _inherit(self, record: WeightSet, heir: Waiter, key: WeightKey) -> WeightSet:
        """A waiting claim takes over. The set goes on under a fresh id: the device may still answer
        for the old slab."""
        self._free(record)
        self._move(record, Trigger.INHERIT)
        self._unlist(record)
        successor = WeightSet(
            next(self._set_ids),
            key,
            state=record.state,
            writer=heir.session,
            claim=heir.lease,
            label=heir.demand.generation,
        )
        self.sets[successor.id] = successor
        self.sessions[heir.session].claims[heir.lease] = successor.id
        self.counters["claims_inherited"] += 1
        self._log("claim-inherited", set=record.id, by=successor.id, session=heir.session)
        self._reply(heir.ticket, wire.Claimed(heir.lease))
        return successor

    def _wait_on(self, successor: WeightSet, waiters: list[Waiter]) -> list[Waiter]:
        """Those who asked for a checkpoint's files do not wait for an engine's: they come back."""
        is_left = [waiter.source is not None or waiter.follows for waiter in waiters]
        for waiter in (w for w, left in zip(waiters, is_left, strict=True) if not left):
            self._or_refuse(waiter, partial(self._wait, successor, waiter))
        return [waiter for waiter, left in zip(waiters, is_left, strict=True) if left]

    def _answer_seal(
        self, written: WeightSet, sealed: WeightSet, writer: int | None, pending: int | None
    ) -> None:
        """The writer learns what is resident now, and has its lease before anybody else."""
        if writer not in self.sessions or writer is None or pending is None:
            return
        name = written.key.name
        granted = None
        if written.keep:
            demand = wire.Demand(device=sealed.key.device, name=name or None)
            waiter = Waiter(pending, writer, written.claim, demand)
            self._take_lease(sealed, waiter, "published")
            granted = self._granted(sealed, waiter, "published")
        label = generation_of(sealed, name)
        is_twin = sealed is not written
        body = wire.Sealed(sealed.id, sealed.key.checkpoint, label, is_twin, granted)
        self._reply(pending, body)


def _is_twin(record: WeightSet, key: WeightKey, other: WeightSet) -> bool:
    """Has `other` the bytes that `record`, whose content is now known, has or would have?

    A loader adds nothing to the content, so dtype and quantisation, which it may not know yet,
    follow from it; but only what another loader has digested itself counts as equal. An engine's
    set is what its key says.
    """
    if other is record:
        return False
    if not record.loaded_by_broker:
        return content_of(other.key) == content_of(key)
    same = (key.device, key.checkpoint, key.format, key.layout)
    theirs = (other.key.device, other.key.checkpoint, other.key.format, other.key.layout)
    return other.loaded_by_broker and same == theirs
