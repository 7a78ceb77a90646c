"""One unit of time for every test, and waiting for a condition instead of sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SCALE = float(os.environ.get("WEIGHT_BROKER_TEST_SCALE", "1"))
"""Raise it on a slow machine: every limit of every test grows with it."""

_POLL_SECONDS = 0.01


def eventually(condition: Callable[[], T], seconds: float, what: str) -> T:
    """The first truthy result of `condition`, or a failure naming what did not happen."""
    limit = time.monotonic() + seconds * SCALE
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > limit:
            raise AssertionError(f"within {seconds * SCALE} s: {what} did not happen ({result!r})")
        time.sleep(_POLL_SECONDS)
