"""`weight-broker report`: what the broker has lived through, as a page for a browser."""

from __future__ import annotations

import argparse
import io
import os
import re
import stat
import sys
import time
from pathlib import Path

from broker.commands.parsing import Commands, Examples, add_command
from broker.errors import BadRequest, BrokerError

EXAMPLES: Examples = (
    ("report life.html", "everything that the journal still has"),
    ("report --last 2h life.html", "the last two hours"),
    ("report - | gzip > life.html.gz", "to standard output"),
)
NOTES = """\
The page needs nothing but itself: no script, no request to anywhere. It is
made from the journal beside the broker's sockets, whether the broker runs or
has ended. How far back that reaches: serve --journal-limit."""
PING_SECONDS = 2.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_to(commands: Commands) -> None:
    text = "write a page with the timeline of the broker's life"
    report = add_command(commands, "report", write_report, text, examples=EXAMPLES, notes=NOTES)
    report.add_argument("output", metavar="OUT.html", help="the page; - is standard output")
    report.add_argument(
        "--last",
        type=_duration,
        metavar="TIME",
        help="only so much of the end, e.g. 30m, 12h or 7d (default: everything)",
    )


def write_report(options: argparse.Namespace) -> int:
    """Needs no running broker."""
    from broker.journal.reading import find_journal, read_journal
    from broker.report.page import render
    from broker.report.telling import tell

    journal = find_journal(options.name, options.directory)
    is_running = _is_running(options)  # before it is read: who answers has written that it serves
    entries, now = read_journal(journal), time.time()
    story = tell(entries, until=now if is_running else None, last=options.last)
    shown = [entry for entry in entries if entry.time >= story.begin]
    _write(options.output, render(story, shown, made=now, is_running=is_running))
    if options.output != "-":
        print(f"written: {options.output}")
    return 0


def _is_running(options: argparse.Namespace) -> bool:
    from engine_client.pinging import ping_broker

    try:
        ping_broker(options.name, options.directory, PING_SECONDS)
    except BrokerError:
        return False
    return True


def _write(output: str, page: str) -> None:
    if output == "-":
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as the page itself says
        sys.stdout.write(page)
        return
    try:
        _put(Path(output), page.encode("utf-8"))
    except OSError as error:
        raise BadRequest(
            f"the report cannot be written to {output} ({error.strerror})", path=output
        ) from error


def _put(path: Path, data: bytes) -> None:
    """Write a file whole, or leave what is there; to a device or a FIFO just write."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = path.resolve()
    beside = target.with_name(f".weight-broker-report-{os.getpid()}")
    try:
        with beside.open("xb") as file:
            file.write(data)
        if target.exists():
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        beside.replace(target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: 30m, 12h or 7d would be")
    return float(found[1]) * _UNITS[found[2]]
