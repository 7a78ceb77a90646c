"""Carrying out what the books have decided: answers, records, memory, loaders, the log.

Nothing here decides. What must outlive the server is recorded before anybody is told: records of
one turn go to the keeper together, and answers after them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from broker.custody.actions import (
    Action,
    CreateSlab,
    DropLease,
    FreeSlab,
    FreezeSlab,
    KeepLease,
    KeepSet,
    Log,
    Notify,
    Reply,
    StartLoader,
    StartShipped,
    StopLoader,
    Tell,
)
from broker.devices.base import StillMappedWritable
from broker.errors import BadRequest, BrokerError, InternalError
from broker.logs import log_allowed, may_log
from broker.metrics.measures import MEASURED

if TYPE_CHECKING:
    from broker.server import Server

FREEZE_SECONDS = 2.0
"""How long a slab waits for a writer that has said it is done to let go of its mapping."""
FREEZE_RETRY_SECONDS = 0.01
TELLING = (Reply, Tell, Notify)
"""Actions that somebody learns of."""


class Performing:
    """The server's hands. All methods belong to the loop's thread."""

    def __init__(self, broker: Server) -> None:
        self._broker = broker
        self._keeper = broker.keeper
        self._due: list[Action] = []
        self._sealed_by: dict[int, float] = {}
        """Of sets whose slab was created, in order: when their writers have stalled."""
        self._looks_for_stalled = False
        self._hands: dict[type[Action], Callable[[Any], None]] = {
            Reply: self._reply,
            Tell: self._tell,
            Notify: self._notify,
            Log: self._log,
            KeepLease: self._keep_lease,
            DropLease: self._drop_lease,
            KeepSet: self._keep_set,
            StartLoader: self._start_loader,
            StartShipped: self._start_loader,
            StopLoader: self._stop_loader,
            CreateSlab: self._create_slab,
            FreezeSlab: self._freeze_slab,
            FreeSlab: self._free_slab,
        }

    def perform(self, actions: list[Action]) -> None:
        """Carry out in order; what somebody learns of may wait for `tell_due`."""
        for action in actions:
            if (self._due or self._keeper.is_gathering) and isinstance(action, TELLING):
                self._due.append(action)
            elif self._keeper.is_behind:
                self._later(action)
            else:
                self._hands[type(action)](action)

    def tell_due(self) -> None:
        """Record what this turn has decided, in one packet, then tell whom it concerns."""
        if not self._due and not self._keeper.is_gathering:
            return
        self._keeper.flush()
        while self._due:  # who is told may have more to decide: a preload pins what it got
            due, self._due = self._due, []
            for action in due:
                if self._keeper.is_behind:
                    self._later(action)
                else:
                    self._hands[type(action)](action)
            self._keeper.flush()

    def _later(self, action: Action) -> None:
        """When everything said so far is recorded."""
        self._keeper.later(partial(self._hands[type(action)], action))

    # --- who is told ----------------------------------------------------------------------

    def _reply(self, action: Reply) -> None:
        self._broker.tickets.reply(action.ticket, action.body)

    def _tell(self, action: Tell) -> None:
        self._broker.tickets.tell(action.ticket, action.body)

    def _notify(self, action: Notify) -> None:
        self._broker.dispatcher.notify(action.session, action.event)

    # --- what a successor will know -------------------------------------------------------

    def _keep_lease(self, action: KeepLease) -> None:
        self._keeper.keep_lease(action.record)

    def _drop_lease(self, action: DropLease) -> None:
        self._keeper.drop_lease(action.session, action.lease)

    def _keep_set(self, action: KeepSet) -> None:
        kept = action.record
        kept = msgspec.structs.replace(kept, sealed=self._broker.times.sealed(kept.id))
        self._keeper.keep_set(kept, self._broker.store.for_reader(kept.id))

    # --- loaders and memory ---------------------------------------------------------------

    def _start_loader(self, action: StartLoader | StartShipped) -> None:
        self._broker.loading.start(action)

    def _stop_loader(self, action: StopLoader) -> None:
        self._broker.loading.stop(action.session)

    def _create_slab(self, action: CreateSlab) -> None:
        set_id, device, nbytes = action.set, action.device, action.nbytes
        self._await_seal(set_id, self._broker.config.limits.seal_seconds)
        manifest = self._broker.dispatcher.take_manifest(set_id)
        self._on_device(
            set_id,
            lambda: self._broker.store.create(set_id, device, nbytes, manifest),
            self._broker.books.slab_created,
        )

    def _await_seal(self, set_id: int, seconds: float) -> None:
        """One timer for all: most sets are sealed, or gone, long before their time is up."""
        self._sealed_by[set_id] = time.monotonic() + seconds
        if not self._looks_for_stalled:
            self._looks_for_stalled = True
            self._broker.loop.call_later(seconds, self._look_for_stalled)

    def _look_for_stalled(self) -> None:
        now = time.monotonic()
        while self._sealed_by:
            set_id, until = next(iter(self._sealed_by.items()))
            if until > now:
                self._broker.loop.call_later(until - now, self._look_for_stalled)
                return
            del self._sealed_by[set_id]
            self._broker.perform(self._broker.books.writer_stalled(set_id))
        self._looks_for_stalled = False

    def _freeze_slab(self, action: FreezeSlab) -> None:
        self._freeze(action.set, action.device, time.monotonic() + FREEZE_SECONDS)

    def _free_slab(self, action: FreeSlab) -> None:
        set_id = action.set
        self._sealed_by.pop(set_id, None)
        self._keeper.drop_set(set_id)
        self._broker.helpers.submit(("set", set_id), lambda: self._broker.store.free(set_id))

    def _freeze(self, set_id: int, device: str, until: float) -> None:
        """Again until the writer, which has said that it is done, has let go of its mapping. No
        thread waits for that: others have sets to be frozen too."""

        def freeze() -> None:
            try:
                self._broker.store.freeze(set_id, device)
            except StillMappedWritable as error:
                if time.monotonic() < until:
                    raise
                raise BadRequest(f"seal: {error}; unmap it before sealing") from error

        def again() -> None:
            self._broker.loop.call_later(
                FREEZE_RETRY_SECONDS, partial(self._freeze, set_id, device, until)
            )

        self._on_device(set_id, freeze, self._broker.books.slab_frozen, again)

    def _on_device(
        self,
        set_id: int,
        call: Callable[[], None],
        then: Callable[[int], list[Action]],
        again: Callable[[], None] | None = None,
    ) -> None:
        def done(result: Any) -> None:
            if again is not None and isinstance(result, StillMappedWritable):
                again()
            elif isinstance(result, BaseException):
                self._broker.perform(
                    self._broker.books.slab_failed(set_id, _as_broker_error(result))
                )
            else:
                self._broker.perform(then(set_id))

        self._broker.helpers.submit(("set", set_id), call, done)

    # --- the log --------------------------------------------------------------------------

    def _log(self, action: Log) -> None:
        """For people, for `status` and for metrics."""
        event, detail = action.event, action.detail
        self._broker.times.note(event, detail)
        if event in MEASURED:
            self._broker.measures.note(event, detail)
        if not may_log(event):
            return
        level = logging.WARNING if action.trouble else logging.INFO
        session = detail.get("session")
        peer = self._broker.peers.get(session) if isinstance(session, int) else None
        if peer is None:
            log_allowed(event, level=level, **detail)
            return
        identity = peer.identity
        whose = {"pid": identity.pid, "command": identity.command, "label": peer.label or None}
        log_allowed(event, level=level, **{**detail, **whose})


def _as_broker_error(error: BaseException) -> BrokerError:
    if isinstance(error, BrokerError):
        return error
    return InternalError(f"unexpected {type(error).__name__}: {error}")
