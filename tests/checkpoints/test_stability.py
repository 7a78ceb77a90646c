"""Waiting until a file's time stamps can tell of the next write."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from broker.checkpoints.stability import SETTLED_NS, settled_status
from broker.errors import LoadFailed


def test_a_file_just_written_is_left_to_settle(tmp_path: Path) -> None:
    """Nothing is read within a clock tick of the last write, so that a later one must show."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        status = settled_status(file.fileno(), "file")
    assert time.time_ns() - status.st_ctime_ns >= SETTLED_NS


def test_a_time_in_the_future_is_not_waited_for(tmp_path: Path) -> None:
    """A file dated next year by another clock is read at once."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    later = time.time_ns() + 365 * 86400 * 10**9
    os.utime(path, ns=(later, later))
    start = time.monotonic()
    with path.open("rb") as file:
        assert settled_status(file.fileno(), "file").st_mtime_ns == later
    assert time.monotonic() - start < 5


def test_a_file_that_never_settles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download still going on is refused after a second, not waited out."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    sleeps: list[float] = []

    def write_meanwhile(seconds: float) -> None:
        sleeps.append(seconds)
        path.write_bytes(b"x")

    monkeypatch.setattr(time, "sleep", write_meanwhile)
    # A millisecond after the last write, however long this process was kept from running.
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns + 1_000_000)
    with path.open("rb") as file, pytest.raises(LoadFailed, match="still being written") as caught:
        settled_status(file.fileno(), "file")
    assert caught.value.reason == "changed"
    assert sum(sleeps) <= 1.5
