"""The log: one line an event, to standard error (docs/reliability.md).

For people `time LEVEL event key=value …`, for programs a JSON object with the same fields. Values
never contain tensor data or a session's token, and whatever a peer made up is quoted: nobody can
write lines of his own into the log.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from types import TracebackType
from typing import TypeAlias

from broker.errors import BrokerError

LOGGER = "weight-broker"
_log = logging.getLogger(LOGGER)
_STDERR = 2

LOG_FORMATS = ("text", "json")

ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

BURST_LINES = 100
"""Lines of one event at once; a peer that causes more of them fills no disk."""
LINES_A_SECOND = 20.0
MAX_VALUE_CHARACTERS = 2000
_PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII but space, quote and equals sign


def log_to_stderr(log_format: str = LOG_FORMATS[0]) -> None:
    """One line an event, in one of `LOG_FORMATS`. For the process's start."""
    handler = _StandardError()
    handler.setFormatter(_FORMATTERS[log_format]())
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)


def say_refusal(error: BrokerError, log_format: str) -> None:
    """Why a broker does not start: the sentence, or for programs an event."""
    if log_format == LOG_FORMATS[0]:
        print(shown_sentence(error), file=sys.stderr)
    else:
        cause, status = error.sentence, error.status
        log_event("not-started", level=logging.ERROR, status=status, cause=cause)


def shown_sentence(error: BrokerError) -> str:
    """An error's sentence that says who speaks."""
    sentence = printable(error.sentence)
    prefixed = sentence.startswith("[weight-broker:")
    return sentence if prefixed else f"weight-broker: {sentence}"


def printable(text: str) -> str:
    """Text of anybody's without what would move the cursor of a terminal, or begin a line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As `sys.excepthook`: the process ends because of a mistake of ours."""
    log_event("crashed", level=logging.ERROR, exc_info=(kind, error, trace), cause=repr(error))


class _StandardError(logging.Handler):
    """Never waits for who reads it: lines that find no room are left out, and then counted."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0
        self._is_torn = False
        self._poller = select.poll()
        self._poller.register(_STDERR, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line if there is room."""
        try:
            line = self.format(record) + "\n"
            if self._lost:
                line = self._gap() + line
            if self._write(line):
                self._lost = 0
            else:
                self._lost += 1
        except Exception:  # noqa: BLE001 - as logging's own handlers do
            self.handleError(record)

    def _gap(self) -> str:
        facts: dict[str, object] = {"lost": self._lost, "cause": "standard error was not read"}
        text = format_event("log-gap", facts)
        record = logging.LogRecord(LOGGER, logging.WARNING, "", 0, text, None, None)
        record.__dict__.update(event="log-gap", facts=facts)
        return self.format(record) + "\n"

    def _write(self, text: str) -> bool:
        """False if not all of it was written."""
        data = ("\n" if self._is_torn else "").encode() + text.encode("utf-8", "backslashreplace")
        for at in range(0, len(data), select.PIPE_BUF):
            # A pipe that takes anything takes so much at once (pipe(7)); so do the others.
            if not self._poller.poll(0):
                self._is_torn = self._is_torn or at > 0
                return False
            try:
                os.write(_STDERR, data[at : at + select.PIPE_BUF])
            except OSError:
                return False  # nobody will ever read it
        self._is_torn = False
        return True


class _TextFormatter(logging.Formatter):
    """A line for a person. A traceback, which few lines have, follows it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")


class _JsonFormatter(logging.Formatter):
    """One object a line, `time` in UTC and `level` ahead of the event and its facts."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        event = getattr(record, "event", None)
        facts = getattr(record, "facts", {})
        line["event"] = "message" if event is None else event
        if event is None:
            line["text"] = _cut(record.getMessage())
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # No fact may pass for the time or the event.
        said = {key: _plain(value) for key, value in facts.items()}
        return json.dumps({**line, **said, **line})


def _plain(value: object) -> object:
    """A number as it is, whatever else as text."""
    is_number = isinstance(value, bool | int | float)
    return value if is_number else _cut(str(value))


def _cut(text: str) -> str:
    is_long = len(text) > MAX_VALUE_CHARACTERS
    return text[:MAX_VALUE_CHARACTERS] + "…" if is_long else text


_FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {
    "text": _TextFormatter,
    "json": _JsonFormatter,
}


class _Bucket:
    """How many lines of an event may be written now."""

    def __init__(self, now: float) -> None:
        self.filled = now
        self.lines: float = BURST_LINES
        self.suppressed = 0


clock = time.monotonic
_buckets: dict[str, _Bucket] = {}


def log_event(
    event: str,
    /,
    *,
    level: int = logging.INFO,
    exc_info: ExceptionInfo | None = None,
    **facts: object,
) -> None:
    """Write one line, if `may_log`. `None` facts are left out. From the loop's thread.

    Handlers find event and facts apart as `event` and `facts` of the record.
    """
    if may_log(event):
        log_allowed(event, level=level, exc_info=exc_info, **facts)


def may_log(event: str) -> bool:
    """Whether a line of this event may be written now; to be asked once for each.

    Past `BURST_LINES` at once, `LINES_A_SECOND` go through; the next that does says how many did
    not (`suppressed=`). Counters count them all.
    """
    now = clock()
    bucket = _buckets.get(event)
    if bucket is None:
        bucket = _buckets[event] = _Bucket(now)
    bucket.lines = min(BURST_LINES, bucket.lines + (now - bucket.filled) * LINES_A_SECOND)
    bucket.filled = now
    if bucket.lines < 1:
        bucket.suppressed += 1
        return False
    bucket.lines -= 1
    return True


def log_allowed(
    event: str,
    /,
    *,
    level: int = logging.INFO,
    exc_info: ExceptionInfo | None = None,
    **facts: object,
) -> None:
    """As `log_event`, after `may_log` has said yes: for who gathers the facts only then."""
    bucket = _buckets[event]
    if bucket.suppressed:
        facts["suppressed"] = bucket.suppressed
        bucket.suppressed = 0
    known = {key: value for key, value in facts.items() if value is not None}
    extra = {"event": event, "facts": known}
    _log.log(level, "%s", format_event(event, known), exc_info=exc_info, extra=extra)


def format_event(event: str, facts: dict[str, object]) -> str:
    """`event key=value …`; text that is not plain is a JSON string."""
    said = [f"{key}={_quoted(value)}" for key, value in facts.items() if value is not None]
    return " ".join([event, *said])


def _quoted(value: object) -> str:
    text = _cut(str(value))
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
