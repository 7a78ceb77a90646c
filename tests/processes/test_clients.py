"""Clients: threads, memory views, garbage, and what the broker process itself weighs."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.errors import BadRequest, BrokerError, BrokerLost, ShuttingDown, UsageError
from engine_client import Checkpoint, EngineClient, WeightSet
from tests.support.clock import SCALE, eventually
from tests.support.processes import LoaderFault, RunningBroker
from tests.support.stored import small_checkpoint

THREADS = 8
ROUNDS = 15
CROWD = 64
CROWD_ROUNDS = 10
RESIDENT_LIMIT_BYTES = 60 << 20
WAIT_SECONDS = 20.0
DROPPED = "a client that is dropped"


# --- the broker's own weight --------------------------------------------------------------------


def test_broker_is_small_and_without_torch(broker: RunningBroker, checkpoint: Checkpoint) -> None:
    """Before its first load the broker takes under 60 MB, and it never maps torch."""
    with broker.client() as client:
        client.ping()
        before = broker.resident_bytes()
        assert before < RESIDENT_LIMIT_BYTES
        client.acquire(checkpoint).release()
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in broker.processes())
    assert "/torch/" not in maps
    assert "numpy" not in maps
    assert "zmq" in maps
    print(f"broker resident before the first load: {before / 1e6:.1f} MB")


# --- threads ------------------------------------------------------------------------------------


def test_one_client_in_eight_threads(shared_broker: RunningBroker, tmp_path: Path) -> None:
    """Eight threads use one client at once: each gets what it asked for, no lease is left."""
    wanted = [small_checkpoint(tmp_path / str(seed), seed) for seed in range(3)]

    def work(client: EngineClient, number: int) -> None:
        for turn in range(ROUNDS):
            path = wanted[(number + turn) % len(wanted)]
            with client.acquire(Checkpoint(path)) as weights:
                stored = (path / "model.safetensors").read_bytes()
                assert bytes(weights.memory("layer.3.weight")) == stored[-(1 << 16) :]
            assert client.ping().epoch == client.epoch

    with shared_broker.client() as client, ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work, client, number) for number in range(THREADS)]:
            future.result(WAIT_SECONDS * SCALE)
        eventually(lambda: shared_broker.leases() == 0, 1, "the end of every lease")
    assert shared_broker.counter("loads_started") == len(wanted)


def test_many_threads_ask_at_once(shared_broker: RunningBroker, checkpoint: Checkpoint) -> None:
    """A crowd of threads that ask at once, and again: no request is separated from its descriptor,
    and none is left without its request."""
    start = threading.Barrier(CROWD)

    def ask(client: EngineClient) -> WeightSet:
        start.wait(WAIT_SECONDS * SCALE)
        for _ in range(CROWD_ROUNDS):
            client.acquire(checkpoint).release()
        return client.acquire(checkpoint)

    with shared_broker.client() as client, ThreadPoolExecutor(CROWD) as pool:
        asked = [pool.submit(ask, client) for _ in range(CROWD)]
        got = [future.result(WAIT_SECONDS * SCALE) for future in asked]
        assert {weights.set_id for weights in got} == {got[0].set_id}
        eventually(lambda: shared_broker.leases() == CROWD, 1, "one lease for each")
        assert shared_broker.counter("packets_refused") == 0


def test_closing_under_threads_that_wait(shared_broker: RunningBroker, tmp_path: Path) -> None:
    """Closing a client ends the calls of its other threads at once, with a sentence."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "slow", seed=77))
    shared_broker.order_loaders(LoaderFault.STOPS_AT_START)
    client = shared_broker.client()
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(client.acquire, checkpoint) for _ in range(THREADS)]
        eventually(lambda: shared_broker.waiting() == THREADS, 10, "waiting threads")
        client.close()
        done, _pending = wait(waiting, timeout=1 * SCALE)
        assert len(done) == THREADS
    for future in waiting:
        with pytest.raises(UsageError, match="closed"):
            future.result()
    eventually(lambda: shared_broker.waiting() == 0, 1, "the end of the requests")
    shared_broker.let_loader_go()


def test_broker_killed_under_threads_that_wait(
    broker: RunningBroker, checkpoint: Checkpoint
) -> None:
    """When the broker is killed every call in flight fails at once, with an error of its own."""
    broker.order_loaders(LoaderFault.STOPS_AT_START)
    client = broker.client()
    lost = threading.Event()
    client.on_broker_lost(lost.set)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(client.acquire, checkpoint) for _ in range(THREADS)]
        eventually(lambda: broker.waiting() == THREADS, 10, "waiting threads")
        broker.stopped_loader()
        broker.kill()
        done, _pending = wait(waiting, timeout=1 * SCALE)
        assert len(done) == THREADS
    errors = [future.exception() for future in waiting]
    assert all(isinstance(error, (BrokerLost, ShuttingDown)) for error in errors)
    assert len(set(map(id, errors))) == THREADS
    assert lost.wait(1 * SCALE)
    assert not client.is_connected
    with pytest.raises(BrokerLost):
        client.ping()
    called: list[bool] = []
    client.on_broker_lost(lambda: called.append(True))
    assert called == [True]
    client.close()


class CollectingQueue(deque[Any]):
    """Whatever a call hands to the I/O thread, the garbage collector is at work just then."""

    def append(self, item: Any) -> None:
        gc.collect()
        super().append(item)


def test_lease_collected_during_a_call(
    shared_broker: RunningBroker, checkpoint: Checkpoint
) -> None:
    """A lease that the garbage collector ends in the middle of a call does not wait for itself."""
    with shared_broker.client() as client:
        weights = client.acquire(checkpoint)
        weights.itself = weights  # type: ignore[attr-defined] # only the collector ends it
        client._session._channel._outgoing = CollectingQueue()
        gc.disable()
        try:
            del weights
            client.ping()
        finally:
            gc.enable()
        eventually(lambda: shared_broker.leases() == 0, 1, "the end of the lease")


# --- clients that are dropped -------------------------------------------------------------------


def clients(broker: RunningBroker) -> int:
    """How many sessions of this process's clients there are."""
    return sum(entry["label"] == DROPPED for entry in broker.status()["sessions"])


def entries(directory: str) -> int:
    return len(list(Path(directory).iterdir()))


@pytest.mark.parametrize("waits", ["in a thread", "not yet"])
def test_closed_client_ends_its_watches(shared_broker: RunningBroker, waits: str) -> None:
    """Who waits for an event of a client that is closed, or asks for one then, is told."""
    with ThreadPoolExecutor(1) as pool:
        with shared_broker.client() as client:
            watch = client.watch("some name")
            if waits == "in a thread":
                heard = pool.submit(list, watch)
        if waits == "in a thread":
            assert heard.result(WAIT_SECONDS * SCALE) == []
    with pytest.raises(UsageError, match="the watch of 'some name' is over"):
        watch.next(timeout=WAIT_SECONDS)


def test_dropped_client_ends(shared_broker: RunningBroker) -> None:
    """A client that nobody closed and nobody has any more leaves no session, file or thread."""
    gc.collect()
    files, tasks = entries("/proc/self/fd"), entries("/proc/self/task")
    lost: list[EngineClient] = []
    dropped = [shared_broker.client(label=DROPPED) for _ in range(THREADS)]
    for client in dropped:
        client.on_broker_lost(partial(lost.append, client))  # leads back to the client
        client.watch("some name")
    assert clients(shared_broker) == THREADS
    del dropped, client
    gc.collect()
    eventually(lambda: clients(shared_broker) == 0, 1, "the end of every session")
    eventually(lambda: entries("/proc/self/fd") <= files, 1, "the end of every descriptor")
    # One may be new: it does the work that no handler may cut in two.
    eventually(lambda: entries("/proc/self/task") <= tasks + 1, 1, "the end of every thread")
    assert not lost


def test_dropped_client_lives_as_long_as_its_weights(
    shared_broker: RunningBroker, checkpoint: Checkpoint, slab_mappings: Callable[[], int]
) -> None:
    """Weights, and views of them alone, keep lease and session; with the last one both end."""
    weights = shared_broker.client(label=DROPPED).acquire(checkpoint)
    gc.collect()
    view = weights.memory("layer.1.weight")
    del weights
    gc.collect()
    assert (shared_broker.leases(), clients(shared_broker)) == (1, 1)
    assert len(bytes(view)) == view.nbytes
    del view
    eventually(lambda: shared_broker.leases() == 0, 1, "the end of the lease")
    eventually(lambda: clients(shared_broker) == 0, 1, "the end of the session")
    assert slab_mappings() == 0


# --- memory views -------------------------------------------------------------------------------


def test_release_with_a_live_view(
    shared_broker: RunningBroker, checkpoint: Checkpoint, slab_mappings: Callable[[], int]
) -> None:
    """Weights with a live view are not released; without it they are, and refuse to be read."""
    with shared_broker.client() as client:
        weights = client.acquire(checkpoint)
        view = weights.memory("layer.1.weight")[100:200]
        with pytest.raises(UsageError, match="alive"):
            weights.release()
        assert shared_broker.leases() == 1
        assert len(bytes(view)) == 100
        with pytest.raises(TypeError):
            view[0] = 0
        del view
        weights.release()
        weights.release()
        eventually(lambda: shared_broker.leases() == 0, 1, "the end of the lease")
        assert slab_mappings() == 0
        for read in (weights.slab_memory, lambda: weights.memory("layer.1.weight")):
            with pytest.raises(UsageError, match="released"):
                read()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_view_outlives_everything_else(
    start_broker: Callable[..., RunningBroker],
    checkpoint: Checkpoint,
    end: str,
    slab_mappings: Callable[[], int],
) -> None:
    """A view stays readable after its weights, its client and the broker are gone."""
    broker = start_broker()
    client = broker.client()
    weights = client.acquire(checkpoint)
    view = weights.memory("layer.2.weight")
    expected = bytes(view)
    if end == "kill":
        broker.kill()
    client.close()
    broker.stop()
    del weights, client
    gc.collect()
    assert slab_mappings() == 1
    assert bytes(view) == expected
    del view
    assert slab_mappings() == 0


def test_view_keeps_the_lease(shared_broker: RunningBroker, checkpoint: Checkpoint) -> None:
    """Weights that are forgotten while a view lives keep their lease until the view dies."""
    with shared_broker.client() as client:
        view = client.acquire(checkpoint).memory("layer.0.weight")
        gc.collect()
        client.ping()
        assert shared_broker.leases() == 1
        assert bytes(view)
        del view
        eventually(lambda: shared_broker.leases() == 0, 1, "the end of the lease")


def test_closing_gives_back_what_is_not_used(
    shared_broker: RunningBroker, checkpoint: Checkpoint, slab_mappings: Callable[[], int]
) -> None:
    """Closing a client unmaps weights that nothing reads and keeps those that a view reads."""
    client = shared_broker.client()
    unused, used = client.acquire(checkpoint), client.acquire(checkpoint)
    view = used.slab_memory()
    client.close()
    client.close()
    assert (unused.is_released, used.is_released) == (True, False)
    assert len(view) == used.nbytes
    eventually(lambda: shared_broker.leases() == 0, 1, "the end of the session's leases")
    with pytest.raises(BrokerError, match="closed"):
        client.acquire(checkpoint)
    del view
    used.release()
    assert slab_mappings() == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 8), (0, -1), (1, None), (None, 1)])
def test_bytes_that_are_not_there(
    shared_broker: RunningBroker, checkpoint: Checkpoint, offset: int | None, nbytes: int | None
) -> None:
    """A range outside the weights is a mistake of who asks, who is told the right one."""
    with shared_broker.client() as client, client.acquire(checkpoint) as weights:
        end = weights.nbytes
        assert weights.read(end, 0) == b""
        with pytest.raises(UsageError, match=rf"name a range from 0 to {end}$"):
            weights.read(end if offset is None else offset, end if nbytes is None else nbytes)


@pytest.mark.parametrize("path", ["/models/m", "./m", "there/m"])
def test_a_path_is_no_name(
    shared_broker: RunningBroker, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives a folder where a name belongs is told how to ask for a folder."""
    (tmp_path / "there" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with (
        shared_broker.client() as client,
        pytest.raises(BadRequest, match=rf"'{path}' is no name; .*Checkpoint\(path\)"),
    ):
        client.acquire(path)


def test_a_name_with_a_slash(shared_broker: RunningBroker, tmp_path: Path) -> None:
    """Models are called that: what can be published can be acquired."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c", seed=77), "team/prod")
    with (
        shared_broker.client() as client,
        client.acquire(checkpoint) as named,
        client.acquire("team/prod") as weights,
    ):
        assert weights.set_id == named.set_id


def test_empty_tensor_has_empty_memory(shared_broker: RunningBroker, tmp_path: Path) -> None:
    """A tensor without elements has memory of no bytes."""
    checkpoint = small_checkpoint(tmp_path / "empty", nbytes=0)
    with shared_broker.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        assert len(weights.memory("layer.0.weight")) == 0
        with pytest.raises(KeyError):
            weights.memory("no such tensor")
