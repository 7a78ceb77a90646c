"""The latest warnings and errors of the log, for `status`: what who is on call looks for first."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from broker.logs import LOGGER

OF_EACH = 4
"""Kept of each event, so that a flood of one drives out no other."""
SHOWN = 12
MAX_VALUE_CHARACTERS = 300
"""Of a fact; the log has more of it."""


class Troubles(logging.Handler):
    """Listens to the log from the moment it is made to `close`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._latest: dict[str, deque[dict[str, Any]]] = {}
        logging.getLogger(LOGGER).addHandler(self)

    def close(self) -> None:
        """Idempotent."""
        logging.getLogger(LOGGER).removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line of the log."""
        event = getattr(record, "event", None)
        if event is None:
            return
        facts = {key: _short(value) for key, value in getattr(record, "facts", {}).items()}
        kept = self._latest.setdefault(event, deque(maxlen=OF_EACH))
        kept.append({**facts, "time": record.created, "event": event})

    def latest(self) -> list[dict[str, Any]]:
        """The last ones, oldest first: `time` in seconds since 1970, `event`, and its facts."""
        every = [trouble for kept in self._latest.values() for trouble in kept]
        return sorted(every, key=lambda trouble: trouble["time"])[-SHOWN:]


def _short(value: object) -> Any:
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"
