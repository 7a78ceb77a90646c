"""What commands print, for people."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

from broker.amounts import counted
from broker.logs import printable


def shown(text: str | None) -> str:
    """What an engine says of itself, without what would move the cursor of a terminal."""
    return printable(text or "") or "-"


def set_numbers(sets: Iterable[int]) -> str:
    return ", ".join(f"set {number}" for number in sets)


def warn_of_left_off(report: dict[str, Any]) -> None:
    """Say on standard error that a status had no room for all sets."""
    left = report["broker"]["left_off"]["sets"]
    if left:
        resident = counted(left, "more set is resident", "more sets are resident")
        print(f"weight-broker: {resident}, and not looked at", file=sys.stderr)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a plain table, columns two spaces apart."""
    from rich.cells import cell_len  # only who prints a table waits for rich

    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    padded = [
        [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        for row in (header, *rows)
    ]
    return ["  ".join(row).rstrip() for row in padded]


_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float | None, *, brief: bool = False) -> str:
    """Seconds as people read them, to two digits or so, `brief` to one unit; "-" if unknown."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    for (size, unit), (smaller, subunit) in itertools.pairwise(_UNITS):
        if whole >= size:
            rest = whole % size // smaller
            more = f" {rest} {subunit}" if rest and whole < 10 * size and not brief else ""
            return f"{whole // size} {unit}{more}"
    return f"{whole} s"
