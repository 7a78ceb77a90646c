"""The log in both formats: the same events, the same fields, one line each."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from broker import logs
from broker.errors import BadRequest, UnsupportedPlatformForIPCError
from broker.logs import LOG_FORMATS, log_crash, log_event, log_to_stderr, say_refusal

Written = Callable[[str], list[str]]


@pytest.fixture
def written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Written]:
    """Turns the log on in a format; what it has written since it was last asked, line by line."""
    monkeypatch.setattr(logs, "_buckets", {})
    logger = logging.getLogger("weight-broker")
    before, level = list(logger.handlers), logger.level
    logger.handlers.clear()  # of whoever ran here before

    def lines(log_format: str) -> list[str]:
        if not logger.handlers:
            log_to_stderr(log_format)
        return capfd.readouterr().err.splitlines()

    yield lines
    logger.handlers[:] = before
    logger.setLevel(level)


def objects(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_text(written: Written) -> None:
    """Time, level, event, facts."""
    written("text")
    log_event("set-sealed", set=3, checkpoint="blake3:a", path=None)
    (line,) = written("text")
    assert line[24:] == "INFO set-sealed set=3 checkpoint=blake3:a"
    datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone()


def test_json(written: Written) -> None:
    """One object a line: time in UTC, level, event, and the facts, numbers as numbers."""
    written("json")
    log_event("set-failed", level=logging.WARNING, set=3, cause='say "x"\nINFO y', path=None)
    (said,) = objects(written("json"))
    when = datetime.fromisoformat(said.pop("time").replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - when).total_seconds()) < 60
    assert said == {
        "level": "warning",
        "event": "set-failed",
        "set": 3,
        "cause": 'say "x"\nINFO y',
    }


def test_a_fact_cannot_pass_for_the_event(written: Written) -> None:
    """Whatever a fact is called, time, level and event are the log's own."""
    written("json")
    log_event("loader-said", time="yesterday", text="hello")
    (said,) = objects(written("json"))
    assert (said["event"], said["text"]) == ("loader-said", "hello")
    assert said["time"] != "yesterday"


def test_objects_are_texts_and_long_ones_are_cut(written: Written) -> None:
    """What is no number, and no text either, is told as text; nobody fills the disk."""
    written("json")
    log_event("crashed", cause=ValueError("no"), text="x" * 1_000_000)
    (said,) = objects(written("json"))
    assert said["cause"] == "no"
    assert len(said["text"]) < 2100


def test_other_lines(written: Written) -> None:
    """What is logged in another form is an object too."""
    written("json")
    logging.getLogger("weight-broker").warning("NOTIFY_SOCKET=%r is gone", "/x")
    (said,) = objects(written("json"))
    assert (said["event"], said["text"]) == ("message", "NOTIFY_SOCKET='/x' is gone")


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_a_crash(written: Written, log_format: str) -> None:
    """A traceback follows the line, or is a field of it."""
    written(log_format)
    try:
        raise KeyError("mistake")
    except KeyError as error:
        log_crash(type(error), error, error.__traceback__)
    lines = written(log_format)
    if log_format == "json":
        (said,) = objects(lines)
        assert (said["event"], said["cause"]) == ("crashed", "KeyError('mistake')")
        assert said["traceback"].startswith("Traceback")
    else:
        assert "ERROR crashed cause=KeyError('mistake')" in lines[0]
        assert lines[1].startswith("Traceback")


def test_a_refusal_to_start(written: Written) -> None:
    """A person gets the sentence, a program an event with the error's status."""
    say_refusal(BadRequest("no such name"), "text")
    say_refusal(UnsupportedPlatformForIPCError("[weight-broker:broker] no GPU"), "text")
    assert written("json") == ["weight-broker: no such name", "[weight-broker:broker] no GPU"]
    say_refusal(BadRequest("no such name"), "json")
    (said,) = objects(written("json"))
    del said["time"]
    assert said == {
        "level": "error",
        "event": "not-started",
        "status": "bad-request",
        "cause": "no such name",
    }


# --- a reader that does not read ------------------------------------------------------------------


@pytest.fixture
def unread(written: Written, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The reading end of what standard error is for the log: a pipe, and it is full."""
    reading, writing = os.pipe()
    monkeypatch.setattr(logs, "_STDERR", writing)
    written("text")
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    yield reading
    os.close(writing)
    os.close(reading)


def test_nobody_waits_for_a_reader(unread: int) -> None:
    """Lines that find no room are left out; the first that does says how many."""
    for number in range(3):
        log_event("left-out", number=number)
    os.read(unread, 1 << 20)
    log_event("told", number=3)
    lines = os.read(unread, 1 << 20).decode().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        'WARNING log-gap lost=3 cause="standard error was not read"',
        "INFO told number=3",
    ]


def test_half_a_line(unread: int) -> None:
    """What was torn off is not continued by another line."""
    os.read(unread, 4096)
    try:
        raise ValueError("x" * 10_000)
    except ValueError as error:
        log_crash(type(error), error, error.__traceback__)
    os.read(unread, 1 << 20)
    log_event("told")
    begun, *lines = os.read(unread, 1 << 20).decode().split("\n")
    assert begun == ""
    assert [line.split(" ", 3)[2:] for line in lines[:2]] == [
        ["WARNING", 'log-gap lost=1 cause="standard error was not read"'],
        ["INFO", "told"],
    ]


def test_a_reader_that_has_gone(unread: int) -> None:
    """Nothing is raised, and nothing else happens."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), unread)
    log_event("told-to-nobody")
