"""Asking for weights: `acquire`, `claim`, and the requests that wait."""

from __future__ import annotations

import msgspec

from broker import wire
from broker.custody.actions import (
    Action,
    StartLoader,
    Tell,
)
from broker.custody.ledger import Ledger
from broker.custody.matching import generation_of, mismatch
from broker.custody.records import (
    Waiter,
    WeightSet,
    content_of,
    line_of,
)
from broker.custody.states import IN_PROGRESS, RESIDENT, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    NotFound,
)
from broker.weights import WeightKey

LOADER_CLAIM = "load"
"""The claim's id in every loader's session."""


class Asking(Ledger):
    def acquire(self, session: int, ticket: int, request: wire.Acquire) -> list[Action]:
        """Grant a lease on a sealed set, wait for one in progress, or start its load.

        Raises:
            BadRequest: the lease's id is in use, the device is not served, or nothing is named.
            NotFound: no source, and nothing resident fits.
            Mismatch: it fits by name or files, but has not what is demanded.
        """
        self._check_lease(session, request.lease)
        self._check_device(request.demand.device)
        waiter = Waiter(ticket, session, request.lease, request.demand, request.source)
        if request.source is not None:
            self._acquire_checkpoint(waiter, request.source)
        else:
            self._acquire_resident(waiter)
        return self._take()

    def _acquire_checkpoint(self, waiter: Waiter, source: wire.Source) -> None:
        record = self._by_identity(waiter.demand.device, source)
        if record is not None:
            self._grant_or_wait(record, waiter)
            return
        similar = [
            other
            for other in self.sets.values()
            if other.key.device == waiter.demand.device
            and other.source is not None
            and other.source.fingerprint == source.fingerprint
        ]
        for other in similar:
            if other.state in IN_PROGRESS:
                waiter.follows = True
                self._wait(other, waiter)
                return
        self._start_load(waiter, source, hash_first=bool(similar))

    def _start_load(self, waiter: Waiter, source: wire.Source, *, hash_first: bool) -> None:
        key = WeightKey(device=waiter.demand.device)
        refusal = mismatch(waiter.demand, WeightSet(0, key))
        if refusal is not None:
            raise refusal
        loader = self.open_session()
        self.sessions[loader].is_loader = True
        record = self._new_set(key, loader, LOADER_CLAIM)
        record.loaded_by_broker = True
        record.source = source
        record.initiator = waiter.ticket
        self._remember_files(record, source.files)
        self._wait(record, waiter)
        self.counters["loads_started"] += 1
        self._log("load-started", set=record.id, session=loader, path=source.path)
        self._actions.append(
            StartLoader(record.id, loader, LOADER_CLAIM, waiter.ticket, source, hash_first)
        )

    def _acquire_resident(self, waiter: Waiter) -> None:
        demand = waiter.demand
        if demand.name is None and demand.checkpoint is None:
            raise BadRequest("acquire needs a checkpoint's source, its identity or a set's name")
        fitting = [record for record in self._newest_first() if self._is_meant(record, demand)]
        refusals = [mismatch(demand, record) for record in fitting]
        for record, refusal in zip(fitting, refusals, strict=True):
            if refusal is None:
                self._grant_or_wait(record, waiter)
                return
        for refusal in refusals:
            if refusal is not None:
                raise refusal
        raise self._not_found(demand)

    def _newest_first(self) -> list[WeightSet]:
        """Resident sets before those in progress, then the newest first."""
        return sorted(
            self.sets.values(), key=lambda record: (record.state not in RESIDENT, -record.id)
        )

    def _is_meant(self, record: WeightSet, demand: wire.Demand) -> bool:
        if record.key.device != demand.device:
            return False
        if demand.checkpoint is not None and demand.name is None:
            return record.key.checkpoint == demand.checkpoint
        if record.state in IN_PROGRESS:
            names = {waiter.demand.name for waiter in record.waiters.values()}
            return demand.name in names | {record.key.name}
        line = line_of(record.key, demand.name or "")
        if demand.generation is not None:
            return record.generations.get(line) == demand.generation
        return self._lines.get(line, [0])[-1] == record.id

    def _not_found(self, demand: wire.Demand) -> NotFound:
        names = sorted({name for record in self.sets.values() for name in record.names})
        wanted = repr(demand.name) if demand.name is not None else str(demand.checkpoint)
        if demand.generation is not None:
            wanted += f", generation {demand.generation!r},"
        known = f"resident names: {', '.join(names)}" if names else "no named set is resident"
        return NotFound(f"{wanted} is not resident on device {demand.device}; {known}", names=names)

    def claim(self, session: int, ticket: int, request: wire.Claim) -> list[Action]:
        """A lease if the set is sealed, else the right to write it, else wait for who has it.

        Raises:
            BadRequest: the lease's id is in use, the device is not served, or nothing is named.
        """
        if not request.key.name and not request.key.checkpoint:
            raise BadRequest("claim needs a name or a checkpoint's identity in its key")
        self._check_lease(session, request.lease)
        self._check_device(request.key.device)
        demand = wire.Demand(
            device=request.key.device,
            name=request.key.name or None,
            generation=request.generation,
        )
        waiter = Waiter(ticket, session, request.lease, demand, willing=request.willing)
        content = content_of(request.key)
        for record in self.sets.values():
            if content_of(record.key) == content:
                self._grant_or_wait(record, waiter)
                return self._take()
        self._new_set(request.key, session, request.lease)
        self._reply(ticket, wire.Claimed(request.lease))
        return self._take()

    def _grant_or_wait(self, record: WeightSet, waiter: Waiter) -> None:
        if record.state in RESIDENT:
            self._grant(record, waiter, "resident")
        else:
            self._wait(record, waiter)

    def _wait(self, record: WeightSet, waiter: Waiter) -> None:
        refusal = mismatch(waiter.demand, record)
        if refusal is not None:
            raise refusal
        self._move(record, Trigger.ASK)
        record.waiters[waiter.ticket] = waiter
        self.sessions[waiter.session].waiting[waiter.lease] = waiter.ticket
        if record.progress is not None and not waiter.follows:
            self._actions.append(Tell(waiter.ticket, record.progress))

    def _grant(self, record: WeightSet, waiter: Waiter, how: str) -> None:
        """The lease is on the books before its reply exists."""
        refusal = mismatch(waiter.demand, record)
        if refusal is not None:
            raise refusal
        self._move(record, Trigger.ASK)
        record.leases.add((waiter.session, waiter.lease))
        record.used = next(self._clock)
        self.sessions[waiter.session].leases[waiter.lease] = record.id
        self.counters["leases_granted"] += 1
        if waiter.demand.name:
            self._join_line(record, waiter.demand.name, waiter.demand.generation)
        self._reply(waiter.ticket, self._granted(record, waiter, how))
        self._log("lease-granted", session=waiter.session, set=record.id, how=how)

    def _granted(self, record: WeightSet, waiter: Waiter, how: str) -> wire.Granted:
        name = waiter.demand.name or record.key.name
        return wire.Granted(
            lease=waiter.lease,
            set=record.id,
            key=msgspec.structs.replace(record.key, name=name),
            generation=generation_of(record, name),
            nbytes=record.nbytes,
            tensors=record.tensors,
            how=how,
        )

    def _retry(self, waiter: Waiter) -> None:
        """A follower asks again: its bytes may be resident now, or it is its turn to load."""
        waiter.follows = False
        try:
            if waiter.source is not None:
                self._acquire_checkpoint(waiter, waiter.source)
        except BrokerError as error:
            self._reply(waiter.ticket, error)

    def _grant_or_refuse(self, record: WeightSet, waiter: Waiter, how: str) -> None:
        try:
            self._grant(record, waiter, how)
        except BrokerError as error:
            self._reply(waiter.ticket, error)

    def _serve_waiters(self, record: WeightSet, twin: WeightSet, first: str, others: str) -> None:
        waiters, record.waiters = record.waiters, {}
        for waiter in waiters.values():
            self._unwait(waiter)
        for waiter in waiters.values():
            how = first if waiter.ticket == record.initiator else others
            self._retry(waiter) if waiter.follows else self._grant_or_refuse(twin, waiter, how)
