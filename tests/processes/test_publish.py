"""Weights that come from engines, and what becomes of them when their makers fail or die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from broker.amounts import human
from broker.errors import (
    BadRequest,
    Busy,
    LoadFailed,
    OverBudget,
    RequestTimeout,
    StaleEpoch,
    UsageError,
)
from engine_client import EngineClient, publishing
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE, eventually
from tests.support.nursery import BornEngine
from tests.support.processes import (
    RIGHT_SECONDS,
    ROOT,
    RunningBroker,
    is_alive,
    process_state,
)
from tests.support.raw import RawDealer
from tests.support.shipped import crashes, exits, hangs, is_killed, raises

ENGINES = 8
LOADER_SECONDS = 40.0
"""A loader imports torch, perhaps on a machine that is busy."""

StartTorchEngine = Callable[[RunningBroker], BornEngine]


@pytest.fixture(scope="module")
def generous_broker() -> Iterator[RunningBroker]:
    """A broker that runs what engines ship."""
    with private_directory() as directory, brokers(directory, loaders_may_raise=True) as start:
        yield start("--allow-loaders")


@pytest.fixture
def client(generous_broker: RunningBroker) -> Iterator[EngineClient]:
    with generous_broker.client() as client:
        yield client


def used_bytes(broker: RunningBroker) -> int:
    (device,) = broker.status()["devices"].values()
    used: int = device["limit"] - device["free"]
    return used


# --- many engines -------------------------------------------------------------------------------


def test_eight_engines_cause_one_build(
    broker: RunningBroker, start_torch_engine: StartTorchEngine, tmp_path: Path
) -> None:
    """Eight that ask at once: one builds, all map the same set, there is one copy of it."""
    engines = [start_torch_engine(broker) for _ in range(ENGINES)]
    go = tmp_path / "go"
    for number, engine in enumerate(engines):
        engine.tell("get_or_publish", name="m", number=number + 1, wait_for=str(go))
    eventually(lambda: broker.waiting() == ENGINES - 1, 10, "seven waiting requests")
    assert not any(engine.has_answered() for engine in engines)
    go.touch()
    granted = [answer["ok"] for answer in [engine.answer() for engine in engines]]
    assert sorted(grant["how"] for grant in granted) == ["published", *["shared"] * (ENGINES - 1)]
    assert [grant["built"] for grant in granted].count(True) == 1
    assert {grant["set"] for grant in granted} == {granted[0]["set"]}
    builder = next(n for n, grant in enumerate(granted) if grant["built"])
    for engine in engines:
        assert engine.ask("values") == [(builder + 1) / 64]
    assert broker.slabs() == 1
    assert broker.counter("sets_sealed") == 1
    assert broker.counter("publications_failed") == 0


@pytest.mark.parametrize("at", ["build", "copy"])
def test_builder_killed(
    broker: RunningBroker, start_torch_engine: StartTorchEngine, at: str
) -> None:
    """SIGKILL of the builder, before or in the middle of its copy: within a second another builds;
    nobody sees the half-written set, and no byte of it stays."""
    first, second, reader = (start_torch_engine(broker) for _ in range(3))
    first.tell("get_or_publish", name="m", number=1, signal_number=int(signal.SIGSTOP), at=at)
    eventually(lambda: process_state(first.pid) == "T", 10, "the builder's stop")
    second.tell("get_or_publish", name="m", number=2)
    reader.tell("acquire_name", name="m")
    eventually(lambda: broker.waiting() == 2, 10, "two waiting requests")
    assert broker.slabs() == (1 if at == "copy" else 0)
    assert not reader.has_answered()
    first.kill()
    answer = second.answer(RIGHT_SECONDS)["ok"]
    assert answer["built"]
    assert reader.answer()["ok"]["set"] == answer["set"]
    assert reader.ask("values") == [2 / 64]
    assert broker.counter("claims_inherited") == 1
    assert broker.counter("publications_failed") == 1
    assert f"pid={first.pid}" in broker.log.read_text()
    assert "the engine that was writing the weights is gone" in broker.log.read_text()
    eventually(lambda: broker.slabs() == 1, RIGHT_SECONDS, "the end of the half-written slab")
    assert used_bytes(broker) == answer["nbytes"]


def test_builder_that_raises(
    broker: RunningBroker, start_torch_engine: StartTorchEngine, tmp_path: Path
) -> None:
    """It gets its own exception, and the next one builds, with a build of its own; when none is
    left, who only acquires is told the last cause."""
    first, second, reader = (start_torch_engine(broker) for _ in range(3))
    go = tmp_path / "go"
    first.tell("get_or_publish", name="m", number=1, wait_for=str(go), error="no such adapter")
    eventually(lambda: broker.status()["sets"], 10, "the first claim")
    second.tell("get_or_publish", name="m", number=2, error="no memory")
    reader.tell("acquire_name", name="m")
    eventually(lambda: broker.waiting() == 2, 10, "two waiting requests")
    go.touch()
    answers = [engine.answer() for engine in (first, second, reader)]
    assert [(answer["error"], answer["sentence"]) for answer in answers] == [
        ("ValueError", "no such adapter"),
        ("ValueError", "no memory"),
        ("LoadFailed", "the engine that built the weights failed: ValueError: no memory"),
    ]
    assert answers[2]["fields"] == {"reason": "builder-failed"}
    assert broker.counter("publications_failed") == 2
    assert "ValueError: no such adapter" in broker.log.read_text()
    assert (broker.status()["sets"], used_bytes(broker)) == ([], 0)
    assert second.ask("get_or_publish", name="m", number=3)["built"]


def test_waiting_has_an_end(
    broker: RunningBroker, start_torch_engine: StartTorchEngine, tmp_path: Path
) -> None:
    """An engine whose time runs out while another builds says so; the builder goes on."""
    builder = start_torch_engine(broker)
    go = tmp_path / "go"
    builder.tell("get_or_publish", name="m", number=1, wait_for=str(go))
    eventually(lambda: broker.status()["sets"], 10, "the claim")
    with broker.client() as client:
        with pytest.raises(RequestTimeout) as error:
            client.get_or_publish("m", dict, timeout=0.3)
        assert error.value.stage == "waiting for another engine's weights (building)"
        assert broker.waiting() == 0
        go.touch()
        assert builder.answer()["ok"]["built"]
        with client.get_or_publish("m", dict, timeout=10) as weights:
            assert weights.how == "resident"


def test_two_publishers_at_once(
    broker: RunningBroker, start_torch_engine: StartTorchEngine
) -> None:
    """One wins; the other's `publish` is told who is at it, its `get_or_publish` maps the set."""
    winner = start_torch_engine(broker)
    winner.tell("get_or_publish", name="m", number=1, signal_number=int(signal.SIGSTOP), at="copy")
    eventually(lambda: process_state(winner.pid) == "T", 10, "the winner's stop")
    with broker.client() as client:
        with pytest.raises(Busy) as error:
            client.publish("m", {"w": torch.ones(2)})
        said = f"pid {winner.pid} (told engine) is writing a generation of 'm' now; wait for it, "
        assert error.value.sentence == said + "or publish under another name"
        assert error.value.set == 1
        client.publish("n", {"w": torch.ones(2)}).release()
        os.kill(winner.pid, signal.SIGCONT)
        with client.get_or_publish("m", dict) as weights:
            assert weights["0.bias"].tolist() == [1 / 64] * 64
        set_id = winner.answer()["ok"]["set"]
        assert weights.set_id == set_id
        with client.publish("m", {"w": torch.ones(2)}) as newer:
            assert newer.generation == "2"
    assert broker.counter("publications_failed") == 0


@pytest.mark.parametrize("kind", ["publish", "get_or_publish"])
def test_a_server_that_is_replaced_meanwhile(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The claim went with the old server: `publish` says so and leaves nothing, `get_or_publish`
    claims and writes once more, unasked."""
    copy = publishing.copy_parts
    copies: list[int] = []

    def upgrade_and_copy(*given: Any) -> None:
        if not copies:
            with broker.observer() as observer:
                observer.upgrade()
        copies.append(1)
        copy(*given)

    monkeypatch.setattr(publishing, "copy_parts", upgrade_and_copy)
    tensors = {"w": torch.ones(4)}
    with broker.client() as client:
        if kind == "publish":
            with pytest.raises(StaleEpoch, match=r"server was replaced.*publish again$"):
                client.publish("m", tensors)
            assert (broker.status()["sets"], used_bytes(broker)) == ([], 0)
        weights = client.get_or_publish("m", lambda: tensors)
        assert weights["w"].tolist() == [1.0] * 4
        assert len(copies) == 2
        (entry,) = broker.status()["sets"]
        assert (entry["id"], entry["state"]) == (weights.set_id, "sealed")
        assert used_bytes(broker) == weights.nbytes
        weights.release()


# --- what does not fit --------------------------------------------------------------------------


def test_over_budget_says_who_holds_what(
    start_broker: Callable[..., RunningBroker], start_torch_engine: StartTorchEngine
) -> None:
    """The refusal names sets, sizes, processes and pins; nothing of the refused one stays; and what
    nobody leases makes room."""
    broker = start_broker("--memory-limit", "128k")
    engine = start_torch_engine(broker)
    held = engine.ask("publish", name="held", number=1)["nbytes"]
    free = 128 * 1024 - held - 4096
    with broker.client(label="trainer") as client:
        client.publish("pinned", {"w": torch.ones(2)}).release()
        client.pin("pinned")
        with pytest.raises(OverBudget) as error:
            client.publish("large", {"w": torch.ones(30000)})
        sentence = (
            "weight set 'large' needs 120.0 KiB on device SIM-0: of a limit of 128.0 KiB, "
            f"{human(free)} are free or unused, {human(122880 - free)} too few; in use: set 1 "
            f"(held): {human(held)} leased by pid {engine.pid} (told engine), set 2 (pinned): "
            "4.0 KiB (pinned); release, unpin or evict sets, or start the broker with a larger "
            "--memory-limit"
        )
        assert error.value.sentence == sentence
        assert error.value.held[0]["nbytes"] == held
        assert [entry["id"] for entry in broker.status()["sets"]] == [1, 2]
        client.unpin("pinned")
        engine.ask("release")
        eventually(lambda: not broker.status()["sets"][0]["leases"], 5, "the release")
        with client.publish("large", {"w": torch.ones(30000)}) as weights:
            assert [entry["id"] for entry in broker.status()["sets"]] == [weights.set_id]


# --- shipped loaders ----------------------------------------------------------------------------


def ship(client: EngineClient, name: str, loader: Callable[[], Any], **options: Any) -> Any:
    return client.get_or_load(name, loader, timeout=LOADER_SECONDS * SCALE, **options)


MAIN_SCRIPT = """
import os, sys
from pathlib import Path
from engine_client import EngineClient

class Recipe:
    def tensors(self, by):
        import torch
        base = torch.arange(4.0) * by
        return {"base": base, "half": base[:2]}

def make(by):
    here, recipe = os.getpid(), Recipe()
    def loader():
        print("a loader speaks")
        assert os.getpid() != here
        return recipe.tensors(by)
    return loader

with EngineClient("simulated", directory=Path(sys.argv[1])) as client:
    for loader in (make(3.0), lambda: 1 / 0):
        with client.get_or_load("main", loader, timeout=float(sys.argv[2])) as weights:
            print(weights.how, weights.memory("base").cast("f").tolist(), weights.manifest.aliases)
    print("torch" in sys.modules)
"""


def test_shipped_from_main(generous_broker: RunningBroker, tmp_path: Path) -> None:
    """A loader of `__main__`, with a closure and a class of there, runs in another process, once;
    the engine that shipped it need not import torch."""
    script = tmp_path / "engine.py"
    script.write_text(MAIN_SCRIPT)
    limit = str(LOADER_SECONDS * SCALE)
    done = subprocess.run(
        [sys.executable, str(script), str(generous_broker.directory), limit],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * LOADER_SECONDS * SCALE,
    )
    shared = "[AliasGroup(names=['base', 'half'], offset=0, nbytes=16)]"
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"loaded [0.0, 3.0, 6.0, 9.0] {shared}",
        f"resident [0.0, 3.0, 6.0, 9.0] {shared}",
        "False",
    ]
    assert "a loader speaks" in generous_broker.log.read_text()


DIED = "the loader process died before the weights were complete: it "
FAULTS: list[tuple[Callable[[], Any], str, str, str]] = [
    (
        raises,
        "the loader tests.support.shipped.raises raised FileNotFoundError: /models/adapter",
        "loader-raised",
        "about to fail",
    ),
    (
        exits,
        DIED + "ended with exit code 3; its last words: giving up",
        "loader-exited",
        "giving up",
    ),
    (crashes, DIED + "was killed by signal 11 (SIGSEGV) without a word", "loader-crashed", ""),
    (
        is_killed,
        DIED + "was killed by signal 9 (SIGKILL), by hand or because the machine ran out of memory",
        "loader-killed",
        "",
    ),
    (
        hangs,
        DIED + "did not finish within 0.8 s and was ended",
        "loader-too-slow",
        "",
    ),
]


@pytest.mark.parametrize(
    ("loader", "sentence", "reason", "words"), FAULTS, ids=[f[0].__name__ for f in FAULTS]
)
def test_loader_that_fails(
    client: EngineClient,
    generous_broker: RunningBroker,
    loader: Callable[[], Any],
    sentence: str,
    reason: str,
    words: str,
) -> None:
    """Each way to fail has its own sentence and word; every engine that waits gets them, with what
    the loader said; nothing of it stays, and the broker goes on."""
    errors: list[LoadFailed] = []

    def wait() -> None:
        with generous_broker.client() as other, pytest.raises(LoadFailed) as caught:
            ship(other, f"bad {reason}", loader, seconds=seconds)
        errors.append(caught.value)

    seconds = 0.8 if loader is hangs else 60
    used = used_bytes(generous_broker)
    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(LoadFailed) as caught:
        ship(client, f"bad {reason}", loader, seconds=seconds)
    thread.join(LOADER_SECONDS * SCALE)
    assert len(errors) == 1
    for error in (caught.value, errors[0]):
        assert error.sentence == sentence
        assert error.reason == reason
        assert words in error.last_words
        if loader is raises:
            assert error.traceback.startswith("Traceback (most recent call last):")
            assert "in raises\n" in error.traceback
    eventually(lambda: generous_broker.loaders() == [], 15, "the end of the loader")
    assert used_bytes(generous_broker) == used
    assert client.ping().protocol == 1


def test_loader_that_prints_without_end(
    client: EngineClient, generous_broker: RunningBroker
) -> None:
    """It prints faster than anybody reads: its time is over all the same, and others are served."""

    def loader() -> Any:
        while True:
            os.write(1, b"never enough\n" * 1000)

    pings: list[float] = []

    def ask() -> None:
        with RawDealer(generous_broker.directory) as other:
            while not failed.is_set():
                pings.append(other.ping_seconds())

    failed = threading.Event()
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with pytest.raises(LoadFailed, match=r"did not finish within 2 s") as caught:
            ship(client, "endless", loader, seconds=2)
    finally:
        failed.set()
        asking.join()
    assert caught.value.reason == "loader-too-slow"
    assert "never enough" in caught.value.last_words
    assert max(pings) < 0.5 * SCALE


def test_loader_that_cannot_travel(client: EngineClient) -> None:
    """A closure over a lock is refused here, before anything is sent."""
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be shipped: TypeError: .*lock.*inside of it$"):
        client.get_or_load("lock", lambda: {"w": torch.ones(int(lock.locked()))})


def test_loader_leaves_no_process(client: EngineClient, generous_broker: RunningBroker) -> None:
    """Processes that the code started end with the loader."""

    def loader() -> Any:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid} ", flush=True)
        os._exit(1)

    with pytest.raises(LoadFailed) as error:
        ship(client, "parent", loader)
    child = int(error.value.last_words.split()[1])
    eventually(lambda: not is_alive(child), 5, "the end of the loader's child")


def test_broker_that_runs_no_loaders(broker: RunningBroker, tmp_path: Path) -> None:
    """Without --allow-loaders the code is refused, however often it is sent, and never run."""
    trace = tmp_path / "ran"

    def loader() -> Any:
        trace.touch()
        return {}

    with broker.client() as client:
        for _ in range(300):  # more than may wait for their request: each is closed with its answer
            with pytest.raises(BadRequest, match=r"^this broker runs no loaders .*--allow-loaders"):
                client.get_or_load("m", loader)
        client.publish("m", {"w": torch.ones(1)}).release()
    assert not trace.exists()
    assert broker.counter("loads_started") == 0
    assert "loader-started" not in broker.log.read_text()
