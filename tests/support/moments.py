"""A handler that comes in the middle of a call, as those of signals do: between any two lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import engine_client

_CODE = str(Path(engine_client.__file__).parent)


def at_line(number: int, handler: Callable[[], None], call: Callable[[], object]) -> bool:
    """Make a call in this thread, and run a handler before the n-th line of the client's own code.

    Returns whether the call has so many lines. What the handler raises, the call raises.
    """
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(_CODE):
            return None
        if event == "line" and seen <= number:
            seen += 1
            if seen > number:
                sys.settrace(None)
                handler()
        return trace if seen <= number else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen > number
