"""Reading a journal back, whatever is left of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import BadRequest, NotFound
from broker.journal.file import older
from broker.journal.reading import find_journal, read_journal
from broker.journal.recording import line_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "default.journal"


def test_both_files_in_order(path: Path) -> None:
    """The older file comes first, and each time is what was written."""
    older(path).write_bytes(line_of("serving", {"pid": 1}, 10.5))
    path.write_bytes(line_of("stopped", {}, 20.25))
    entries = [(entry.time, entry.event, entry.facts) for entry in read_journal(path)]
    assert entries == [(10.5, "serving", {"pid": 1}), (20.25, "stopped", {})]


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": "1970-01-01T00:00:01Z", "ev',
        b"",
        b"[]",
        b"7",
        b"null",
        b'{"event": "x"}',
        b'{"time": 7, "event": "x"}',
        b'{"time": "yesterday", "event": "x"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"time": "9999-12-31T23:59:59-23:59", "event": "x"}',
        b'{"time": "9999-12-31T23:59:59Z", "event": "x"}',
        b'{"time": "0001-01-01T00:00:00+23:59", "event": "x"}',
        b'{"time": "0001-01-01T00:00:00", "event": "x"}',
        b'{"time": "1970-01-01T00:00:01Z", "event": "x", "nbytes": 1' + b"0" * 400 + b"}",
        b'{"time": "1970-01-01T00:00:01Z", "event": "x", "nbytes": 1' + b"0" * 5000 + b"}",
        b'{"time": "1970-01-01T00:00:01Z", "event": "x", "leased": 1e308}',
        b'{"time": "1970-01-01T00:00:01Z", "event": "x", "leased": -Infinity}',
        b'{"time": "1970-01-01T00:00:01Z", "event": "x", "leased": NaN}',
    ],
    ids=lambda line: ascii(line[:60]),
)
def test_lines_without_sense(path: Path, line: bytes) -> None:
    """What a crash has left is passed over, the lines around it count."""
    whole = line_of("stopped", {}, 1.0)
    path.write_bytes(whole + line + b"\n" + whole)
    assert len(read_journal(path)) == 2


@given(st.binary())
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A file of whatever bytes has entries or none, and raises nothing else."""
    path = tmp_path_factory.getbasetemp() / "any.journal"
    path.write_bytes(data)
    try:
        entries = read_journal(path)
    except NotFound:
        return
    assert entries


def test_a_journal_is_found_without_a_broker(path: Path) -> None:
    """Its file is enough; no socket is needed."""
    path.write_bytes(line_of("stopped", {}, 1.0))
    assert find_journal(directory=path.parent) == path


def test_no_journal(path: Path) -> None:
    """The sentence says where it looked and what to do."""
    with pytest.raises(NotFound, match=f"tried {path}; no broker of this name .*--journal-limit"):
        find_journal(directory=path.parent)
    with pytest.raises(NotFound, match="no journal of a broker named 'other'"):
        find_journal("other", path.parent / "nowhere")


def test_an_empty_journal(path: Path) -> None:
    """A file with nothing in it is no story."""
    path.write_bytes(b"\n")
    with pytest.raises(NotFound, match="has no event in it"):
        read_journal(path)


def test_a_link_is_not_followed(path: Path) -> None:
    """A journal is a file of the directory itself."""
    path.symlink_to("/etc/passwd")
    with pytest.raises(BadRequest, match="cannot be read"):
        read_journal(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_what_is_no_file_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    """At once: nobody waits for a writer."""
    make(path)
    with pytest.raises(BadRequest, match="it is no file"):
        read_journal(path)


def test_an_open_directory_is_refused(path: Path) -> None:
    """A journal that others could have written is not read."""
    path.write_bytes(line_of("stopped", {}, 1.0))
    path.parent.chmod(0o777)
    with pytest.raises(BadRequest, match="open to others"):
        find_journal(directory=path.parent)
