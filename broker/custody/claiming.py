"""Claims and shipped loaders: weights that come from engines' own code."""

from __future__ import annotations

from broker import wire
from broker.custody.actions import Action, StartShipped
from broker.custody.asking import LOADER_CLAIM, Asking
from broker.custody.records import Line, Waiter, WeightSet, is_variant, line_of
from broker.custody.states import IN_PROGRESS, RESIDENT
from broker.errors import BadRequest, Busy
from broker.weights import WeightKey


class Claiming(Asking):
    def claim(self, session: int, ticket: int, request: wire.Claim) -> list[Action]:
        """A lease if the set is sealed, else the right to write it, else wait for who has it.

        A key with a checkpoint means that content, whatever its name; one without means the newest
        generation of the name, or the generation that the request demands.

        Raises:
            BadRequest: as for `acquire`.
            Mismatch: that content is there under another generation of the name.
        """
        key = request.key
        if not key.name and not key.checkpoint:
            raise BadRequest("claim needs a name or a checkpoint's identity in its key")
        demand = _demand_of(key, request.generation)
        waiter = Waiter(ticket, session, request.lease, demand, key=key, willing=request.willing)
        if self._is_repeated(waiter):
            return self._take()
        if self._is_claimed_already(session, request):
            self._reply(ticket, wire.Claimed(request.lease))
            return self._take()
        self._check_lease(session, request.lease)
        self._check_demand(demand)
        if request.fresh:
            self._check_fresh(key, demand)
            self._give_claim(session, ticket, request)
            return self._take()
        for record in self._newest_first():
            if self._is_claimed(record, key, demand):
                self._grant_or_wait(record, waiter)
                return self._take()
        self._check_label(key, demand)
        self._give_claim(session, ticket, request)
        return self._take()

    def _is_claimed_already(self, session: int, request: wire.Claim) -> bool:
        """Whether this very request was answered, and the engine may not know it."""
        record = self.sessions[session]
        if request.lease not in record.restored or request.lease not in record.claims:
            return False
        return self.sets[record.claims[request.lease]].asked == request.key

    def _give_claim(self, session: int, ticket: int, request: wire.Claim) -> None:
        self._check_may_write(session)
        if request.key.name:
            self._check_may_name(line_of(request.key, request.key.name))
        record = self._new_set(request.key, session, request.lease)
        record.label = request.generation
        name = request.key.name or None
        self._log("claim-granted", set=record.id, session=session, name=name)
        self._reply(ticket, wire.Claimed(request.lease))

    def _check_fresh(self, key: WeightKey, demand: wire.Demand) -> None:
        """Raise `Busy` if another writes this line now, or has sealed the generation."""
        if not key.name:
            return  # no line to be a generation of; equal content shows at `seal`
        line = line_of(key, key.name)
        for record in self.sets.values():
            if record.state in IN_PROGRESS and line_of(record.asked, record.asked.name) == line:
                raise Busy(
                    f"{self._who(record.writer)} is writing a generation of {key.name!r} now; wait "
                    "for it, or publish under another name",
                    set=record.id,
                )
        self._check_label_is_free(line, demand.generation)

    def _check_label_is_free(self, line: Line, label: str | None) -> None:
        """Raise `Busy` if the line has a generation of this label."""
        labelled = None if label is None else self._labelled(line, label)
        if labelled is not None:
            raise Busy(
                f"generation {label!r} of {line[0]!r} is resident already, as set {labelled.id}; "
                "acquire it, or give another label",
                set=labelled.id,
            )

    def load(self, session: int, ticket: int, request: wire.Load) -> list[Action]:
        """A lease if the set is sealed, wait for one in progress, else run the engine's code.

        Raises:
            BadRequest: as for `claim`.
        """
        key = request.key
        if not key.name and not key.checkpoint:
            raise BadRequest("load needs a name or a checkpoint's identity in its key")
        waiter = Waiter(ticket, session, request.lease, _demand_of(key, None))
        if self._is_repeated(waiter):
            return self._take()
        self._check_lease(session, request.lease)
        self._check_demand(waiter.demand)
        for record in self._newest_first():
            if self._is_claimed(record, key, waiter.demand):
                self._grant_or_wait(record, waiter)
                return self._take()
        self._start_shipped(waiter, request)
        return self._take()

    def _start_shipped(self, waiter: Waiter, request: wire.Load) -> None:
        self._check_may_write(waiter.session)
        loader = self._open_loader()
        record = self._new_set(request.key, loader, LOADER_CLAIM)
        record.initiator = waiter.ticket
        self._wait(record, waiter)
        self.counters["loads_started"] += 1
        self._log("load-started", set=record.id, session=loader, code=request.description)
        self._actions.append(
            StartShipped(
                record.id,
                loader,
                LOADER_CLAIM,
                waiter.ticket,
                request.key.device,
                request.description,
                request.seconds,
            )
        )

    def _is_claimed(self, record: WeightSet, key: WeightKey, demand: wire.Demand) -> bool:
        """Would writing `key` make a second copy of this set?"""
        if not (is_variant(key, record.key) or is_variant(key, record.asked)):
            return False
        if key.checkpoint:
            return key.checkpoint in (record.key.checkpoint, record.asked.checkpoint)
        if record.state in RESIDENT:
            return self._is_generation(record, demand)
        is_labelled = demand.generation in (None, record.label)
        return is_labelled and self._is_meant(record, demand)


def _demand_of(key: WeightKey, generation: str | None) -> wire.Demand:
    """What must hold for a set that answers a claim of this key; what the key leaves open may be.

    Layout, format and quantisation have been compared already.
    """
    return wire.Demand(
        device=key.device,
        name=key.name or None,
        checkpoint=key.checkpoint or None,
        dtype=key.dtype or None,
        generation=generation,
    )
