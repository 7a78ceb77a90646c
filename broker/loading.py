"""Loads under way: which loader process works for which set, from its start to its end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.custody.actions import StartLoader, StartShipped
from broker.errors import InternalError, LoadFailed
from broker.loaders import (
    GRACE_SECONDS,
    IDLE_GRACE_SECONDS,
    CheckpointWork,
    Ending,
    Job,
    LoaderProcess,
    ShippedWork,
    Spawned,
    spawn,
)

if TYPE_CHECKING:
    from broker.server import Server

log = logging.getLogger("weight-broker")

STOP_SECONDS = 2.0
"""How long killed loaders are waited for at the end."""


class Loading:
    """All loader processes of a broker. All methods belong to the loop's thread."""

    def __init__(self, broker: Server) -> None:
        self._broker = broker
        self._processes: dict[int, LoaderProcess] = {}
        self._unwanted: set[int] = set()

    def start(self, action: StartLoader | StartShipped) -> None:
        """Start the process that an action asks for; a failure is the answer of who waits."""
        ticket = self._broker.tickets.get(action.ticket)
        given = None if ticket is None or ticket.source is None else os.dup(ticket.source)
        job = self._job(action)

        def start() -> Spawned:
            if given is None:
                raise InternalError("what the loader is to read is not at hand any more")
            try:
                return spawn(job, given)
            finally:
                os.close(given)

        self._broker.helpers.submit(
            ("loader", action.session), start, lambda result: self._started(action, result)
        )

    def stop(self, session: int) -> None:
        """End a loader whose set is not wanted any more, also one that is just starting."""
        self._unwanted.add(session)
        process = self._processes.get(session)
        if process is not None:
            process.stop()

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
        for process in self._processes.values():
            process.stop()
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
        if isinstance(result, BaseException):
            error = LoadFailed(f"the loader could not be started: {result}", reason="loader-died")
            self._broker.end_session(session, error)
            return
        process = LoaderProcess(self._broker.loop, result, self._on_end(session))
        self._processes[session] = process
        pid = process.identity.pid
        log.info("loader-started session=%d set=%d pid=%d", session, action.set, pid)
        self._broker.welcome(session, result.connection, process.identity)
        if session in self._unwanted or self._broker.is_stopping:
            process.stop()
        elif isinstance(action, StartShipped):
            limit = f"did not finish within {action.seconds:g} s and was ended"
            self._broker.loop.call_later(action.seconds, lambda: process.stop(limit))

    def last_words(self, session: int) -> str:
        """The end of what the loader of this session has printed; "" if it is no loader's."""
        process = self._processes.get(session)
        return "" if process is None else process.last_words()

    def _on_end(self, session: int) -> Callable[[Ending], None]:
        def ended(ending: Ending) -> None:
            self._processes.pop(session, None)
            self._unwanted.discard(session)
            log.info("loader-ended session=%d how=%r", session, str(ending))
            said = f"the loader process {ending}"
            if self._broker.books.sessions[session].claims:
                said = f"the loader process died before the weights were complete: it {ending}"
            cause = LoadFailed(said, reason=ending.reason, last_words=ending.last_words)
            self._broker.end_session(session, cause)

        return ended
