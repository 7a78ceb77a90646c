"""Broker and engines in containers of their own: another view of processes, files and /dev/shm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_client import Checkpoint
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE, eventually
from tests.support.containers import container, why_not
from tests.support.processes import RIGHT_SECONDS, Engine, RunningBroker
from tests.support.stored import small_checkpoint

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")

StartEngine = Callable[..., Engine]


@pytest.fixture
def broker(shared_broker: RunningBroker) -> RunningBroker:
    return shared_broker


@pytest.fixture
def inside() -> Iterator[Path]:
    """A place to mount something at, in the container only."""
    with private_directory() as path:
        yield path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "checkpoint", nbytes=1 << 18)


def sessions(broker: RunningBroker) -> list[dict[str, Any]]:
    return [entry for entry in broker.status()["sessions"] if not entry["loader"]]


def test_engine_in_a_container(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: Path, inside: Path, tmp_path: Path
) -> None:
    """It finds the broker where its directory is mounted, and shares the one copy of the weights.

    The set is larger than its /dev/shm, and the checkpoint lies elsewhere for it.
    """
    there = inside / "models"
    there.mkdir()
    (inside / "broker").mkdir()
    within = container((broker.directory, inside / "broker"), (checkpoint, there))
    engine = start_engine(broker, within=within, directory=inside / "broker")
    first = engine.ask("acquire", path=str(there))
    assert first["how"] == "loaded"
    with broker.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        assert weights.how == "resident"
        assert (weights.set_id, weights.key.checkpoint) == (first["set"], first["checkpoint"])
        assert engine.ask("identity") == first["checkpoint"]
        assert broker.slabs() == 1
    assert broker.counter("loads_started") == 1


def test_engine_in_a_container_is_killed(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: Path
) -> None:
    """The broker sees it as a process with a pid, and takes its lease back within a second."""
    engine = start_engine(broker, within=container())
    engine.ask("acquire", path=str(checkpoint))
    (entry,) = sessions(broker)
    assert entry["pid"] > 0
    assert entry["command"].startswith("python")
    os.kill(entry["pid"], signal.SIGKILL)
    eventually(lambda: broker.leases() == 0, RIGHT_SECONDS, "the end of the lease")


@pytest.fixture(scope="module")
def contained() -> Iterator[RunningBroker]:
    """A broker that does not see the processes outside of its container."""
    with private_directory() as directory, brokers(directory) as start:
        broker = start(within=container())
        yield broker
        # Signals do not reach it from here: unshare does not pass them on.
        with broker.observer() as observer:
            observer.shutdown(force=True)
        assert broker.process.wait(10 * SCALE) == 0


def test_broker_in_a_container(
    contained: RunningBroker, start_engine: StartEngine, checkpoint: Path
) -> None:
    """Engines outside have no pid for it; all else works, and their death is seen at once."""
    engine = start_engine(contained)
    engine.ask("acquire", path=str(checkpoint))
    (entry,) = sessions(contained)
    assert (entry["pid"], entry["command"]) == (0, "?")
    assert entry["label"] == "told engine"
    engine.kill()
    eventually(lambda: contained.leases() == 0, RIGHT_SECONDS, "the end of the lease")


def test_forked_child_of_a_process_without_a_pid(
    contained: RunningBroker, start_engine: StartEngine, checkpoint: Path
) -> None:
    """The pidfd tells of an engine's death, though a child holds its socket and it has no pid."""
    engine = start_engine(contained)
    engine.ask("acquire", path=str(checkpoint))
    child = engine.ask("fork_unseen")
    try:
        began = time.monotonic()
        engine.kill()
        eventually(lambda: contained.leases() == 0, RIGHT_SECONDS, "the end of the lease")
        assert time.monotonic() - began < RIGHT_SECONDS * SCALE
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_containers(contained: RunningBroker, checkpoint: Path, inside: Path) -> None:
    """Broker and engine in a container each, with nothing in common but the two directories."""
    (inside / "broker").mkdir()
    within = container((contained.directory, inside / "broker"))
    with Engine(contained, within=within, directory=inside / "broker") as engine:
        assert engine.ask("acquire", path=str(checkpoint))["how"] in ("loaded", "hashed")
        assert engine.ask("touch") > 0
        (entry,) = sessions(contained)
        assert entry["pid"] == 0
        engine.ask("release")
