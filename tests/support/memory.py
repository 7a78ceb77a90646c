"""How much memory something takes on its way, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def peak_of(call: Callable[[], Result]) -> tuple[Result, int]:
    """What a call returns, and by how many bytes this process was larger meanwhile, at most."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts again from here
    result = call()
    return result, _resident("VmHWM") - before


def _resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {what}")
