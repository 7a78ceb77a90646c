"""Deaths of engines and loaders: within a second the books are right and everybody knows why."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_client import Checkpoint
from tests.support.clock import SCALE, eventually
from tests.support.processes import (
    RIGHT_SECONDS,
    Engine,
    LoaderFault,
    RunningBroker,
    held_slabs,
    is_alive,
    wait_until_gone,
)
from tests.support.stored import big_checkpoint, small_checkpoint

StartEngine = Callable[..., Engine]


@pytest.fixture
def broker(empty_broker: RunningBroker) -> RunningBroker:
    """One broker for all these deaths: it must come through each of them as new."""
    return empty_broker


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(small_checkpoint(tmp_path / "checkpoint"))


def check_evict_frees_everything(broker: RunningBroker) -> None:
    """What is resident is soon held by nobody: evicting it gives all memory back."""
    eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the last lease")
    (entry,) = broker.status()["sets"]
    (device,) = broker.status()["devices"].values()
    assert (device["leased"], device["idle"]) == (0, entry["nbytes"])
    with broker.observer() as observer:
        observer.evict(str(entry["id"]))
    eventually(lambda: broker.slabs() == 0, RIGHT_SECONDS, "the end of the slab")
    assert broker.free_bytes() == device["limit"]
    assert broker.status()["sets"] == []


# --- engines that hold a lease ------------------------------------------------------------------


def test_killed_engine_loses_its_lease(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """SIGKILL of an engine ends its lease within a second; evict then frees every byte."""
    engine, neighbour = start_engine(broker), start_engine(broker)
    step = broker.counts()
    engine.ask("acquire", path=checkpoint)
    neighbour.ask("acquire", path=checkpoint)
    assert broker.leases() == 2
    engine.kill()
    eventually(lambda: broker.leases() == 1, RIGHT_SECONDS, "the end of the lease")
    assert step.added("leases_reclaimed") == 1
    assert neighbour.ask("identity") == broker.status()["sets"][0]["key"]["checkpoint"]
    neighbour.ask("release")
    eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the other lease")
    check_evict_frees_everything(broker)


def test_engine_killed_while_stopped(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """A stopped engine keeps its lease however long it does not answer; killed, it loses it."""
    engine = start_engine(broker)
    engine.ask("acquire", path=checkpoint)
    os.kill(engine.pid, signal.SIGSTOP)
    with broker.client() as client:
        client.ping()
    assert broker.leases() == 1
    engine.kill()
    eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the lease")
    check_evict_frees_everything(broker)


def test_engine_that_ends_without_a_word(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """An engine that just ends, its client still open, gives back what it had."""
    engine = start_engine(broker)
    engine.ask("acquire", path=checkpoint)
    engine.close()
    assert engine.process.returncode == 0
    eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the lease")
    check_evict_frees_everything(broker)


def test_evicted_set_is_freed_when_its_engine_dies(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """A set that was evicted while leased is freed as soon as its last engine is killed."""
    engine = start_engine(broker)
    number = engine.ask("acquire", path=checkpoint)["set"]
    with broker.observer() as observer:
        evicted = observer.evict(str(number))
    assert (evicted.sets, evicted.draining) == ([number], [number])
    assert broker.status()["sets"][0]["state"] == "draining"
    assert engine.ask("identity").startswith("blake3:")
    engine.kill()
    eventually(lambda: broker.status()["sets"] == [], RIGHT_SECONDS, "the end of the set")
    eventually(lambda: broker.slabs() == 0, RIGHT_SECONDS, "the end of the slab")


# --- forked children ----------------------------------------------------------------------------


def test_forked_child_is_told_and_keeps_nothing(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """A forked child gets a clear error for all it tries, and the parent's death ends its lease."""
    engine = start_engine(broker)
    granted = engine.ask("acquire", path=checkpoint)
    forked = engine.ask("fork")
    try:
        tries = forked["tries"]
        assert tries.pop("close") == "done"
        for name, outcome in tries.items():
            assert outcome.startswith("UsageError: "), (name, outcome)
            assert "fork" in outcome, (name, outcome)
        # What the child did was its own affair.
        assert broker.leases() == 1
        assert engine.ask("identity") == granted["checkpoint"]
        assert held_slabs(forked["child"]) == set()
        engine.kill()
        eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the lease")
        assert is_alive(forked["child"])
        check_evict_frees_everything(broker)
    finally:
        os.kill(forked["child"], signal.SIGKILL)


def test_child_forked_behind_pythons_back(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """A child that a C library forked keeps the session socket open; the parent's death counts."""
    if not hasattr(os, "pidfd_open") or not _has_peer_pidfds():
        pytest.skip("SO_PEERPIDFD needs Linux 6.5: before, end-of-file alone tells of a death")
    engine = start_engine(broker)
    engine.ask("acquire", path=checkpoint)
    child = engine.ask("fork_unseen")
    try:
        engine.kill()
        eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the lease")
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def _has_peer_pidfds() -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1])) >= (6, 5)


# --- while a load is under way ------------------------------------------------------------------


def test_waiting_engine_killed(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """An engine killed while it waits leaves no request; the load serves the others."""
    broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    first, second = start_engine(broker), start_engine(broker)
    step = broker.counts()
    first.tell("acquire", path=checkpoint)
    eventually(lambda: broker.waiting() == 1, 10, "the first request")
    second.tell("acquire", path=checkpoint)
    eventually(lambda: broker.waiting() == 2, 10, "the second request")
    first.kill()  # the one whose request caused the load
    eventually(lambda: broker.waiting() == 1, RIGHT_SECONDS, "the end of the request")
    broker.let_loader_go()
    assert second.answer()["ok"]["how"] == "shared"
    assert step.added("loads_started") == 1


def test_every_waiting_engine_killed(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """A load that nobody waits for any more ends by itself; its set is there for the next."""
    broker.order_loaders(LoaderFault.STOPS_AT_START)
    engine = start_engine(broker)
    engine.tell("acquire", path=checkpoint)
    loader = broker.stopped_loader()
    engine.kill()
    eventually(lambda: broker.waiting() == 0, RIGHT_SECONDS, "the end of the request")
    broker.let_loader_go()
    wait_until_gone(loader)
    with broker.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        assert weights.how == "resident"
    check_evict_frees_everything(broker)


@pytest.mark.parametrize("fault", [LoaderFault.STOPS_AT_START, LoaderFault.STOPS_WHILE_WRITING])
def test_loader_killed(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str, fault: LoaderFault
) -> None:
    """SIGKILL of the loader: all waiting engines are told within a second, the next ask works."""
    broker.order_loaders(fault)
    engines = [start_engine(broker), start_engine(broker)]
    for engine in engines:
        engine.tell("acquire", path=checkpoint)
    loader = broker.stopped_loader()
    eventually(lambda: broker.waiting() == 2, 10, "two waiting requests")
    writing = fault is LoaderFault.STOPS_WHILE_WRITING
    assert broker.slabs() == (1 if writing else 0)
    os.kill(loader, signal.SIGKILL)
    answers = [engine.answer(RIGHT_SECONDS) for engine in engines]
    assert {answer["error"] for answer in answers} == {"LoadFailed"}
    assert answers[0]["sentence"] == answers[1]["sentence"]
    assert "SIGKILL" in answers[0]["sentence"]
    assert answers[0]["fields"]["reason"] == "loader-killed"
    check_all_is_free(broker)
    broker.order_loaders(None)
    assert engines[0].ask("acquire", path=checkpoint)["how"] == "loaded"


def check_all_is_free(broker: RunningBroker) -> None:
    (device,) = broker.status()["devices"].values()
    assert broker.status()["sets"] == []
    assert device["free"] == device["limit"]
    eventually(lambda: broker.slabs() == 0, RIGHT_SECONDS, "the end of the slab")
    eventually(lambda: broker.loaders() == [], RIGHT_SECONDS, "the end of the loader")


def test_last_words_of_a_loader(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """What a dying loader said last reaches the engine that waited for it."""
    broker.order_loaders(LoaderFault.DIES_WHILE_WRITING)
    engine = start_engine(broker)
    engine.tell("acquire", path=checkpoint)
    answer = engine.answer()
    assert answer["error"] == "LoadFailed"
    assert "DyingLoader: these are its last words" in answer["sentence"]
    check_all_is_free(broker)
    broker.order_loaders(None)
    assert engine.ask("acquire", path=checkpoint)["how"] == "loaded"


def test_device_runs_full_while_loading(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """Memory that runs out behind the books' back is over-budget, and nothing is left of it."""
    broker.order_loaders(LoaderFault.FINDS_THE_DEVICE_FULL)
    engine = start_engine(broker)
    engine.tell("acquire", path=checkpoint)
    answer = engine.answer()
    assert answer["error"] == "OverBudget"
    assert answer["fields"]["requested"] > 0
    check_all_is_free(broker)
    broker.order_loaders(None)
    assert engine.ask("acquire", path=checkpoint)["how"] == "loaded"


def test_engine_that_cannot_map_keeps_no_lease(
    broker: RunningBroker, start_engine: StartEngine, tmp_path: Path
) -> None:
    """An engine that is granted weights it then cannot map holds no lease of them."""
    large = str(big_checkpoint(tmp_path / "large", shards=1, shard_bytes=64 << 20))
    engine = start_engine(broker)
    engine.ask("run_out_of_address_space")
    engine.tell("acquire", path=large)
    answer = engine.answer()
    assert answer["error"] == "InternalError"
    assert "cannot be mapped" in answer["sentence"]
    eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the lease")
    check_evict_frees_everything(broker)


def test_load_evicted_under_way(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str
) -> None:
    """Evicting a set that is being loaded ends its loader and tells the engine that waits."""
    broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    engine = start_engine(broker)
    engine.tell("acquire", path=checkpoint)
    loader = broker.stopped_loader()
    (entry,) = broker.status()["sets"]
    with broker.observer() as observer:
        assert observer.evict(str(entry["id"])).sets == [entry["id"]]
    answer = engine.answer(RIGHT_SECONDS)
    assert answer["error"] == "Cancelled"
    assert "evicted" in answer["sentence"]
    wait_until_gone(loader, RIGHT_SECONDS * SCALE)
    check_all_is_free(broker)
