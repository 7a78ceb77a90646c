"""A journal's two files: what one process adds, and the bound that both keep."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from broker.journal.file import KEEPER_BYTES, LEAST_BYTES, JournalFile, older

LINE = b"x" * 99 + b"\n"
KEEPER_LINE = b"k" * 99 + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "default.journal"


def sizes(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, older(path)) if each.exists())


def test_both_files_stay_within_the_bound(path: Path) -> None:
    """However much server and keeper write, the files together never have more than the limit; the
    latest lines are there."""
    server = JournalFile(path, LEAST_BYTES, turns=True)
    keeper = JournalFile(path, LEAST_BYTES, turns=False)
    for number in range(2000):
        line = f"{number:08}".encode() + LINE[8:]
        assert server.append(line)
        keeper.append(KEEPER_LINE)
        assert sizes(path) <= LEAST_BYTES
    assert line in path.read_bytes()
    assert older(path).stat().st_size >= LEAST_BYTES // 4  # a new file begins when one is full


def test_the_keeper_stops_where_no_server_turns(path: Path) -> None:
    """Servers that die at once, for ever, cannot make the keeper fill the disk."""
    keeper = JournalFile(path, LEAST_BYTES, turns=False)
    written = sum(keeper.append(KEEPER_LINE) for _ in range(1000))
    assert 0 < written < 1000
    assert sizes(path) <= LEAST_BYTES // 2
    assert JournalFile(path, LEAST_BYTES, turns=True).append(LINE)
    assert keeper.append(KEEPER_LINE)


def test_a_full_server_leaves_room_for_the_keeper(path: Path) -> None:
    """When the server that filled the file has died, its keeper can still say so."""
    server = JournalFile(path, LEAST_BYTES, turns=True)
    while not older(path).exists():
        server.append(LINE)
    while path.stat().st_size < LEAST_BYTES // 2 - KEEPER_BYTES - len(LINE):
        server.append(LINE)
    assert JournalFile(path, LEAST_BYTES, turns=False).append(KEEPER_LINE)


def test_only_its_user_may_read_it(path: Path) -> None:
    """Both files are private, whatever the umask."""
    server = JournalFile(path, LEAST_BYTES, turns=True)
    while not older(path).exists():
        server.append(LINE)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, older(path))] == [0o600, 0o600]


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """A link in its place leads to no file of somebody else's."""
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        JournalFile(path, LEAST_BYTES, turns=True).append(LINE)
    assert not (tmp_path / "precious").exists()


def test_a_removed_file_is_made_again(path: Path) -> None:
    """Whoever tidies up the directory loses the past, not the future."""
    server = JournalFile(path, LEAST_BYTES, turns=True)
    server.append(LINE)
    path.unlink()
    server.append(LINE)
    assert path.read_bytes() == LINE


def test_what_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    """A FIFO in the journal's place is an error at once, with a reader and without."""
    path = tmp_path / "default.journal"
    os.mkfifo(path)
    journal = JournalFile(path, LEAST_BYTES, turns=True)
    with pytest.raises(OSError, match="No such device"):
        journal.append(b"line\n")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="it is no file"):
            journal.append(b"line\n")
    finally:
        os.close(reader)
