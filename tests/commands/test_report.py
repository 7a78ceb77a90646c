"""`weight-broker report` of a journal that lies there: where the page goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.cli import main
from broker.journal.recording import line_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a broker that is not running, called Ü in its journal."""
    place = tmp_path / "run"
    place.mkdir(0o700)
    facts = {"epoch": "e", "name": "Ü", "device": "simulated", "pid": 1}
    (place / "default.journal").write_bytes(line_of("serving", facts, 1.0))
    return place


def report(directory: Path, output: Path | str) -> int:
    return main(["report", "--dir", str(directory), str(output)])


def test_a_page_takes_the_place_of_the_last_whole(directory: Path, tmp_path: Path) -> None:
    """A link stays a link, the file keeps its mode, and nothing else is left beside it."""
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page)
    assert report(directory, link) == 0
    assert link.is_symlink()
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert page.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == sorted([directory, page, link])


def test_a_page_that_cannot_be_written_harms_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last report is still there, and no half of a new one."""
    page = tmp_path / "page.html"
    page.write_text("old")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert report(directory, page) == 2
    assert page.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == sorted([directory, page])


def test_a_device_is_written_to(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not replaced by a file."""
    assert report(directory, "/dev/full") == 2
    assert "cannot be written to /dev/full (No space left" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


def test_standard_output_is_utf_8(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page says itself, whatever the terminal has."""
    written = tmp_path / "out"
    with written.open("w", encoding="ascii") as ascii_only:
        monkeypatch.setattr("sys.stdout", ascii_only)
        assert report(directory, "-") == 0
    assert "Ü" in written.read_text("utf-8")
