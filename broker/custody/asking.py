"""Asking for weights: `acquire`, and the requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from broker import wire
from broker.custody.actions import (
    Action,
    KeepLease,
    StartLoader,
    Tell,
)
from broker.custody.ledger import Ledger
from broker.custody.matching import generation_of, mismatch, unloadable
from broker.custody.records import (
    KeptLease,
    Waiter,
    WeightSet,
    line_of,
)
from broker.custody.states import IN_PROGRESS, RESIDENT, Trigger
from broker.errors import (
    BadRequest,
    BrokerError,
    Mismatch,
    NotFound,
)
from broker.suggest import did_you_mean
from broker.weights import WeightKey

LOADER_CLAIM = "load"
"""The claim's id in every loader's session."""


class Asking(Ledger):
    def acquire(self, session: int, ticket: int, request: wire.Acquire) -> list[Action]:
        """Grant a lease on a sealed set, wait for one in progress, or start its load.

        Raises:
            BadRequest: the lease's id is in use, the device is not served, nothing is named, or a
                generation without its name.
            NotFound: no source, and nothing resident fits.
            Mismatch: it fits by name or files, but has not what is demanded.
        """
        waiter = Waiter(ticket, session, request.lease, request.demand, request.source)
        if not self._is_repeated(waiter):
            self._check_lease(session, request.lease)
            self._check_demand(request.demand)
            self._ask(waiter)
        return self._take()

    def _is_repeated(self, waiter: Waiter) -> bool:
        """Answer a request that an earlier server granted, if the engine may not know that.

        False for a request that says something else than the set has: it is not the same one.
        """
        session = self.sessions[waiter.session]
        if waiter.lease not in session.restored or waiter.lease not in session.leases:
            return False
        held = self.sets[session.leases[waiter.lease]]
        name, source = waiter.demand.name, waiter.source
        is_other = (
            mismatch(waiter.demand, held) is not None
            or (source is not None and source.identity not in held.identities)
            or (name is not None and generation_of(held, name) is None)
        )
        if not is_other:
            self._reply(waiter.ticket, self._granted(held, waiter, "resident"))
        return not is_other

    def _check_demand(self, demand: wire.Demand) -> None:
        if demand.device not in self.budgets:
            raise self._not_served(demand.device)
        if demand.generation is not None and not demand.name:
            raise BadRequest(
                f"generation {demand.generation!r} of what? A generation needs the name it is of"
            )

    def _ask(self, waiter: Waiter) -> None:
        if waiter.source is not None:
            self._acquire_checkpoint(waiter, waiter.source)
        else:
            self._acquire_resident(waiter)

    # --- by a checkpoint's files ----------------------------------------------------------

    def is_known(self, request: wire.Acquire) -> bool:
        """Whether these very files were loaded, or are being loaded: nothing would be started."""
        source = request.source
        return source is not None and self._by_identity(request.demand.device, source) is not None

    def _acquire_checkpoint(self, waiter: Waiter, source: wire.Source) -> None:
        record = self._by_identity(waiter.demand.device, source)
        if record is not None:
            self._grant_or_wait(record, waiter)
            return
        refusal = unloadable(waiter.demand)
        if refusal is not None:
            raise refusal
        similar = [
            other
            for other in self.sets.values()
            if other.key.device == waiter.demand.device
            and other.source is not None
            and other.source.fingerprint == source.fingerprint
            and other.source.conversion == source.conversion
        ]
        for other in similar:
            if other.state in IN_PROGRESS:
                self._follow(other, waiter)
                return
        self._start_load(waiter, source, hash_first=bool(similar))

    def _start_load(self, waiter: Waiter, source: wire.Source, *, hash_first: bool) -> None:
        self._check_may_write(waiter.session)
        loader = self._open_loader()
        record = self._new_set(WeightKey(device=waiter.demand.device), loader, LOADER_CLAIM)
        record.loaded_by_broker = True
        record.source = source
        record.initiator = waiter.ticket
        self._remember_files(record, source.identity)
        self._wait(record, waiter)
        self.counters["loads_started"] += 1
        self._log("load-started", set=record.id, session=loader, path=source.path)
        self._actions.append(
            StartLoader(record.id, loader, LOADER_CLAIM, waiter.ticket, source, hash_first)
        )

    def _open_loader(self) -> int:
        loader = self.open_session()
        self.sessions[loader].is_loader = True
        return loader

    # --- by name or identity --------------------------------------------------------------

    def _acquire_resident(self, waiter: Waiter) -> None:
        demand = waiter.demand
        if demand.set is not None:
            self._grant(self._very_set(demand.set), waiter, "resident")
            return
        if not demand.name and not demand.checkpoint:
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
        followed = self._followed_for(demand)
        if followed is None:
            raise self._not_found(demand)
        self._follow(followed, waiter)

    def _very_set(self, set_id: int) -> WeightSet:
        record = self.sets.get(set_id)
        if record is not None and record.state in RESIDENT:
            return record
        became = self._ended.get(set_id, "this broker has not held it for long, or never")
        raise NotFound(f"set {set_id} is not resident any more: {became}", set=set_id)

    def _newest_first(self) -> list[WeightSet]:
        """Resident sets before those in progress, then the newest first."""
        return sorted(
            self.sets.values(), key=lambda record: (record.state not in RESIDENT, -record.id)
        )

    def _is_meant(self, record: WeightSet, demand: wire.Demand) -> bool:
        if record.key.device != demand.device:
            return False
        if demand.checkpoint and not demand.name:
            return record.key.checkpoint == demand.checkpoint
        if record.state in IN_PROGRESS:
            names = {w.demand.name for w in record.waiters.values() if not w.follows}
            is_labelled = record.label is None or demand.generation in (None, record.label)
            return is_labelled and demand.name in names | {record.key.name}
        return self._is_generation(record, demand)

    def _is_generation(self, record: WeightSet, demand: wire.Demand) -> bool:
        """Is the resident set the demanded generation of its line, or the newest?"""
        line = line_of(record.key, demand.name or "")
        if demand.generation is not None:
            return record.generations.get(line) == demand.generation
        return self._lines.get(line, [0])[-1] == record.id

    def _followed_for(self, demand: wire.Demand) -> WeightSet | None:
        """The set in progress that a request for this name follows: its own may come next."""
        for record in self.sets.values():
            for waiter in record.waiters.values():
                named = waiter.follows and waiter.demand.name == demand.name
                if named and demand.name and record.key.device == demand.device:
                    return record
        return None

    def _not_found(self, demand: wire.Demand) -> NotFound:
        here = [record for record in self.sets.values() if record.key.device == demand.device]
        names = sorted({name for record in here for name in record.names})
        wanted = repr(demand.name) if demand.name else str(demand.checkpoint)
        if demand.generation is not None:
            wanted += f", generation {demand.generation!r},"
        known = f"resident names: {', '.join(names)}" if names else "no named set is resident"
        if demand.name in names:
            known = _known_generations(demand.name, here)
        elif near := did_you_mean(demand.name or "", names):
            known = f"{near} {known}"
        return NotFound(f"{wanted} is not resident on device {demand.device}; {known}", names=names)

    def _check_label(self, key: WeightKey, demand: wire.Demand) -> None:
        """Raise `Mismatch` if the demanded generation is another set already."""
        if demand.name is None or demand.generation is None:
            return
        other = self._labelled(line_of(key, demand.name), demand.generation)
        if other is None:
            return
        differing = {"checkpoint": {"wanted": key.checkpoint, "resident": other.key.checkpoint}}
        raise Mismatch(
            f"generation {demand.generation!r} of {demand.name!r} is set {other.id} already, with "
            f"other content ({other.key.checkpoint or 'no identity'}); give another label",
            differing=differing,
        )

    # --- granting and waiting -------------------------------------------------------------

    def _grant_or_wait(self, record: WeightSet, waiter: Waiter) -> None:
        if record.state in RESIDENT:
            self._grant(record, waiter, "resident")
        else:
            self._wait(record, waiter)

    def _follow(self, record: WeightSet, waiter: Waiter) -> None:
        waiter.follows = True
        self._wait(record, waiter)

    def _wait(self, record: WeightSet, waiter: Waiter) -> None:
        refusal = None if waiter.follows else mismatch(waiter.demand, record)
        if refusal is not None:
            raise refusal
        self._move(record, Trigger.ASK)
        record.waiters[waiter.ticket] = waiter
        self.sessions[waiter.session].waiting[waiter.lease] = waiter.ticket
        if record.progress is not None:
            self._actions.append(Tell(waiter.ticket, record.progress))

    def _grant(self, record: WeightSet, waiter: Waiter, how: str) -> None:
        """The lease is on the books before its reply exists."""
        demand = waiter.demand
        refusal = mismatch(demand, record)
        if refusal is not None:
            raise refusal
        if demand.name and generation_of(record, demand.name) is None:
            self._check_label(record.key, demand)
            self._check_may_name(line_of(record.key, demand.name), record)
        self._take_lease(record, waiter, how)
        self._name(record, waiter)
        self._reply(waiter.ticket, self._granted(record, waiter, how))

    def _take_lease(self, record: WeightSet, waiter: Waiter, how: str) -> None:
        self._move(record, Trigger.ASK)
        record.leases.add((waiter.session, waiter.lease))
        record.used = next(self._clock)
        if self._keeping:
            kept = KeptLease(waiter.session, waiter.lease, record.id)
            self._kept_leases.append(KeepLease(kept))
        self.sessions[waiter.session].leases[waiter.lease] = record.id
        self.counters["leases_granted"] += 1
        session, lease = waiter.session, waiter.lease
        self._log("lease-granted", session=session, set=record.id, lease=lease, how=how)

    def _name(self, record: WeightSet, waiter: Waiter) -> None:
        """A request that says which content it means makes it the newest of its name; one that
        only names it, or demands a generation, changes no order."""
        demand = waiter.demand
        says_content = waiter.source is not None or demand.checkpoint is not None
        if demand.set is not None:
            return
        if demand.name:
            newest = says_content and demand.generation is None
            self._join_line(record, demand.name, demand.generation, newest=newest)
        elif says_content and record.superseded:
            record.superseded = False
            self._touch(record)

    def _granted(self, record: WeightSet, waiter: Waiter, how: str) -> wire.Granted:
        key, name = record.key, waiter.demand.name or record.key.name
        return wire.Granted(
            lease=waiter.lease,
            set=record.id,
            key=key if key.name == name else msgspec.structs.replace(key, name=name),
            generation=generation_of(record, name),
            nbytes=record.nbytes,
            tensors=record.tensors,
            how=how,
        )

    def _or_refuse(self, waiter: Waiter, step: Callable[[], None]) -> None:
        """Take a step for a request that has waited: a refusal is its answer."""
        try:
            step()
        except BrokerError as error:
            self._reply(waiter.ticket, error)

    def _retry(self, waiters: list[Waiter]) -> None:
        """Followers ask again: their bytes may be resident now, or it is their turn to load."""
        for waiter in (w for w in waiters if w.follows):
            waiter.follows = False
            self._or_refuse(waiter, partial(self._ask, waiter))

    def _serve(self, record: WeightSet, waiters: list[Waiter], how: dict[int | None, str]) -> None:
        """Grant leases to those who waited; those who followed ask again, once all others have
        theirs.

        Args:
            how: by ticket how the set came about; for all others the entry None.
        """
        for waiter in (w for w in waiters if not w.follows):
            came_about = how.get(waiter.ticket, how[None])
            self._or_refuse(waiter, partial(self._grant, record, waiter, came_about))
        self._retry(waiters)


def _known_generations(name: str, records: list[WeightSet]) -> str:
    """The end of a sentence: which generations there are of a name, oldest first."""
    labels = dict.fromkeys(
        label for record in records for line, label in record.generations.items() if line[0] == name
    )
    verb = "generation is" if len(labels) == 1 else "generations are"
    return f"its {verb} {', '.join(labels)}"
