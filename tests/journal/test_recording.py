"""What is written down of the log, and that writing never holds anybody up."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.journal import recording
from broker.journal.file import LEAST_BYTES, JournalFile, journal_path
from broker.journal.reading import read_journal
from broker.journal.recording import (
    KEPT,
    MAX_QUEUED,
    CarefulFile,
    Journal,
    WritingThread,
    keeper_journal,
    line_of,
    server_journal,
)
from broker.logs import log_event
from broker.rundir import BrokerPaths
from tests.support.clock import SCALE
from tests.test_observability import documented


class Kept:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def put(self, line: bytes) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


class HangingFile(CarefulFile):
    """A disk that does not answer until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(JournalFile(path, 16 << 20, turns=True))
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def put(self, line: bytes) -> None:
        self.reached.set()
        self.let_go.wait()
        super().put(line)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "weight-broker"):
        yield


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    journal = Journal(kept)
    yield kept
    journal.close()


def test_what_is_kept(kept: Kept) -> None:
    """Life-cycle events are kept with their facts, refused requests and other noise is not."""
    log_event("set-freed", set=3, nbytes=7)
    log_event("request-refused", cause="no")
    logging.getLogger("weight-broker").warning("no event")
    (line,) = kept.lines
    written = json.loads(line)
    assert written.pop("time").endswith("Z")
    assert written == {"event": "set-freed", "set": 3, "nbytes": 7}


def test_nothing_is_kept_after_the_end(kept: Kept) -> None:
    """A journal that is closed takes nothing any more."""
    journal = Journal(kept)
    journal.close()
    log_event("set-freed", set=1)
    assert len(kept.lines) == 1  # the fixture's


def test_kept_events_are_documented() -> None:
    """Whatever is kept is an event of the log with a line in its table."""
    assert set(documented("The log")) >= KEPT


def test_no_fact_passes_for_the_event() -> None:
    """Facts called `time` or `event` change neither, and a long text is cut."""
    line = line_of("set-freed", {"event": "x", "time": 1, "cause": "y" * 10_000, "none": None}, 0.0)
    assert line.count(b"\n") == 1
    written = json.loads(line)
    assert (written["time"], written["event"]) == ("1970-01-01T00:00:00.000Z", "set-freed")
    assert len(written["cause"]) == recording.MAX_VALUE_CHARACTERS
    assert "none" not in written


def test_lines_of_keeper_and_server(tmp_path: Path) -> None:
    """Both write into one file, which is complete when they have closed it."""
    paths = BrokerPaths(tmp_path)
    for make in (server_journal, keeper_journal):
        journal = make(paths, LEAST_BYTES)
        for number in range(50):
            journal.note("set-freed", {"set": number})
        journal.close()
    numbers = [entry.facts["set"] for entry in read_journal(journal_path(paths))]
    assert numbers == [*range(50), *range(50)]


def test_no_journal(tmp_path: Path) -> None:
    """With a limit of nothing there is no file."""
    for make in (server_journal, keeper_journal):
        journal = make(BrokerPaths(tmp_path), 0)
        journal.note("set-freed", {})
        journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Failures are told once; when it works again the next line is whole."""
    path = tmp_path / "gone" / "default.journal"
    file = CarefulFile(JournalFile(path, LEAST_BYTES, turns=True))
    file.put(b"1\n")
    file.put(b"2\n")
    assert [line for line in caplog.messages if line.startswith("journal-failed")] == [
        caplog.messages[0]
    ]
    path.parent.mkdir()
    path.write_bytes(b'{"half a li')
    file.put(b'{"time": "1970-01-01T00:00:09Z", "event": "set-freed"}\n')
    assert [entry.event for entry in read_journal(path)] == ["set-freed"]


def test_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it: lines wait up to a bound, and its end holds nobody up."""
    file = HangingFile(tmp_path / "default.journal")
    thread = WritingThread(file)
    thread.put(line_of("set-freed", {"set": 0}, 0.0))
    file.reached.wait()
    for number in range(1, MAX_QUEUED + 11):
        thread.put(line_of("set-freed", {"set": number}, 0.0))
    monkeypatch.setattr(recording, "CLOSE_SECONDS", 0.01)
    thread.close()
    file.let_go.set()
    monkeypatch.setattr(recording, "CLOSE_SECONDS", 20 * SCALE)
    thread.close()
    entries = read_journal(tmp_path / "default.journal")
    assert [entry.facts["set"] for entry in entries] == list(range(MAX_QUEUED + 1))


def test_lost_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line that finds room says how many did not."""
    monkeypatch.setattr(recording, "MAX_QUEUED", 2)
    file = HangingFile(tmp_path / "default.journal")
    thread = WritingThread(file)
    thread.put(line_of("set-freed", {}, 0.0))
    file.reached.wait()
    for _ in range(5):
        thread.put(line_of("set-freed", {}, 0.0))
    monkeypatch.setattr(recording, "MAX_QUEUED", 100)
    thread.put(line_of("set-sealed", {}, 0.0))
    file.let_go.set()
    thread.close()
    entries = read_journal(tmp_path / "default.journal")
    assert [entry.event for entry in entries[-2:]] == ["journal-gap", "set-sealed"]
    assert entries[-2].facts == {"lost": 3}
