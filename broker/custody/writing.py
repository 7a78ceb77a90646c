"""Writing weights: from `reserve` to `seal`, and what happens when a writer fails."""

from __future__ import annotations

import msgspec

from broker import wire
from broker.custody.actions import (
    Action,
    CreateSlab,
    FreezeSlab,
    StopLoader,
    Tell,
)
from broker.custody.asking import Asking
from broker.custody.matching import generation_of, mismatch
from broker.custody.records import (
    Failure,
    Waiter,
    WeightSet,
)
from broker.custody.states import IN_PROGRESS, RESIDENT, State, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    OverBudget,
    from_payload,
)
from broker.weights import align_up


class Writing(Asking):
    def resolve(self, session: int, ticket: int, request: wire.Resolve) -> list[Action]:
        """A loader knows the content's identity before writing: are the bytes resident already?

        If so, everybody who waits is served from the resident set and the claim is over.
        """
        record = self._claimed_by(session, request.claim)
        if record.state is not State.CLAIMED:
            raise BadRequest(
                f"set {record.id} is {record.state.value}: resolve comes before reserve"
            )
        resident = self._resident_twin(record, request.checkpoint)
        if resident is not None:
            self._remember_files(resident, request.files)
            self._merge(record, resident)
        self._reply(ticket, wire.Resolved(resident is not None))
        return self._take()

    def reserve(self, session: int, ticket: int, request: wire.Reserve) -> list[Action]:
        """Account for the slab and have it created; answered when the device has done it.

        Unleased sets make room, least recently used first, if that is enough.

        Raises:
            BadRequest: no such claim, or its memory is reserved already.
            OverBudget: it does not fit; the claim stays.
            Mismatch: none of the engines that wait can use a set of this dtype; the claim stays.
        """
        record = self._claimed_by(session, request.claim)
        if record.state is not State.CLAIMED:
            raise BadRequest(f"set {record.id} is {record.state.value}: it has its memory already")
        if request.nbytes < 0 or request.tensors < 0:
            raise BadRequest("reserve: nbytes and tensors must not be negative")
        budget = self.budgets[record.key.device]
        nbytes = align_up(max(request.nbytes, 1), budget.granularity)
        self._make_room(record.key.device, nbytes)
        self._move(record, Trigger.RESERVE)
        budget.free -= nbytes
        record.nbytes = nbytes
        record.tensors = request.tensors
        record.pending = ticket
        record.key = msgspec.structs.replace(
            record.key, dtype=request.dtype, quantization=request.quantization
        )
        self._actions.append(CreateSlab(record.id, record.key.device, nbytes))
        self._refuse_misled_waiters(record)
        return self._take()

    def _refuse_misled_waiters(self, record: WeightSet) -> None:
        """Now that the dtype is known, waiters that demand another need not wait any longer."""
        refused = [
            (waiter, error)
            for waiter in record.waiters.values()
            if not waiter.follows and (error := mismatch(waiter.demand, record)) is not None
        ]
        for waiter, error in refused:
            self._forget_waiter(waiter.ticket)
            self._reply(waiter.ticket, error)
        if refused and not record.waiters:
            self._fail(record, Failure(refused[0][1], inheritable=False))

    def _make_room(self, device: str, nbytes: int) -> None:
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
            raise self._over_budget(device, nbytes, sum(record.nbytes for record in idle))
        for record in idle:
            if budget.free >= nbytes:
                return
            self.counters["evictions"] += 1
            self._log("set-evicted", set=record.id, cause="memory is needed", nbytes=record.nbytes)
            self._end(record, Trigger.EVICT)

    def _over_budget(self, device: str, nbytes: int, idle: int) -> OverBudget:
        budget = self.budgets[device]
        held = ", ".join(
            f"set {record.id}{f' ({record.names[0]})' if record.names else ''}: {record.nbytes}"
            for record in self.sets.values()
            if record.key.device == device and record.nbytes and (record.leases or record.pinned)
        )
        return OverBudget(
            f"the weights need {nbytes} bytes on device {device}, "
            f"{budget.free + idle} are free of a limit of {budget.limit}"
            + (f"; in use: {held}" if held else "")
            + "; release or evict sets, or start the broker with a larger --memory-limit",
            requested=nbytes,
            free=budget.free + idle,
            limit=budget.limit,
            device=device,
        )

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
        record = self._claimed_by(session, request.claim)
        if record.state is not State.WRITING:
            raise BadRequest(f"set {record.id} is {record.state.value}: there is nothing to seal")
        if record.key.checkpoint not in ("", request.checkpoint):
            raise BadRequest(f"set {record.id} was claimed as {record.key.checkpoint}")
        twin = self._resident_twin(record, request.checkpoint)
        if twin is not None:
            self._remember_files(twin, request.files)
            self._merge(record, twin)
            self._reply(ticket, self._sealed(twin, resident=True))
            return self._take()
        self._move(record, Trigger.SEAL)
        record.pending = ticket
        record.key = msgspec.structs.replace(record.key, checkpoint=request.checkpoint)
        self._remember_files(record, request.files)
        self._actions.append(FreezeSlab(record.id, record.key.device))
        return self._take()

    def slab_frozen(self, set_id: int) -> list[Action]:
        """The slab is immutable: everybody who waits gets a lease."""
        record = self.sets.get(set_id)
        if record is None or record.state is not State.SEALING:
            return self._take()
        twin = self._resident_twin(record, record.key.checkpoint)
        if twin is not None:
            # Two writers of the same bytes were sealing at once; the first one stays.
            self._answer_writer(record, self._sealed(twin, resident=True))
            self._merge(record, twin)
            return self._take()
        self._move(record, Trigger.FROZEN)
        record.used = next(self._clock)
        record.progress = None
        if record.key.name:
            self._join_line(record, record.key.name, None)
        self.counters["sets_sealed"] += 1
        if record.loaded_by_broker:
            self.counters["loads_finished"] += 1
        self._log(
            "set-sealed", set=record.id, checkpoint=record.key.checkpoint, nbytes=record.nbytes
        )
        self._answer_writer(record, self._sealed(record, resident=False))
        self._drop_claim(record)
        self._serve_waiters(record, record, "loaded", "shared")
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
        record.writer = None
        del self.sessions[session].claims[request.claim]
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
        if record.state is State.SEALING:
            # Everything was written and `seal` was asked for: the device's answer decides.
            self._move(record, Trigger.WRITER_LOST)
            record.writer = None
            record.pending = None
        else:
            record.writer = None
            self._fail(record, failure)

    def _resident_twin(self, record: WeightSet, checkpoint: str) -> WeightSet | None:
        """A resident set of the same content. The dtype follows from the content."""
        if not checkpoint:
            return None
        for other in self.sets.values():
            if (
                other is not record
                and other.state in RESIDENT
                and other.key.checkpoint == checkpoint
                and (other.key.device, other.key.format, other.key.layout)
                == (record.key.device, record.key.format, record.key.layout)
            ):
                return other
        return None

    def _merge(self, record: WeightSet, twin: WeightSet) -> None:
        """`record` turned out to hold what `twin` holds: serve its waiters there, drop it."""
        self.counters["loads_shared_by_content"] += 1
        self._log("same-content", set=record.id, resident=twin.id)
        for identity in list(record.identities):
            self._remember_files(twin, identity)
        self._drop_claim(record)
        self._serve_waiters(record, twin, "hashed", "hashed")
        self._end(record, Trigger.EVICT)

    def _fail(self, record: WeightSet, failure: Failure) -> None:
        """A set in progress ends: the next willing waiter writes it anew, else all are told why."""
        if record.writer is not None:
            self._answer_writer(record, failure.error)
        record.pending = None
        if record.loaded_by_broker:
            self.counters["loads_failed"] += 1
        self._log("set-failed", set=record.id, cause=failure.error.sentence)
        if record.loaded_by_broker and record.writer in self.sessions:
            self._actions.append(StopLoader(record.writer))
        self._drop_claim(record)
        heir = next((w for w in record.waiters.values() if w.willing), None)
        if heir is not None and failure.inheritable:
            self._inherit(record, heir)
            return
        waiters, record.waiters = record.waiters, {}
        self._end(record, Trigger.FAIL)
        for waiter in waiters.values():
            self._unwait(waiter)
        for waiter in waiters.values():
            if waiter.follows:
                self._retry(waiter)
            else:
                self._reply(waiter.ticket, failure.error)

    def _inherit(self, record: WeightSet, heir: Waiter) -> None:
        self._free(record)
        self._move(record, Trigger.INHERIT)
        del record.waiters[heir.ticket]
        self._unwait(heir)
        record.writer, record.claim = heir.session, heir.lease
        record.pending = record.progress = None
        self.sessions[heir.session].claims[heir.lease] = record.id
        self.counters["claims_inherited"] += 1
        self._log("claim-inherited", set=record.id, session=heir.session)
        self._reply(heir.ticket, wire.Claimed(heir.lease))

    def _sealed(self, record: WeightSet, *, resident: bool) -> wire.Sealed:
        label = generation_of(record, record.key.name)
        return wire.Sealed(record.id, record.key.checkpoint, label, resident)
