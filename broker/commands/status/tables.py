"""What the tables of `status` show. Pure: a report in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.amounts import counted, human
from broker.commands.text import duration, shown

BAR_CELLS = 16


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        right: numbers are set to the right.
        least: how narrow it may be made; None: as wide as its widest cell.
        rank: columns of the highest rank are left away first where there is no room; 0: never.
    """

    name: str
    right: bool = False
    least: int | None = None
    rank: int = 0


@dataclass(frozen=True)
class Table:
    """Columns, and a cell of text for each in every row."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


SET_COLUMNS = (
    Column("SET", right=True),
    Column("STATE"),
    Column("NAME", least=12),
    Column("SIZE", right=True),
    Column("TENSORS", right=True, rank=7),
    Column("ENGINES", right=True),
    Column("AGE", right=True, rank=3),
    Column("USED", right=True, rank=4),
    Column("DTYPE", rank=6),
    Column("DEVICE", rank=2),
    Column("HELD BY", least=12, rank=1),
    Column("FROM", least=16, rank=5),
)
SESSION_COLUMNS = (
    Column("SESSION", right=True),
    Column("PID", right=True),
    Column("UID", right=True, rank=4),
    Column("COMMAND", least=8),
    Column("LABEL", least=8, rank=1),
    Column("SETS", least=4),
    Column("WAITS", right=True),
    Column("REQUESTS", right=True, rank=3),
    Column("LAG", right=True),
    Column("AGE", right=True, rank=2),
)
PROGRESS_COLUMNS = (
    Column("SET", right=True),
    Column("STAGE", least=8),
    Column("PROGRESS"),
    Column("DONE", right=True, rank=3),
    Column("RATE", right=True),
    Column("LEFT", right=True),
    Column("WAITING", right=True),
    Column("QUIET", right=True),
    Column("WRITER", least=16, rank=2),
    Column("WHAT", least=10, rank=1),
)


def set_table(report: dict[str, Any]) -> Table:
    """What is resident, and who holds it."""
    rows = [_set_row(entry, report) for entry in report["sets"] if not entry["progress"]]
    return Table("resident", SET_COLUMNS, rows)


def _set_row(entry: dict[str, Any], report: dict[str, Any]) -> list[str]:
    now, people = report["broker"]["now"], who_is_who(report)
    has_several = len(report["devices"]) > 1
    engines = len(entry["leases"]) + entry["leases_left_off"]
    return [
        str(entry["id"]),
        entry["state"] + (", pinned" if entry["pinned"] else ""),
        names_of(entry),
        human(entry["nbytes"]),
        str(entry["tensors"]),
        str(engines),
        since(entry["sealed"], now, brief=True),
        since(entry["used"], now, brief=True),
        entry["key"]["dtype"] or "-",
        entry["key"]["device"] if has_several else "-",
        holders(entry, people),
        shown(entry["path"]),
    ]


def progress_table(report: dict[str, Any]) -> Table:
    """What is being loaded or published."""
    people = who_is_who(report)
    rows = [_progress_row(entry, people) for entry in report["sets"] if entry["progress"]]
    return Table("in progress", PROGRESS_COLUMNS, rows)


def _progress_row(entry: dict[str, Any], people: dict[int, str]) -> list[str]:
    progress = entry["progress"]
    done, total, rate = progress["done"], progress["total"], progress["rate"]
    share = done / total if total else 0.0
    return [
        str(entry["id"]),
        shown(progress["stage"]) if progress["stage"] else entry["state"],
        f"{bar(share)} {share:4.0%}" if total else "-",
        f"{human(done)} of {human(total)}" if total else "-",
        "-" if rate is None else f"{human(int(rate))}/s",
        duration(progress["seconds_left"]),
        str(entry["waiting"]),
        duration(progress["quiet_seconds"]),
        people.get(entry["writer"], "-"),
        shown(entry["path"]) if entry["path"] else names_of(entry),
    ]


def session_table(report: dict[str, Any], own: int | None = None) -> Table:
    """Who is connected, apart from the session `own`, which asks."""
    held: dict[int, list[str]] = {}
    for entry in report["sets"]:
        for lease in entry["leases"]:
            held.setdefault(lease["session"], []).append(str(entry["id"]))
    rows = [
        _session_row(entry, held.get(entry["id"], []), report["broker"]["now"])
        for entry in report["sessions"]
        if entry["id"] != own
    ]
    return Table("sessions", SESSION_COLUMNS, rows)


def _session_row(entry: dict[str, Any], held: list[str], now: float) -> list[str]:
    others = entry["leases"] - len(held)
    sets = [*held, *([f"{others} more"] if others > 0 and held else [])]
    waits = "-"
    if entry["waiting"]:
        waits = f"{entry['waiting']} for {duration(entry['waiting_seconds'])}"
    return [
        str(entry["id"]),
        str(entry["pid"] or "-"),
        str(entry["uid"]),
        shown(entry["command"]),
        "loader" if entry["loader"] else shown(entry["label"]),
        ", ".join(sets) or (str(others) if others else "-"),
        waits,
        str(entry["requests"]),
        duration(entry["lag_seconds"]) if entry["lag_seconds"] else "-",
        since(entry["since"], now, brief=True),
    ]


# --- parts of rows ------------------------------------------------------------------------------


def who_is_who(report: dict[str, Any]) -> dict[int, str]:
    """The process behind each session: "vllm (pid 12)"."""
    return {entry["id"]: person(entry) for entry in report["sessions"]}


def person(entry: dict[str, Any]) -> str:
    """A session's process: "vllm (pid 12)"."""
    name = "loader" if entry["loader"] else shown(entry["label"] or entry["command"])
    return f"{name} (pid {entry['pid']})"


def holders(entry: dict[str, Any], people: dict[int, str]) -> str:
    """Who leases a set."""
    sessions = dict.fromkeys(lease["session"] for lease in entry["leases"])
    named = [people.get(session, f"session {session}") for session in sessions]
    more = entry["leases_left_off"]
    return ", ".join([*named, *([counted(more, "more lease")] if more else [])]) or "-"


def names_of(entry: dict[str, Any]) -> str:
    """A set's names with the generation that it is of each; of one in progress, its future name."""
    names = [f"{name}#{label}" for name, label in entry["names"].items()]
    more = entry["names_left_off"]
    every = [*names, *([f"{more} more"] if more else [])]
    return shown(", ".join(every) or entry["key"]["name"])


def since(then: float | None, now: float, *, brief: bool = False) -> str:
    """How long ago something was."""
    return duration(None if then is None else now - then, brief=brief)


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """Part of a whole."""
    full = min(cells, int(share * cells))
    return "█" * full + "░" * (cells - full)
