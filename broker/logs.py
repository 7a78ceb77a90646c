"""The log: one line an event, to standard error, as `event key=value …` (docs/reliability.md).

Values never contain tensor data or a session's token, and whatever a peer made up is quoted: nobody
can write lines of his own into the log.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass

_log = logging.getLogger("weight-broker")

BURST_LINES = 100
"""Lines of one event at once; a peer that causes more of them fills no disk."""
LINES_A_SECOND = 20.0
MAX_VALUE_CHARACTERS = 2000
_PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII but space, quote and equals sign


def log_to_stderr() -> None:
    """One line an event."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)


@dataclass
class _Bucket:
    """How many lines of an event may be written now."""

    filled: float
    lines: float = BURST_LINES
    suppressed: int = 0


clock = time.monotonic
_buckets: dict[str, _Bucket] = {}


def log_event(event: str, /, *, level: int = logging.INFO, **facts: object) -> None:
    """Write one line. `None` facts are left out. From the loop's thread.

    Past `BURST_LINES` at once, `LINES_A_SECOND` go through; the next that does says how many did
    not (`suppressed=`). Counters count them all. Handlers find both apart as `event` and `facts` of
    the record.
    """
    now = clock()
    bucket = _buckets.setdefault(event, _Bucket(now))
    bucket.lines = min(BURST_LINES, bucket.lines + (now - bucket.filled) * LINES_A_SECOND)
    bucket.filled = now
    if bucket.lines < 1:
        bucket.suppressed += 1
        return
    bucket.lines -= 1
    if bucket.suppressed:
        facts["suppressed"] = bucket.suppressed
        bucket.suppressed = 0
    known = {key: value for key, value in facts.items() if value is not None}
    _log.log(level, "%s", format_event(event, known), extra={"event": event, "facts": known})


def format_event(event: str, facts: dict[str, object]) -> str:
    """`event key=value …`; text that is not plain is a JSON string."""
    said = [f"{key}={_quoted(value)}" for key, value in facts.items() if value is not None]
    return " ".join([event, *said])


def _quoted(value: object) -> str:
    text = str(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
