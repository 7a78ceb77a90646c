"""Loads under way: which loader process works for which set, from its start to its end."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from broker import wire
from broker.custody.actions import Action, StartLoader, StartShipped
from broker.errors import BadRequest, Cancelled, InternalError, LoadFailed
from broker.loaders import (
    GRACE_SECONDS,
    IDLE_GRACE_SECONDS,
    UNWANTED,
    CheckpointWork,
    Ending,
    Job,
    LoaderProcess,
    ShippedWork,
    Spawned,
    spawn,
)
from broker.logs import log_event
from broker.packets import close_received

if TYPE_CHECKING:
    from broker.server import Server

NOT_WANTED = "was ended, because nobody wants its weights any more"
_NOBODY = "nobody wants it"
STOP_SECONDS = 2.0
"""How long killed loaders are waited for at the end."""


class _Queued(msgspec.Struct):
    """A load whose turn has not come. `given`: the descriptor it is about, owned."""

    action: StartLoader | StartShipped
    job: Job
    given: int | None

    def close(self) -> None:
        if self.given is not None:
            close_received(self.given)


class Loading:
    """All loader processes of a broker. All methods belong to the loop's thread."""

    def __init__(self, broker: Server) -> None:
        self._broker = broker
        self._processes: dict[int, LoaderProcess] = {}
        self._unwanted: set[int] = set()
        self._starting: set[int] = set()
        self._queue: deque[_Queued] = deque()

    @property
    def queued(self) -> int:
        """Loads that wait for another one's end."""
        return len(self._queue)

    def start(self, action: StartLoader | StartShipped) -> None:
        """Start the process that an action asks for, or have it wait for its turn.

        A failure is the answer of who waits. Nothing is started if the set is gone by now: that the
        action is carried out late, after the keeper was behind, is no fault.
        """
        if action.set not in self._broker.books.sets:
            gone = partial(self._broker.end_session, action.session, Cancelled(_NOBODY))
            self._broker.loop.call_soon_threadsafe(gone)  # the action is one of several
            return
        ticket = self._broker.tickets.get(action.ticket)
        try:
            given = None if ticket is None or ticket.source is None else os.dup(ticket.source)
        except OSError as error:  # no descriptor is left
            failed = partial(self._broker.end_session, action.session, _not_started(error))
            self._broker.loop.call_soon_threadsafe(failed)  # the action is one of several
            return
        self._queue.append(_Queued(action, self._job(action), given))
        self._start_next()
        if self._queue:
            self._tell_to_wait(action)

    def _tell_to_wait(self, action: StartLoader | StartShipped) -> None:
        limit = self._broker.config.limits.loaders
        log_event("load-queued", session=action.session, set=action.set, running=limit)
        self._broker.books.counters["loads_queued"] += 1
        report = wire.Report(action.claim, f"waiting for one of {limit} loaders to end", 0, 0)
        # Later: the action is one of several that are being carried out.
        self._broker.loop.call_soon_threadsafe(
            lambda: self._broker.perform(self._report(action.session, report))
        )

    def _report(self, session: int, report: wire.Report) -> list[Action]:
        if not any(queued.action.session == session for queued in self._queue):
            return []
        try:
            return self._broker.books.report(session, report)
        except BadRequest:
            return []  # its claim is over; the order to stop it follows

    def _start_next(self) -> None:
        limit = self._broker.config.limits.loaders
        while self._queue and len(self._processes) + len(self._starting) < limit:
            self._start(self._queue.popleft())

    def _start(self, queued: _Queued) -> None:
        action, given = queued.action, queued.given
        self._starting.add(action.session)

        def start() -> Spawned:
            if given is None:
                raise InternalError("what the loader is to read is not at hand any more")
            try:
                return spawn(queued.job, given)
            finally:
                close_received(given)

        self._broker.helpers.submit(
            ("loader", action.session), start, lambda result: self._started(action, result)
        )

    def stop(self, session: int) -> None:
        """End a loader whose set is not wanted any more, also one that is just starting."""
        if self._unqueue(session):
            return
        process = self._processes.get(session)
        if process is not None:
            process.stop(NOT_WANTED, UNWANTED)
        elif session in self._starting:
            self._unwanted.add(session)

    def _unqueue(self, session: int) -> bool:
        """Drop a load that waits for its turn; true if there was one."""
        for queued in self._queue:
            if queued.action.session == session:
                self._queue.remove(queued)
                queued.close()
                end = partial(self._broker.end_session, session, Cancelled(_NOBODY))
                self._broker.loop.call_soon_threadsafe(end)
                return True
        return False

    def closed_its_session(self, session: int) -> bool:
        """True for a loader's session: its exit status and last words follow, and say more."""
        process = self._processes.get(session)
        if process is None:
            return False
        is_waited_for = self._broker.books.sessions[session].claims
        process.end_soon(GRACE_SECONDS if is_waited_for else IDLE_GRACE_SECONDS)
        return True

    def close(self) -> None:
        """Kill all and wait for their end."""
        while self._queue:
            self._queue.popleft().close()
        for process in self._processes.values():
            process.stop(NOT_WANTED, UNWANTED)
        for process in list(self._processes.values()):
            process.join(STOP_SECONDS)

    def _job(self, action: StartLoader | StartShipped) -> Job:
        broker = self._broker
        device = broker.devices[broker.books.sets[action.set].key.device].properties
        work: CheckpointWork | ShippedWork
        if isinstance(action, StartLoader):
            work = CheckpointWork(action.source, action.hash_first)
        else:
            work = ShippedWork(action.description)
        return Job(
            claim=action.claim,
            socket=str(broker.paths.zmq),
            device=device.uuid,
            platform=device.platform,
            threads=broker.config.loader_threads,
            work=work,
        )

    def _started(self, action: StartLoader | StartShipped, result: Spawned | BaseException) -> None:
        session = action.session
        self._starting.discard(session)
        if isinstance(result, BaseException):
            self._broker.end_session(session, _not_started(result))
            self._start_next()
            return
        pid = result.process.pid
        process = LoaderProcess(self._broker.loop, session, result, self._on_end(session, pid))
        self._processes[session] = process
        log_event("loader-started", session=session, set=action.set, pid=pid)
        self._broker.welcome(session, result.connection, process.identity)
        if session in self._unwanted or self._broker.is_stopping:
            process.stop(NOT_WANTED, UNWANTED)
        elif isinstance(action, StartShipped):
            limit = f"did not finish within {action.seconds:g} s and was ended"
            self._broker.loop.call_later(action.seconds, lambda: process.stop(limit))

    def last_words(self, session: int) -> str:
        """The end of what the loader of this session has printed; "" if it is no loader's."""
        process = self._processes.get(session)
        return "" if process is None else process.last_words()

    def _on_end(self, session: int, pid: int) -> Callable[[Ending], None]:
        def ended(ending: Ending) -> None:
            self._processes.pop(session, None)
            self._unwanted.discard(session)
            self._ended(session, pid, ending)

        return ended

    def _ended(self, session: int, pid: int, ending: Ending) -> None:
        is_missed = bool(self._broker.books.sessions[session].claims)
        said = "its work is done" if ending.in_order else f"the loader process {ending}"
        if is_missed:
            self._broker.books.counters["loaders_died"] += 1
            said = f"the loader process died before the weights were complete: it {ending}"
        in_order = ending.in_order and not is_missed
        how = "finished" if in_order else ending
        level = logging.INFO if in_order else logging.WARNING
        log_event("loader-ended", level=level, session=session, pid=pid, how=how)
        cause = LoadFailed(said, reason=ending.reason, last_words=ending.last_words)
        self._broker.end_session(session, cause, closed=in_order)
        self._start_next()


def _not_started(cause: BaseException) -> LoadFailed:
    return LoadFailed(f"the loader could not be started: {cause}", reason="loader-died")
