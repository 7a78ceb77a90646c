"""New generations replace old ones under engines that run: nobody sees a mixture, nothing stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from broker.cli import main
from broker.errors import Mismatch, NotFound, RequestTimeout, UsageError
from engine_client import Checkpoint, EngineClient
from engine_client.watching import BrokerStopping, Evicted, NewGeneration
from tests.support.clock import eventually
from tests.support.nursery import BornEngine
from tests.support.processes import RIGHT_SECONDS, RunningBroker
from tests.support.stored import small_checkpoint
from tests.support.torch_engine import WIDTH

GENERATIONS = 50
SLAB_BYTES = 36864
"""Of the model of tests/support/torch_engine.py."""

StartTorchEngine = Callable[[RunningBroker], BornEngine]


@pytest.fixture
def client(shared_broker: RunningBroker) -> Iterator[EngineClient]:
    with shared_broker.client() as client:
        yield client
    shared_broker.evict_all()


def publish(client: EngineClient, name: str, value: float, **options: Any) -> int:
    """A small generation whose lease is given back at once: its set."""
    weights = client.publish(name, {"w": torch.full((4,), value)}, **options)
    weights.release()
    return weights.set_id


def resident(client: EngineClient) -> list[int]:
    return [entry["id"] for entry in client.status()["sets"]]


def expected_output(number: int) -> float:
    """What a whole model of this number answers: two layers of weights and biases number/64."""
    first = number + number / 64
    return WIDTH * (number * first + number / 64)


# --- under load ---------------------------------------------------------------------------------


def test_hot_swap_under_load(
    start_broker: Callable[..., RunningBroker], start_torch_engine: StartTorchEngine
) -> None:
    """Forward passes in a loop while 50 generations are published: every output is exactly one
    generation's; memory for four is enough (the newest, the one being written, and the engine's two
    while it moves); nothing is resident that is not one of these; in the end one is."""
    broker = start_broker("--memory-limit", str(4 * SLAB_BYTES))
    publisher, engine = start_torch_engine(broker), start_torch_engine(broker)
    assert publisher.ask("publish", name="m", number=1)["nbytes"] == SLAB_BYTES
    assert engine.ask("bind", name="m") == expected_output(1)
    publisher.ask("release")
    engine.tell("follow", name="m", last=str(GENERATIONS))
    publisher.tell("publish_many", name="m", first=2, last=GENERATIONS)
    statuses = []
    while not (publisher.has_answered() and engine.has_answered()):
        statuses.append(broker.status()["sets"])
    labels = publisher.answer()["ok"]
    assert labels == [str(number) for number in range(2, GENERATIONS + 1)]
    passes = engine.answer()["ok"]
    assert {output for label, output in passes if output != expected_output(int(label))} == set()
    seen = [int(label) for label, _output in passes]
    assert seen == sorted(seen)
    assert len(set(seen)) > 3, "the engine saw too few generations for this to mean anything"
    superfluous = [
        entry
        for sets in statuses
        for entry in sets
        if entry["state"] in ("sealed", "draining") and not entry["leases"] and not entry["newest"]
    ]
    assert superfluous == []
    engine.ask("unbind")
    eventually(lambda: len(broker.status()["sets"]) == 1, RIGHT_SECONDS, "one generation")
    eventually(lambda: broker.slabs() == 1, RIGHT_SECONDS, "the end of all other slabs")
    eventually(lambda: not broker.status()["sets"][0]["leases"], RIGHT_SECONDS, "the last release")
    (entry,) = broker.status()["sets"]
    assert entry["names"] == {"m": str(GENERATIONS)}
    assert broker.counter("evictions") == 0
    print(f"{len(passes)} passes, {len(set(seen))} generations seen, {len(statuses)} statuses")


# --- which generation ---------------------------------------------------------------------------


def test_the_newest_or_the_one_demanded(client: EngineClient) -> None:
    """By name an engine gets the newest; ranks that agree on a label get that, while it lives; who
    is on an old one keeps it, and its last release frees it."""
    first = client.publish("m", {"w": torch.full((4,), 1.0)}, generation="red")
    second = client.publish("m", {"w": torch.full((4,), 2.0)})
    assert (first.generation, second.generation) == ("red", "1")
    with client.acquire("m") as newest, client.acquire("m", generation="red") as demanded:
        assert (newest.set_id, demanded.set_id) == (second.set_id, first.set_id)
        assert first["w"].tolist() == demanded["w"].tolist() == [1.0] * 4
        assert resident(client) == [first.set_id, second.set_id]
        first.release()
    eventually(lambda: resident(client) == [second.set_id], RIGHT_SECONDS, "the end of the old one")
    with pytest.raises(NotFound, match=r"^'m', generation 'red', is not resident .* is 1$"):
        client.acquire("m", generation="red")
    second.release()
    assert resident(client) == [second.set_id]


def test_a_waiting_rank_gets_the_generation_it_demanded(client: EngineClient) -> None:
    """Ranks of another layout are other sets of the same label."""
    layouts = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
    keys = [
        client.key_of({"key": {"device": "SIM-0", "name": "m", "layout": layout}})
        for layout in layouts
    ]
    for value in (1.0, 2.0):
        for key in keys:
            client.publish(key, {"w": torch.full((4,), value)}, generation=f"step-{value:g}")
    shards = [
        client.acquire("m", layout=layout, format="hf", generation="step-2") for layout in layouts
    ]
    assert {shard.generation for shard in shards} == {"step-2"}
    assert len({shard.set_id for shard in shards}) == 2
    with pytest.raises(Mismatch) as error:
        client.acquire("m", layout={"tp_rank": 0, "tp_size": 4})
    assert error.value.differing["layout"]["wanted"] == {"tp_rank": 0, "tp_size": 4}


def test_a_pinned_generation_stays(client: EngineClient) -> None:
    """Superseded and leased by nobody, it is there until it is not pinned any more."""
    first = publish(client, "m", 1.0, generation="golden")
    assert client.pin("m").sets == [first]
    second = publish(client, "m", 2.0)
    assert resident(client) == [first, second]
    with client.acquire("m", generation="golden") as golden:
        assert golden["w"].tolist() == [1.0] * 4
    assert resident(client) == [first, second]
    client.unpin(str(first))
    assert resident(client) == [second]


def test_memory_is_made_from_what_is_used_least(
    start_broker: Callable[..., RunningBroker],
) -> None:
    """Names nobody leases give way, the one unused for longest first, and only as many as must."""
    broker = start_broker("--memory-limit", str(4 * 4096))
    with broker.client() as client, client.watch("") as watch:
        sets = {name: publish(client, name, 1.0) for name in "abcd"}
        client.acquire("a").release()
        large = client.publish("e", {"w": torch.ones(2048)})
        assert resident(client) == [sets["a"], sets["d"], large.set_id]
        events = [watch.next(10) for _ in range(7)]
        assert events[4:6] == [Evicted(name, sets[name], "memory is needed") for name in ("b", "c")]
        with pytest.raises(NotFound):
            client.acquire("b")
        large.release()


# --- watching -----------------------------------------------------------------------------------


def test_watchers_hear_in_order(client: EngineClient) -> None:
    """Each newer generation of the name and each eviction, and nothing of other names."""
    with client.watch("m") as watch, client.watch("") as everything:
        first = publish(client, "m", 1.0)
        other = publish(client, "n", 1.0)
        second = publish(client, "m", 2.0, generation="two")
        client.evict("m")
        of_m = [
            NewGeneration("m", str(number_of(watch.next(10))), first),
            NewGeneration("m", "two", second),
            Evicted("m", second, "evict"),
        ]
        assert [watch.next(10) for _ in range(2)] == of_m[1:]
        heard = [everything.next(10) for _ in range(4)]
        assert heard[0] == of_m[0]
        assert isinstance(heard[1], NewGeneration)
        assert (heard[1].name, heard[1].set) == ("n", other)
        assert heard[2:] == of_m[1:]
        with pytest.raises(RequestTimeout, match=r"^no event of 'm' within 0.01 s$"):
            watch.next(0.01)


def number_of(event: object) -> str:
    assert isinstance(event, NewGeneration)
    return event.generation


def test_two_watches_of_a_name(client: EngineClient) -> None:
    """The end of one does not end the other; one that is closed ends whoever waits in it."""
    first, second = client.watch("m"), client.watch("m")
    first.close()
    first.close()
    assert list(first) == []
    with pytest.raises(UsageError, match=r"^the watch of 'm' is over$"):
        first.next()
    set_id = publish(client, "m", 1.0)
    event = second.next(10)
    assert isinstance(event, NewGeneration)
    assert event.set == set_id
    second.close()
    third = client.watch("m")
    assert isinstance(_published(client, third), NewGeneration)
    third.close()


def _published(client: EngineClient, watch: Any) -> object:
    publish(client, "m", 2.0)
    return watch.next(10)


def test_the_end_of_the_broker_is_the_last_event(
    start_broker: Callable[..., RunningBroker],
) -> None:
    """An orderly stop and a kill both end every watch; what is mapped stays readable."""
    for end in (RunningBroker.stop, RunningBroker.kill):
        broker = start_broker()
        with broker.client() as client:
            weights = client.publish("m", {"w": torch.ones(2)})
            watch = client.watch("m")
            end(broker)
            (event,) = list(watch)
            assert isinstance(event, BrokerStopping)
            assert weights["w"].tolist() == [1.0, 1.0]
            weights.release()


# --- on the command line ------------------------------------------------------------------------


def run(broker: RunningBroker, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main([*words, "--dir", str(broker.directory)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_checkpoints_published_by_hand(
    shared_broker: RunningBroker,
    client: EngineClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`publish` makes a checkpoint the newest generation of a name, `list` shows them, `pin` keeps
    one, and an engine that acquires the name gets the newest."""
    first, second = (str(small_checkpoint(tmp_path / str(n), seed=n)) for n in (1, 2))
    command = ("publish", first, "--name", "prod")
    code, said = run(shared_broker, capsys, *command)
    assert code == 0, said
    assert said == f"prod: generation 1, set {resident(client)[0]}, 256.0 KiB, loaded\n"
    held = client.acquire("prod")
    code, said = run(
        shared_broker, capsys, "publish", second, "--name", "prod", "--generation", "b"
    )
    newest = resident(client)[-1]
    assert (code, said) == (0, f"prod: generation b, set {newest}, 256.0 KiB, loaded\n")
    assert run(shared_broker, capsys, "pin", str(newest)) == (0, f"pinned: set {newest}\n")
    code, said = run(shared_broker, capsys, "list")
    assert [line.split() for line in said.splitlines()] == [
        ["NAME", "GENERATION", "SET", "STATE", "BYTES", "LEASES", "DTYPE", "LAYOUT", "FORMAT"],
        ["prod", "1", str(held.set_id), "draining", "262144", "1", "float32", "-", "hf"],
        ["prod", "b", str(newest), "newest", "(pinned)", "262144", "0", "float32", "-", "hf"],
    ]
    with client.acquire(Checkpoint(second)) as same, client.acquire("prod") as by_name:
        assert (same.set_id, by_name.set_id, by_name.generation) == (newest, newest, "b")
    held.release()
    code, said = run(
        shared_broker, capsys, "publish", second, "--name", "prod", "--generation", "c"
    )
    assert code == 6
    assert "generation wanted 'c', resident 'b'" in said
    assert run(shared_broker, capsys, "unpin", "prod")[0] == 0
    assert run(shared_broker, capsys, "pin", "nothing") == (
        5,
        "weight-broker: no weight set 'nothing'; `status` lists ids and names\n",
    )
    missing = tmp_path / "nowhere"
    code, said = run(shared_broker, capsys, "publish", str(missing), "--name", "prod")
    assert (code, str(missing) in said) == (5, True)
