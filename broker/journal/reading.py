"""Reading a journal back: both files, oldest line first."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from broker.credentials import trusted_group
from broker.errors import BadRequest, NotFound
from broker.journal.file import journal_path, older
from broker.rundir import (
    DEFAULT_NAME,
    BrokerPaths,
    candidate_directories,
    is_private_directory,
)

MOST_BYTES = 256 << 20
"""Of a file, from its end: more is no journal of ours, whose bound is `--journal-limit`."""

_Number = TypeVar("_Number", int, float)
_LATEST = 253_370_764_800.0
"""Of a moment: the year 9999, which `datetime` ends with."""
_MOST_NUMBER = (1 << 63) - 1
"""Of any fact. Where larger ones were added up or drawn, they would be no numbers any more."""


@dataclass(frozen=True)
class Entry:
    """One event of a broker's life.

    Attributes:
        time: seconds since 1970, by the clock of the machine at that moment.
        event: its name (docs/reliability.md), or "memory".
        facts: numbers, texts, true or false. Texts may be anything: peers made them up.
    """

    time: float
    event: str
    facts: dict[str, Any]


def find_journal(name: str = DEFAULT_NAME, directory: Path | None = None) -> Path:
    """The journal of the broker of this name, whether it runs or not.

    Args:
        directory: the only one to look in; None: every candidate (broker.rundir).

    Raises:
        NotFound: there is none; the sentence lists every path tried.
        BadRequest: a directory is not private, or the name is not one.
    """
    candidates = candidate_directories() if directory is None else [directory]
    paths = [journal_path(BrokerPaths(candidate, name)) for candidate in candidates]
    group = trusted_group()
    for path in paths:
        if is_private_directory(path.parent, group=group) and os.path.lexists(path):
            return path
    raise NotFound(
        f"there is no journal of a broker named {name!r}: tried {', '.join(map(str, paths))}; no "
        "broker of this name has run there, or it was told to keep none (serve --journal-limit 0)",
        tried=[str(path) for path in paths],
    )


def read_journal(path: Path) -> list[Entry]:
    """Every event that is still there. Lines that make no sense are left out.

    Blocks as the file system does.

    Raises:
        BadRequest: it cannot be read, or is a link.
        NotFound: there is nothing in it.
    """
    lines = [line for each in (older(path), path) for line in _lines(each)]
    entries = [entry for line in lines if (entry := _entry(line)) is not None]
    if not entries:
        raise NotFound(f"the journal {path} has no event in it", path=str(path))
    return entries


def _lines(path: Path) -> Iterator[bytes]:
    try:
        # Without O_NONBLOCK a FIFO in its place would keep us waiting for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRequest(
            f"the journal {path} cannot be read ({error.strerror}); it is readable by the broker's "
            "own user only",
            path=str(path),
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadRequest(f"the journal {path} cannot be read (it is no file)", path=str(path))
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - MOST_BYTES))
        yield from file.read(MOST_BYTES).splitlines()


def _entry(line: bytes) -> Entry | None:
    try:
        facts = json.loads(
            line, parse_int=_whole_number, parse_float=_number, parse_constant=_number
        )
        when = datetime.fromisoformat(facts.pop("time").replace("Z", "+00:00")).timestamp()
        if not 0 <= when <= _LATEST:
            return None
        return Entry(when, str(facts.pop("event")), facts)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # the half line that a crash or a full disk has left


def _whole_number(digits: str) -> int:
    return _bounded(int(digits))


def _number(digits: str) -> float:
    """Also of what JSON has no word for: NaN and the infinite ones, which no bound admits."""
    return _bounded(float(digits))


def _bounded(number: _Number) -> _Number:
    if not -_MOST_NUMBER <= number <= _MOST_NUMBER:
        raise ValueError("no number that a broker wrote")
    return number
