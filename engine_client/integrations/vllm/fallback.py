"""Fallbacks are allowed, never silent: each is a warning with its cause, and is counted."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from broker.errors import BrokerError

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def count_fallback(logger: logging.Logger, cause: BrokerError, instead: str) -> int:
    """Note that an engine loads without the broker, and warn.

    Args:
        instead: what it does now.

    Returns:
        How many fallbacks this process has had, this one included.
    """
    with _lock:
        _counts[type(cause).__name__] += 1
        number = _counts.total()
    logger.warning(
        "weight broker: fallback %d of this process (%s): %s; %s",
        number,
        type(cause).__name__,
        cause.sentence,
        instead,
    )
    return number


def fallback_counts() -> dict[str, int]:
    """How often this process fell back, by the name of the error that was the cause."""
    with _lock:
        return dict(_counts)
