"""A limit on memory: over-budget with its numbers, eviction of what nobody uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.amounts import human
from broker.errors import OverBudget
from engine_client import Checkpoint
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import eventually
from tests.support.processes import RunningBroker
from tests.support.stored import small_checkpoint

SET_BYTES = 4 * (1 << 16)
LIMIT_BYTES = 2 * SET_BYTES + SET_BYTES // 2
"""Room for two sets and a half."""

StartBroker = Callable[..., RunningBroker]


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[RunningBroker]:
    with private_directory() as directory, brokers(directory) as start:
        yield start("--memory-limit", str(LIMIT_BYTES))


@pytest.fixture
def limited(empty_broker: RunningBroker) -> RunningBroker:
    return empty_broker


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Checkpoint]:
    return [Checkpoint(small_checkpoint(tmp_path / str(seed), seed)) for seed in range(4)]


def resident(broker: RunningBroker) -> list[int]:
    return [entry["id"] for entry in broker.status()["sets"]]


def test_weights_larger_than_the_limit(limited: RunningBroker, tmp_path: Path) -> None:
    """Weights above the limit are over-budget: needed, free, limit; nothing is left behind."""
    large = small_checkpoint(tmp_path / "large", tensors=11)
    with limited.client() as client:
        with pytest.raises(OverBudget, match="--memory-limit") as caught:
            client.acquire(Checkpoint(large))
        error = caught.value
        assert (error.requested, error.free, error.limit) == (
            11 * (1 << 16),
            LIMIT_BYTES,
            LIMIT_BYTES,
        )
        for number in (error.requested, error.free, error.limit):
            assert human(number) in error.sentence
        assert repr(str(large)) in error.sentence
        assert limited.status()["sets"] == []
        assert limited.free_bytes() == LIMIT_BYTES
        assert limited.slabs() == 0
        eventually(lambda: limited.loaders() == [], 2, "the end of the loader")
        with client.acquire(Checkpoint(small_checkpoint(tmp_path / "small"))) as weights:
            assert weights.how == "loaded"


def test_least_recently_used_makes_room(
    limited: RunningBroker, checkpoints: list[Checkpoint]
) -> None:
    """Unleased sets make room for what is asked for, the least recently used first."""
    with limited.client() as client:
        ids = []
        step = limited.counts()
        for checkpoint in checkpoints[:2]:
            with client.acquire(checkpoint) as weights:
                ids.append(weights.set_id)
        client.acquire(checkpoints[0]).release()  # used again, so the second is the older
        with client.acquire(checkpoints[2]) as third:
            assert resident(limited) == [ids[0], third.set_id]
        assert step.added("evictions") == 1
        eventually(lambda: limited.slabs() == 2, 2, "the end of the evicted slab")
        with client.acquire(checkpoints[0]) as first:
            assert first.how == "resident"


def test_leased_sets_stay(limited: RunningBroker, checkpoints: list[Checkpoint]) -> None:
    """What is leased makes no room: over-budget names who holds it, and it stays readable."""
    with limited.client() as client:
        held = [client.acquire(checkpoint) for checkpoint in checkpoints[:2]]
        step = limited.counts()
        with pytest.raises(OverBudget) as caught:
            client.acquire(checkpoints[2])
        assert caught.value.free == LIMIT_BYTES - 2 * SET_BYTES
        for weights in held:
            assert f"set {weights.set_id}" in caught.value.sentence
        assert resident(limited) == [weights.set_id for weights in held]
        assert step.added("evictions") == 0
        assert all(bytes(weights.slab_memory()) for weights in held)
        held[0].release()
        with client.acquire(checkpoints[2]) as third:
            assert resident(limited) == [held[1].set_id, third.set_id]
        held[1].release()


def test_evicted_but_leased_memory_is_not_free(
    limited: RunningBroker, checkpoints: list[Checkpoint]
) -> None:
    """Evicting a leased set frees nothing before its last lease ends."""
    with limited.client() as client:
        held = [client.acquire(checkpoint) for checkpoint in checkpoints[:2]]
        client.evict(str(held[0].set_id))
        with pytest.raises(OverBudget):
            client.acquire(checkpoints[2])
        held[0].release()
        client.acquire(checkpoints[2]).release()
        held[1].release()


def test_pinned_sets_stay(start_broker: StartBroker, checkpoints: list[Checkpoint]) -> None:
    """A preloaded set stays under memory pressure though nobody leases it."""
    preloaded = checkpoints[0]
    broker = start_broker("--memory-limit", str(LIMIT_BYTES), "--preload", str(preloaded.path))
    eventually(lambda: any(e["pinned"] for e in broker.status()["sets"]), 20, "the preload")
    with broker.client() as client:
        for checkpoint in checkpoints[1:]:
            client.acquire(checkpoint).release()
        assert broker.counter("evictions") == 2
        with client.acquire(preloaded) as weights:
            assert weights.how == "resident"
