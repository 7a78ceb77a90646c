"""`weight-broker status`: what is on the broker's books, once or again and again.

notes.py   sentences on what somebody may have to look at
tables.py  what the tables show, as plain text
fitting.py which columns a terminal has room for
view.py    all of it on a console, by rich, which only this command imports
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from broker.commands.parsing import Commands, Examples, add_command, observe

if TYPE_CHECKING:
    from engine_client.observer import Observer

Report: TypeAlias = dict[str, Any]

EXAMPLES: Examples = (
    ("status", "who holds what, who waits, what went wrong"),
    ("status --watch", "the same, every two seconds, until Ctrl-C"),
    ("status --json | jq .devices", "for programs; docs/status.schema.json describes it"),
    ("status --watch 10 --json >> log", "one object a line every ten seconds"),
)
WATCH_SECONDS = 2.0
LEAST_SECONDS = 0.1


def add_to(commands: Commands) -> None:
    text = "show everything on the broker's books"
    status = add_command(commands, "status", show_status, text, examples=EXAMPLES)
    status.add_argument("--json", action="store_true", help="as a JSON object")
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"show it again every so many seconds, until Ctrl-C (default: {WATCH_SECONDS:g})",
    )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if LEAST_SECONDS <= seconds < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"give {LEAST_SECONDS:g} seconds or more")


def show_status(options: argparse.Namespace) -> int:
    with observe(options) as client:
        if options.watch is None:
            _once(client, as_json=options.json)
        else:
            _watch(client, options.watch, as_json=options.json)
    return 0


def _once(client: Observer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(client.status(), indent=2, sort_keys=True))
        return
    from broker.commands.status.view import make_console, show

    show(make_console(), client.status(), client.session)


def _watch(client: Observer, seconds: float, *, as_json: bool) -> None:
    """Until Ctrl-C, which is the usual end, or the broker's."""
    try:
        if as_json:
            _repeat(client, seconds, lambda report: print(json.dumps(report), flush=True))
            return
        from broker.commands.status.view import refreshing

        with refreshing(client.session) as refresh:
            _repeat(client, seconds, refresh)
    except KeyboardInterrupt:
        return


def _repeat(client: Observer, seconds: float, show: Callable[[Report], None]) -> None:
    while True:
        show(client.status())
        time.sleep(seconds)
