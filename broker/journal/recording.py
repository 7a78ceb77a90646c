"""Which events go into the journal, and how they get there without holding anybody up."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Protocol

from broker.journal.file import JournalFile, journal_path
from broker.logs import log_event
from broker.rundir import BrokerPaths

KEPT = frozenset(
    {
        # the broker itself
        "serving",
        "taken-over",
        "handing-over",
        "stopping",
        "stopped",
        "crashed",
        "internal-error",
        "keeper-link-failed",
        "server-died",
        "server-killed",
        "server-not-started",
        "server-replaced",
        "keeper-gone",
        "keeper-lost-a-record",
        "sockets-mended",
        "sockets-missing",
        # weights
        "claim-granted",
        "claim-inherited",
        "load-started",
        "load-queued",
        "loader-started",
        "loader-ended",
        "preloaded",
        "preload-failed",
        "same-content",
        "set-named",
        "set-pinned",
        "set-unpinned",
        "set-sealed",
        "set-failed",
        "set-superseded",
        "set-evicted",
        "set-freed",
        "writer-stalled",
        # engines
        "session-opened",
        "session-ended",
        "session-refused",
        "lease-granted",
        "lease-ended",
        "conversation-lost",
        "connection-cut",
    }
)
"""What changes who holds what, and who is there. Refused requests and dropped notices are not kept:
a peer that causes thousands of them must not push out everything else."""

MAX_VALUE_CHARACTERS = 300
"""Of a fact; the log has more of it."""
MAX_QUEUED = 4096
"""Lines that wait for a disk that is slow; further ones are lost, and counted in the next."""
CLOSE_SECONDS = 2.0
"""How long a server that ends waits for such a disk."""

LOGGER = "weight-broker"
_END = b""


class Writer(Protocol):
    """Where lines go. Both calls are quick, whatever the disk does."""

    def put(self, line: bytes) -> None: ...

    def close(self) -> None: ...


class Journal(logging.Handler):
    """Writes down each event of the log that is kept, from the moment it is made to `close`.

    Belongs to the thread that logs.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__(logging.INFO)
        self._writer = writer
        logging.getLogger(LOGGER).addHandler(self)

    def close(self) -> None:
        """Keep nothing any more; everything so far is written. Idempotent."""
        logging.getLogger(LOGGER).removeHandler(self)
        self._writer.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line of the log."""
        event = getattr(record, "event", "")
        if event in KEPT:
            self.note(event, getattr(record, "facts", {}), record.created)

    def note(self, event: str, facts: Mapping[str, object], when: float | None = None) -> None:
        """Write down something that need not be in the log."""
        self._writer.put(line_of(event, facts, time.time() if when is None else when))


def line_of(event: str, facts: Mapping[str, object], when: float) -> bytes:
    """An event as one line; no fact can pass for its time or its name."""
    moment = datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
    known = {"time": moment.replace("+00:00", "Z"), "event": event}
    said = {key: _plain(value) for key, value in facts.items() if value is not None}
    return json.dumps({**known, **said, **known}).encode() + b"\n"


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float) else str(value)[:MAX_VALUE_CHARACTERS]


class CarefulFile:
    """A journal's file for which failures are no reason to stop: the first is told in the log."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._complaint = ""
        self._is_torn = False

    def put(self, line: bytes) -> None:
        """Add a line if that is possible."""
        try:
            # Behind half a line, which a full disk may have left, a new one begins.
            self._file.append(b"\n" + line if self._is_torn else line)
        except OSError as error:
            self._is_torn = True
            self._complain(str(error))
        else:
            self._is_torn = False
            self._complaint = ""

    def close(self) -> None:
        """Nothing waits here."""

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            log_event("journal-failed", level=logging.WARNING, cause=complaint)


class Nowhere:
    """For a broker that keeps no journal."""

    def put(self, line: bytes) -> None:
        """Not kept."""

    def close(self) -> None:
        """Nothing waits here."""


class WritingThread:
    """Appends what it is given, in order, in a thread of its own: a disk may be slow, or hang."""

    def __init__(self, file: CarefulFile) -> None:
        self._file = file
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="broker-journal", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Hand over a line; never waits."""
        if self._lines.qsize() >= MAX_QUEUED:
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._lines.put(line_of("journal-gap", {"lost": lost}, time.time()))
        self._lines.put(line)

    def close(self) -> None:
        """Write what is left, unless that takes too long. Idempotent."""
        self._lines.put(_END)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) != _END:
            self._file.put(line)


def keeper_journal(paths: BrokerPaths, limit: int) -> Journal:
    """For the keeper's few lines, which are written as they come: it has no other thread.

    Args:
        limit: bytes that the files may have together; 0: keep no journal.
    """
    file = JournalFile(journal_path(paths), limit, turns=False)
    return Journal(CarefulFile(file) if limit else Nowhere())


def server_journal(paths: BrokerPaths, limit: int) -> Journal:
    """For a server, which must not wait for a disk; as `keeper_journal`."""
    file = JournalFile(journal_path(paths), limit, turns=True)
    return Journal(WritingThread(CarefulFile(file)) if limit else Nowhere())
