"""Counters and log events are those that are documented; how a line of the log is written."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import logs
from broker.logs import BURST_LINES, format_event, log_event

ROOT = Path(__file__).parents[1]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "broker").rglob("*.py")))
DOC_FOLDER = ROOT / "docs"
DOCS = (DOC_FOLDER / "reliability.md").read_text()
METRICS = (DOC_FOLDER / "metrics.md").read_text()

COUNTED = re.compile(
    r'counters\["(\w+)"\]|"((?:loads|publications)_failed)"|_count\("(\w+)", "(\w+)"'
)
LOGGED = re.compile(r'(?:log_event|self\._log|self\._end)\(\s*(?:connection, )?"([a-z-]+)"')


def section(title: str) -> str:
    return DOCS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def documented(title: str) -> list[str]:
    """The names in the first column of a section's table."""
    cells = re.findall(r"^\| (`.*?`) \|", section(title), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]


def test_every_counter_is_documented() -> None:
    """The table of counters is the code's, each once, in order."""
    counted = {name for found in COUNTED.findall(SOURCE) for name in found if name}
    assert documented("Counters") == sorted(counted)


def test_every_event_is_documented() -> None:
    """The table of events is the code's, each once, in order."""
    assert documented("The log") == sorted(set(LOGGED.findall(SOURCE)))


def test_the_page_for_who_is_on_call() -> None:
    """It names events and metrics that there are."""
    rows = re.findall(r"^\| (?!-)(.*) \|$", (DOC_FOLDER / "on-call.md").read_text(), re.MULTILINE)
    cells = [row.split(" | ") for row in rows[1:]]
    events = {name for row in cells for name in re.findall(r"`([a-z-]+)`", row[2])}
    assert events <= set(documented("The log"))
    metrics = {name for row in cells for name in re.findall(r"`(weight_broker_\w+)`", row[3])}
    assert metrics <= set(re.findall(r"`(weight_broker_\w+)`", METRICS))
    assert len(cells) == len([row for row in cells if row[1] and row[2] and row[3]])


def test_nothing_is_logged_in_another_form() -> None:
    """Apart from tracebacks and what concerns systemd, each line of the broker is an event."""
    others = re.findall(r"\blog\.(?:debug|info|warning|error)\(", SOURCE)
    assert len(others) == 1  # sd_notify.py


# --- lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (7, "7"),
        (1.5, "1.5"),
        ("plain", "plain"),
        ("/models/m:1,2", "/models/m:1,2"),
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("line\nINFO session-opened pid=1", '"line\\nINFO session-opened pid=1"'),
        ("\x1b[2J", '"\\u001b[2J"'),
        ("für", '"f\\u00fcr"'),
    ],
)
def test_values(value: object, written: str) -> None:
    """A plain value stands for itself; any other is a JSON string on the same line."""
    line = format_event("event", {"key": value, "left_out": None})
    assert line == f"event key={written}"
    assert line.isprintable()
    if written.startswith('"'):
        assert json.loads(written) == value


def test_long_values_are_cut() -> None:
    """What a peer makes up fills no disk."""
    assert len(format_event("event", {"key": "x" * 1_000_000})) < 2100


@pytest.fixture
def still_clock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Everything is written, and the clock stands still until it is moved."""
    monkeypatch.setattr(logs, "_buckets", {})
    monkeypatch.setattr(logs, "clock", lambda: Clock.now)
    Clock.now = 0.0
    with caplog.at_level(logging.INFO, "weight-broker"):
        yield


class Clock:
    now = 0.0


@pytest.mark.usefixtures("still_clock")
def test_a_flood_of_one_event(caplog: pytest.LogCaptureFixture) -> None:
    """Of one event so many lines pass at once, then some a second; others are not affected."""
    for number in range(10 * BURST_LINES):
        log_event("flood", number=number)
    log_event("quiet")
    assert len(caplog.messages) == BURST_LINES + 1
    Clock.now += 1.0
    log_event("flood", number=-1)
    assert caplog.messages[-1] == f"flood number=-1 suppressed={9 * BURST_LINES}"
    log_event("flood")
    assert caplog.messages[-1] == "flood"
