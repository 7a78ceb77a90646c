"""`status` on a console: the only part of the broker that imports rich."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from broker.amounts import human
from broker.commands.status.fitting import GAP, fit
from broker.commands.status.notes import notes, troubles
from broker.commands.status.tables import Table, progress_table, session_table, set_table, since
from broker.commands.text import shown

PIPED_WIDTH = 10_000
"""Nothing is cut for a program that reads, and no line is broken."""
BAR_CELLS = 40
PURPOSES = (("leased", "█", "green"), ("idle", "▓", "cyan"), ("reserved", "▒", "yellow"))
FREE = ("free", "░", "bright_black")
ASCII = str.maketrans("█▓▒░…·", "#=+-~,")
"""For a terminal that cannot show the others."""


def make_console() -> Console:
    """Standard output: its width and colours (NO_COLOR is heeded), or none of that in a pipe."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def show(console: Console, report: dict[str, Any], own: int | None = None) -> None:
    """Print a report once. `own`: the session that asks, which is left away."""
    if console.is_terminal:
        console.print(render(report, console, own))
        return
    with console.capture() as captured:
        console.print(render(report, console, own))
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")


@contextlib.contextmanager
def refreshing(own: int | None = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What shows one report in the place of the last; one after the other where that cannot be."""
    console = make_console()
    if not console.is_terminal:
        yield lambda report: show(console, report, own)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda report: live.update(render(report, console, own), refresh=True)


def render(report: dict[str, Any], console: Console, own: int | None) -> RenderableType:
    """A report for a console of this width and encoding."""
    lines = [*_head(report), *_devices(report)]
    width = console.width
    for table in (progress_table(report), set_table(report), session_table(report, own)):
        lines += _table(table, width)
    if not report["sets"]:
        lines += [Text(""), Text("nothing is resident")]
    lines += _list("to look at", notes(report), "yellow", width)
    lines += _list("latest trouble in the log", troubles(report), "red", width)
    lines += _counters(report, width)
    if not _can_show(console):
        for line in lines:
            line.plain = line.plain.translate(ASCII)
    return Group(*lines)


def _can_show(console: Console) -> bool:
    try:
        "█…".encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _head(report: dict[str, Any]) -> list[Text]:
    broker = report["broker"]
    now = broker["now"]
    lines = [
        Text.assemble(
            ("broker ", "bold"),
            (broker["name"], "bold"),
            f" {broker['version']}, {broker['platform']}, up {since(broker['started'], now)}; "
            f"keeper pid {broker['keeper_pid']}, server pid {broker['pid']}",
        )
    ]
    if broker["simulated"]:
        warning = "SIMULATED DEVICE: host memory, for trying out only"
        lines.append(Text(warning, style="yellow"))
    return lines


def _devices(report: dict[str, Any]) -> list[Text]:
    return [line for uuid, use in report["devices"].items() for line in _device(uuid, use)]


def _device(uuid: str, use: dict[str, Any]) -> list[Text]:
    held = use["limit"] - use["free"]
    parts = [f"{purpose} {human(use[purpose])}" for purpose, _glyph, _style in PURPOSES]
    return [
        Text(""),
        Text.assemble(
            ("device ", "bold"), (uuid, "bold"), f" {shown(use['name'])}, {human(use['total'])}"
        ),
        Text.assemble("  ", _memory_bar(use), f" {human(held)} of {human(use['limit'])} held"),
        Text(f"  {', '.join(parts)}, free {human(use['free'])}"),
    ]


def _memory_bar(use: dict[str, Any]) -> Text:
    """What the broker may hold of a device, by purpose; whatever is used shows at least a cell."""
    text, left = Text(), BAR_CELLS
    for purpose, glyph, style in PURPOSES:
        cells = round(BAR_CELLS * use[purpose] / max(use["limit"], 1))
        cells = min(left, max(cells, 1 if use[purpose] else 0))
        text.append(glyph * cells, style)
        left -= cells
    text.append(FREE[1] * left, FREE[2])
    return text


def _table(table: Table, width: int) -> list[Text]:
    if not table.rows:
        return []
    (header, *rows), left_away = fit(table, width)
    gap = " " * GAP
    return [
        Text(""),
        Text(table.title, style="bold"),
        Text(gap.join(header).rstrip(), style="bold bright_black", no_wrap=True),
        *(Text(gap.join(row).rstrip(), no_wrap=True) for row in rows),
        *(Text(line, style="bright_black") for line in _no_room(left_away, width)),
    ]


def _no_room(columns: list[str], width: int) -> list[str]:
    if not columns:
        return []
    said = f"no room for {', '.join(columns)}: a wider terminal or --json shows that"
    return _wrapped(said, width)


def _list(title: str, sentences: list[str], style: str, width: int) -> list[Text]:
    if not sentences:
        return []
    lines = [line for sentence in sentences for line in _wrapped(f"- {sentence}", width)]
    return [Text(""), Text(title, style="bold"), *(Text(line, style=style) for line in lines)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _counters(report: dict[str, Any], width: int) -> list[Text]:
    counted = [f"{name} {number}" for name, number in report["counters"].items() if number]
    age = since(report["broker"]["server_started"], report["broker"]["now"])
    heading = Text(f"counters of the last {age}, since this server started", style="bold")
    lines = _wrapped("  " + (", ".join(counted) or "all zero"), width)
    return [Text(""), heading, *map(Text, lines)]
