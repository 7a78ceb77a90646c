"""What `status` shows of fixed states: in 80 and 200 columns, with colour, without, in a pipe."""

from __future__ import annotations

import io
import re

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from broker.commands.status.notes import notes, troubles
from broker.commands.status.view import PIPED_WIDTH, show
from tests.commands import samples
from tests.support.status_schema import SCHEMA, check_status

STATES = {"idle": samples.idle, "busy": samples.busy}
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def seen(
    state: str, width: int, *, colour: bool = False, piped: bool = False, ascii_only: bool = False
) -> str:
    """A state as somebody sees it."""
    encoding = "ascii" if ascii_only else "utf-8"
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(
        file=file,
        width=width,
        force_terminal=not piped,
        color_system="standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    show(console, STATES[state]())
    file.flush()
    buffer = file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(encoding)


def lines_of(text: str, title: str) -> list[str]:
    """The lines below a heading."""
    lines = text.splitlines()
    start = lines.index(title) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return lines[start:end]


# --- the schema ---------------------------------------------------------------------------------


def test_the_schema_is_one() -> None:
    """It is a valid schema, and what it asks for it describes."""
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("state", STATES)
def test_the_samples_are_statuses(state: str) -> None:
    """The states that are shown here are such as a broker tells."""
    check_status(STATES[state]())


# --- widths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_too_long(state: str, width: int) -> None:
    """Nothing is wider than the terminal, and nothing but a bar is broken within a word."""
    for line in seen(state, width).splitlines():
        assert len(line) <= width


def test_80_columns() -> None:
    """A terminal of the usual width has who holds what, who waits, how far loads are."""
    text = seen("busy", 80)
    assert lines_of(text, "in progress") == [
        "SET  STAGE    PROGRESS                    RATE  LEFT  WAITING  QUIET  WHAT",
        "  8  reading  ████████████░░░░  80%  2.3 GiB/s   5 s        1    0 s  /models/8",
        "  9  writing  -                              -     -        2   45 s  /models/9",
        "no room for DONE, WRITER: a wider terminal or --json shows that",
    ]
    assert lines_of(text, "resident") == [
        "SET  STATE           NAME        SIZE  ENGINES  HELD BY",
        "  2  draining        prod#1  16.0 GiB        1  vllm-a (pid 1201)",
        "  3  sealed, pinned  prod#2  16.0 GiB        2  vllm-b (pid 1202), vllm-c (pid…",
        "  4  sealed          -       16.0 GiB        0  -",
        "no room for TENSORS, AGE, USED, DTYPE, DEVICE, FROM: a wider terminal or --json",
        "  shows that",
    ]
    assert lines_of(text, "sessions")[:4] == [
        "SESSION   PID   UID  COMMAND  LABEL    SETS       WAITS  REQUESTS   LAG  AGE",
        "      5  1201  1000  python3  vllm-a   2              -       120     -  1 h",
        "      6  1202  1000  python3  vllm-b   3              -     12000     -  1 h",
        "      7  1203  1000  python3  vllm-c   3              -         3  12 s  1 h",
    ]


def test_200_columns() -> None:
    """A wide terminal has also who holds each set, and where it came from, cut where it must be."""
    header, *rows = lines_of(seen("busy", 200), "resident")
    assert header.split()[-5:] == ["DTYPE", "DEVICE", "HELD", "BY", "FROM"]
    assert "vllm-b (pid 1202), vllm-c (pid 1203)  /models/prod" in rows[1]
    assert rows[2].endswith("long-l…")
    assert "no room for" not in seen("busy", 200)


def test_piped() -> None:
    """A program gets every column in full, one line a row, no colour, no trailing space."""
    text = seen("busy", PIPED_WIDTH, piped=True)
    assert not ESCAPE.search(text)
    assert "/models/" + "long-" * 20 + "name" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "…" not in text


@pytest.mark.parametrize("state", STATES)
def test_colour_changes_no_letter(state: str) -> None:
    """With colours the same is said as without."""
    coloured = seen(state, 80, colour=True)
    assert ESCAPE.search(coloured)
    assert ESCAPE.sub("", coloured) == seen(state, 80)


def test_a_terminal_without_unicode() -> None:
    """Bars and ellipses become ASCII."""
    text = seen("busy", 80, ascii_only=True)
    assert "################################=====---" in text


# --- parts --------------------------------------------------------------------------------------


def test_the_memory_bar() -> None:
    """Leased, idle, reserved and free, to scale; a single byte shows as well."""
    bars = re.findall(r"^  ([█▓▒░]+) (.*)$", seen("busy", 80), re.MULTILINE)
    assert bars == [
        ("█" * 32 + "▓" * 5 + "░" * 3, "112.0 GiB of 120.0 GiB held"),
        ("█" + "▒" * 20 + "░" * 19, "60.0 GiB of 120.0 GiB held"),
    ]


def test_an_idle_broker() -> None:
    """Both processes, the device, and that nothing is resident; no empty table."""
    assert seen("idle", 80).splitlines() == [
        "broker default 0.1.0, simulated, up 5 s; keeper pid 4120, server pid 4123",
        "SIMULATED DEVICE: host memory, for trying out only",
        "",
        "device SIM-0 simulated device (host memory), 8.0 GiB",
        "  " + "░" * 40 + " 0 B of 4.0 GiB held",
        "  leased 0 B, idle 0 B, reserved 0 B, free 4.0 GiB",
        "",
        "nothing is resident",
        "",
        "counters of the last 5 s, since this server started",
        "  requests 2",
    ]


def test_what_is_to_be_looked_at() -> None:
    """One sentence each, gravest first, with who it is about; none when all is well."""
    preload, stuck, waiting, old, lagging, restarts = notes(samples.busy())
    assert preload.startswith(f"--preload /models/missing is not resident on {samples.GPUS[1]}: ")
    assert preload.endswith("model.safetensors is truncated")
    assert stuck.startswith("set 9 (/models/9) has not moved for 45 s: loader (pid 1401) writes it")
    assert waiting.startswith(
        "2 requests wait for weights, the oldest for 45 s: trainer (pid 1310)"
    )
    assert waiting.endswith("; 1 load waits for a loader")
    assert old.startswith("set 2 (prod#1, 16.0 GiB) goes when its last lease ends; ")
    assert old.endswith("held by vllm-a (pid 1201), since 2 h")
    assert lagging == "session 7, vllm-c (pid 1203), has not read its answers for 12 s"
    assert restarts.startswith("the server was replaced 2 times, last 15 min ago")
    assert notes(samples.idle()) == []


@pytest.mark.parametrize(("waiting", "said"), [(0, "0 wait"), (1, "1 waits"), (2, "2 wait")])
def test_one_that_waits(waiting: int, said: str) -> None:
    """One waits, two wait."""
    report = samples.busy()
    for entry in report["sets"]:
        entry["waiting"] = waiting
    assert notes(report)[1].endswith(f" writes it, {said} for it")


def test_what_is_not_shown_is_counted() -> None:
    """A reply that had no room for everything says so."""
    report = samples.idle()
    report["broker"]["left_off"] = {"preloads": 0, "sets": 1, "sessions": 700}
    assert notes(report) == ["not shown, a reply has no room for them: 1 set, 700 sessions"]


def test_latest_trouble() -> None:
    """A line of the log with its facts, and how long ago it was."""
    (sentence,) = troubles(samples.busy())
    assert sentence[8:] == (
        " (1 min ago) session-ended session=9 pid=77 how=died label=vllm-d leases=1: "
        "the engine is gone: its process has ended"
    )


@pytest.mark.parametrize("field", ["label", "command"])
def test_wicked_words(field: str) -> None:
    """What an engine calls itself cannot move the cursor, nor pass for markup."""
    report = samples.busy()
    report["sessions"][0][field] = "\x1b[2J[red]\nwell"
    console = Console(file=io.StringIO(), width=200, color_system=None, markup=False)
    show(console, report)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert r"\x1b[2J[red]\nwell" in text
