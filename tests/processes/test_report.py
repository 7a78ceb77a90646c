"""`weight-broker report` after a life with a failed load, a dead engine and a dead server."""

from __future__ import annotations

import html
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.cli import main
from broker.errors import LoadFailed
from broker.journal.file import journal_path
from broker.journal.reading import Entry, read_journal
from broker.rundir import BrokerPaths
from engine_client import Checkpoint
from tests.processes.conftest import brokers, private_directory
from tests.support.browser import measured, needs_chromium
from tests.support.clock import eventually
from tests.support.processes import Engine, RunningBroker
from tests.support.stored import cut_short, small_checkpoint

Capture = pytest.CaptureFixture[str]
MARKUP = "<img src=x onerror=fetch(1)>"
OVERFLOWING = """[
    document.documentElement.scrollWidth <= innerWidth,
    document.querySelectorAll("script, img").length,
    getComputedStyle(document.body).backgroundColor,
    [...document.querySelectorAll(".row .track")].every(track => track.clientWidth > 200),
]"""


@dataclass
class Life:
    """A broker that has lived through much, and its report."""

    broker: RunningBroker
    dead_server: int
    dead_engine: int
    page: str

    @property
    def text(self) -> str:
        """What the page says, without its markup."""
        return " ".join(html.unescape(re.sub("<[^>]*>", " ", self.page)).split())


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    with private_directory() as directory, brokers(directory) as start:
        broker = start()
        good, bad = (small_checkpoint(directory / name) for name in ("good", MARKUP))
        with Engine(broker) as engine, broker.client(label=MARKUP) as client:
            engine.ask("acquire", path=str(good), name="assistant")
            with pytest.raises(LoadFailed):
                client.acquire(Checkpoint(cut_short(bad)))
            eventually(
                lambda: "memory" in events(broker, leased=1 << 18), 5, "a look at the memory"
            )
            engine.kill()
            eventually(lambda: "session-ended" in events(broker, pid=engine.pid), 5, "the death")
            server = broker.server_pid()
            os.kill(server, signal.SIGKILL)
            eventually(lambda: "taken-over" in events(broker, restarts=1), 10, "the next server")
            eventually(lambda: serves(broker), 10, "its line that it serves")
            yield Life(broker, server, engine.pid, report_of(broker))


def events(broker: RunningBroker, **facts: object) -> set[str]:
    """The events of its journal that have these facts."""
    return {entry.event for entry in journal(broker) if facts.items() <= entry.facts.items()}


def serves(broker: RunningBroker) -> bool:
    """Whether the journal has the start of the server that answers now."""
    return "serving" in events(broker, pid=broker.server_pid())


def journal(broker: RunningBroker) -> list[Entry]:
    return read_journal(journal_path(BrokerPaths(broker.directory)))


def report_of(broker: RunningBroker, *options: str) -> str:
    output = broker.directory / "report.html"
    assert main(["report", "--dir", str(broker.directory), *options, str(output)]) == 0
    return output.read_text("utf-8")


def test_what_happened(life: Life) -> None:
    """Which engine died, why the load failed, which server followed which, and what is left."""
    for said in (
        "the broker is running",
        f"engine {life.dead_engine} (told engine) died, holding 1 lease",
        f"server {life.dead_server} died",
        f"server {life.broker.server_pid()} goes on",
        "'model.safetensors' is cut short",
        "set 1 assistant#1",
        "In use at most 256.0 KiB",
    ):
        assert said in life.text, said


def test_keeper_and_servers_wrote_it(life: Life) -> None:
    """The death of a server is written by the keeper, everything around it by the servers."""
    written = [entry.event for entry in journal(life.broker)]
    order = [written.index(event) for event in ("serving", "server-died", "taken-over")]
    assert order == sorted(order)
    assert written.count("serving") == 2
    path = journal_path(BrokerPaths(life.broker.directory))
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_the_last_moments(life: Life) -> None:
    """With --last what was over before is left out, what is still there stays."""
    shortened = report_of(life.broker, "--last", "0.001s")
    assert "is cut short" not in shortened
    assert "set 1" in shortened


@needs_chromium
@pytest.mark.parametrize(("width", "is_dark"), [(500, True), (1400, False)])
def test_in_a_browser(life: Life, tmp_path: Path, width: int, is_dark: bool) -> None:
    """Narrow and wide everything fits, dark is dark, and what peers made up has made no element."""
    fits, foreign, background, is_drawn = measured(
        life.page, OVERFLOWING, tmp_path, width=width, is_dark=is_dark
    )
    assert (fits, is_drawn) == (True, True)
    assert foreign == 1  # the script that measures
    assert background == ("rgb(18, 22, 27)" if is_dark else "rgb(255, 255, 255)")
    assert MARKUP in life.text


def test_to_standard_output(life: Life, capsys: Capture) -> None:
    """A dash is standard output."""
    assert main(["report", "--dir", str(life.broker.directory), "-"]) == 0
    said = capsys.readouterr()
    assert (said.out.splitlines()[0], said.err) == ("<!doctype html>", "")


def test_what_is_refused(life: Life, tmp_path: Path, capsys: Capture) -> None:
    """No journal, or nowhere to write: a sentence and its exit code."""
    tmp_path.chmod(0o700)
    assert main(["report", "--dir", str(tmp_path), "x.html"]) == 5
    assert "there is no journal of a broker named 'default'" in capsys.readouterr().err
    assert main(["report", "--dir", str(life.broker.directory), "/nowhere/x.html"]) == 2
    assert "cannot be written to /nowhere/x.html" in capsys.readouterr().err


def test_a_broker_that_has_ended(tmp_path: Path) -> None:
    """The page of a broker that has ended says so, and how its server ended."""
    tmp_path.chmod(0o700)
    with brokers(tmp_path) as start:
        broker = start()
        broker.stop()
        page = report_of(broker)
    assert "the broker is not running" in page
    assert "ended in order" in page
