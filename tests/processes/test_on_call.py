"""What the person on call asks, and where the answer stands: in `status`, and in the log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import wire
from broker.cli import main
from broker.commands.status import notes
from broker.errors import LoadFailed
from engine_client import Checkpoint
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import eventually
from tests.support.processes import Engine, LoaderFault, RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint

LEAVE = wire.encode(wire.Leave())
Capture = pytest.CaptureFixture[str]
StartEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def node() -> Iterator[RunningBroker]:
    """One broker for all questions; its log is for programs."""
    with private_directory() as directory, brokers(directory) as start:
        yield start("--log-format", "json")


@pytest.fixture(autouse=True)
def nothing_resident(node: RunningBroker) -> Iterator[None]:
    yield
    node.order_loaders(None)
    node.evict_all()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(small_checkpoint(tmp_path / "checkpoint"))


def status(node: RunningBroker, capture: Capture) -> str:
    """What `weight-broker status` prints."""
    capture.readouterr()
    assert main(["status", "--dir", str(node.directory)]) == 0
    return capture.readouterr().out


def log(node: RunningBroker, event: str, **facts: Any) -> list[dict[str, Any]]:
    """The lines of this event that have these facts; every line is an object."""
    lines = [json.loads(line) for line in node.log_lines()]
    return [
        line
        for line in lines
        if line["event"] == event and all(line.get(key) == facts[key] for key in facts)
    ]


def test_who_holds_this_memory(
    node: RunningBroker, checkpoint: str, start_engine: StartEngine, capsys: Capture
) -> None:
    """The set's row names the engine, the engine's row the set; the log says since when."""
    engine = start_engine(node)
    number = engine.ask("acquire", path=checkpoint, name="prod")["set"]
    text = status(node, capsys)
    assert "  leased 256.0 KiB, idle 0 B" in text
    assert re.search(
        rf"^ *{number}  sealed +prod#1 .* told engine \(pid {engine.pid}\)", text, re.M
    )
    assert re.search(rf"^ *\d+ +{engine.pid} .* {number} ", text, re.M)
    (granted,) = log(node, "lease-granted", set=number)
    (session,) = (e["id"] for e in node.status()["sessions"] if e["pid"] == engine.pid)
    assert (granted["session"], granted["pid"], granted["label"]) == (
        session,
        engine.pid,
        "told engine",
    )


def test_why_did_that_load_fail(node: RunningBroker, checkpoint: str, capsys: Capture) -> None:
    """Status and log have the sentence that the engine got, and the checkpoint's path."""
    node.order_loaders(LoaderFault.FINDS_THE_DISK_BROKEN)
    with node.client() as client, pytest.raises(LoadFailed) as caught:
        client.acquire(Checkpoint(checkpoint))
    cause = caught.value.sentence
    (failed,) = log(node, "set-failed", path=checkpoint)
    assert (failed["level"], failed["cause"]) == ("warning", cause)
    assert failed["reason"] == caught.value.reason
    text = status(node, capsys)
    shown = text.partition("latest trouble in the log\n")[2]
    assert re.search(rf"set-failed set={failed['set']} .*{re.escape(cause)}", shown)


def test_which_engine_died_when(
    node: RunningBroker, checkpoint: str, start_engine: StartEngine, capsys: Capture
) -> None:
    """A death is a warning with pid, label and time; an engine that ends in order is none."""
    dying, ending = start_engine(node), start_engine(node)
    for engine in (dying, ending):
        engine.ask("acquire", path=checkpoint)
    sessions = {entry["pid"]: entry["id"] for entry in node.status()["sessions"]}
    dying.kill()
    ending.close()
    (gone,) = eventually(lambda: ends(node, sessions[ending.pid]), 5, "the orderly end")
    assert (gone["level"], gone["how"]) == ("info", "closed")
    (gone,) = eventually(lambda: ends(node, sessions[dying.pid]), 5, "the death")
    assert (gone["level"], gone["how"], gone["leases"]) == ("warning", "died", 1)
    assert (gone["pid"], gone["label"]) == (dying.pid, "told engine")
    trouble = status(node, capsys).partition("latest trouble in the log\n")[2]
    assert re.search(rf"session-ended session={sessions[dying.pid]} .*pid={dying.pid}", trouble)
    assert f"session={sessions[ending.pid]} " not in trouble
    assert not log(node, "request-refused", session=sessions[ending.pid])


def ends(node: RunningBroker, session: int) -> list[dict[str, Any]]:
    return log(node, "session-ended", session=session)


def test_is_anybody_waiting(
    node: RunningBroker, checkpoint: str, start_engine: StartEngine, capsys: Capture
) -> None:
    """Who waits, for how long, and for which load."""
    node.order_loaders(LoaderFault.STOPS_AT_START)
    engine = start_engine(node)
    assert "for weights" not in status(node, capsys)
    engine.tell("acquire", path=checkpoint)
    loader = node.stopped_loader()
    text = status(node, capsys)
    assert re.search(
        r"^- 1 request waits for weights, the oldest for \d+ s: told engine", text, re.M
    )
    assert re.search(rf"^ *\d+ +{engine.pid} .* 1 for \d+ s ", text, re.M)
    progress = text.partition("in progress\n")[2].partition("\n\n")[0]
    assert f"loader (pid {loader})" in progress
    assert checkpoint in progress
    assert log(node, "load-started", path=checkpoint)
    node.let_loader_go()
    assert "ok" in engine.answer()


def test_is_a_load_stuck(
    node: RunningBroker,
    checkpoint: str,
    start_engine: StartEngine,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load that has not moved for a while is named, with its loader and who waits for it."""
    node.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    engine = start_engine(node)
    engine.tell("acquire", path=checkpoint)
    loader = node.stopped_loader()
    said = (
        rf"\({re.escape(checkpoint)}\) has not moved for \d+ s: loader \(pid {loader}\) writes it"
    )
    assert "has not moved" not in status(node, capsys)
    monkeypatch.setattr(notes, "QUIET_SECONDS", 0.0)
    assert re.search(said + ", 1 waits for it$", status(node, capsys), re.M)
    node.let_loader_go()
    assert "ok" in engine.answer()


def test_is_a_generation_stuck(
    node: RunningBroker, tmp_path: Path, start_engine: StartEngine, capsys: Capture
) -> None:
    """An old generation that does not go is named, with who still holds it."""
    engine = start_engine(node)
    old = engine.ask("acquire", path=str(small_checkpoint(tmp_path / "1", seed=1)), name="line")
    new = small_checkpoint(tmp_path / "2", seed=2)
    assert main(["publish", str(new), "--name", "line", "--dir", str(node.directory)]) == 0
    text = status(node, capsys)
    assert re.search(
        rf"^- set {old['set']} \(line#1, 256.0 KiB\) goes when its last lease ends; held by "
        rf"told engine \(pid {engine.pid}\), since \d+ s$",
        text,
        re.M,
    )
    (superseded,) = log(node, "set-superseded", set=old["set"])
    engine.ask("release")
    eventually(lambda: log(node, "set-freed", set=old["set"]), 5, "the old generation's end")
    assert superseded["by"] == node.status()["sets"][0]["id"]


# --- what is no trouble -------------------------------------------------------------------------


def test_a_peer_that_says_it_leaves(node: RunningBroker, capsys: Capture) -> None:
    """Its end is no death; and until then nothing has changed."""
    with RawSession(node.directory) as session:
        number = session.welcome.session
        session.send(LEAVE)
        session.send(LEAVE)
        session.send(wire.encode(wire.Attach("no such lease")))
        assert isinstance(session.receive(), wire.Refused)
    (gone,) = eventually(lambda: ends(node, number), 5, "the end")
    assert (gone["level"], gone["how"], gone["cause"]) == (
        "info",
        "closed",
        "the engine closed its session",
    )
    assert f"session={number} how" not in status(node, capsys)


def test_a_late_release(node: RunningBroker, checkpoint: str) -> None:
    """What a conversation says after its session has ended is answered, and is no refusal."""
    counts = node.counts()
    with RawDealer(node.directory) as dealer:
        with RawSession(node.directory) as session:
            number = session.welcome.session
            assert session.hello(dealer)[0] == b"ok"
            session.send(LEAVE)
        eventually(lambda: ends(node, number), 5, "the end")
        answered, _sentence = dealer.ask(b"release", wire.encode(wire.Release("w")))
    assert answered == b"no-session"
    assert (counts.added("requests_late"), counts.added("requests_refused")) == (1, 0)


def test_a_loader_that_has_done_its_work(node: RunningBroker, checkpoint: str) -> None:
    """Its end, and that of its session, are told as what they are."""
    with node.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        number = weights.set_id
    (started,) = log(node, "loader-started", set=number)
    session = started["session"]
    (ended,) = eventually(lambda: log(node, "loader-ended", session=session), 5, "the end")
    assert (ended["level"], ended["how"]) == ("info", "finished")
    (gone,) = eventually(lambda: ends(node, session), 5, "the end of its session")
    assert (gone["level"], gone["how"]) == ("info", "closed")


def test_every_line_is_an_object(node: RunningBroker) -> None:
    """Whatever has happened until now: time, level and event, and nobody else's line between."""
    for line in node.log_lines():
        said = json.loads(line)
        assert list(said)[:3] == ["time", "level", "event"]
