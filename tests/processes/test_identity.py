"""Which weights an engine gets: the ones it described, one copy of them, or a sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.checkpoints.identity import slab_identity
from broker.errors import BadRequest, Mismatch, NotFound, UsageError
from broker.weights import WeightKey
from engine_client import Checkpoint, EngineClient
from tests.support.clock import eventually
from tests.support.processes import Engine, LoaderFault, RunningBroker
from tests.support.stored import small_checkpoint

FILE = "model.safetensors"


@pytest.fixture
def client(empty_broker: RunningBroker) -> Iterator[EngineClient]:
    """A client of a broker without any set."""
    with empty_broker.client() as client:
        yield client


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "checkpoint")


def stored_bytes(checkpoint: Path, tensor: int = 0, nbytes: int = 1 << 16) -> bytes:
    """The bytes of a small checkpoint's tensor as they lie in its file, last tensor last."""
    data = (checkpoint / FILE).read_bytes()
    at = len(data) - (4 - tensor) * nbytes
    return data[at : at + nbytes]


def served_bytes(client: EngineClient, weights: Checkpoint | WeightKey | str) -> tuple[str, bytes]:
    """How an acquire was served, and the first tensor's bytes it was served with."""
    with client.acquire(weights) as served:
        return served.how, bytes(served.memory("layer.0.weight"))


# --- equal and different bytes ------------------------------------------------------------------


def test_equal_headers_different_bytes(
    shared_broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """Two fine-tunes with equal headers are two sets, and each engine gets its own bytes."""
    first, second = (small_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab"))
    assert first.joinpath(FILE).stat().st_size == second.joinpath(FILE).stat().st_size
    with client.acquire(Checkpoint(first)) as one, client.acquire(Checkpoint(second)) as other:
        assert one.set_id != other.set_id
        assert one.key.checkpoint != other.key.checkpoint
        assert (one.how, other.how) == ("loaded", "loaded")
        assert bytes(one.memory("layer.0.weight")) == stored_bytes(first)
        assert bytes(other.memory("layer.0.weight")) == stored_bytes(second)
    assert shared_broker.slabs() == 2


def test_another_dtype_is_another_set(
    shared_broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """Converted once by a loader, then there for everybody; beside the weights as stored."""
    stored = small_checkpoint(tmp_path / "checkpoint", dtype="BF16")
    single = Checkpoint(stored, dtype="float32")
    with client.acquire(Checkpoint(stored)) as plain, client.acquire(single) as one:
        loads = shared_broker.counter("loads_started")
        with client.acquire(single) as again:
            assert (one.how, again.how) == ("loaded", "resident")
            assert again.set_id == one.set_id != plain.set_id
        assert shared_broker.counter("loads_started") == loads
        assert (plain.key.dtype, one.key.dtype) == ("bfloat16", "float32")
        halves, whole = plain.memory("layer.0.weight"), one.memory("layer.0.weight")
        assert bytes(whole[2::4]) == bytes(halves[0::2])  # bfloat16 is the upper half of float32
        assert bytes(whole[3::4]) == bytes(halves[1::2])
        assert not any(whole[0::4])
        assert not any(whole[1::4])
        assert slab_identity(one.manifest, one.slab_memory()) == one.key.checkpoint
        del halves, whole


def test_a_dtype_that_is_not_converted_to(client: EngineClient, checkpoint: Path) -> None:
    """Refused with those that are possible; exceptions need a rule to be exceptions from."""
    with pytest.raises(BadRequest, match="weights cannot be converted to 'float8_e4m3fn'"):
        client.acquire(Checkpoint(checkpoint, dtype="float8_e4m3fn"))
    with pytest.raises(UsageError, match="exceptions say nothing without a dtype"):
        Checkpoint(checkpoint, exceptions={"layer.0.weight": "float32"})


def test_rewritten_in_place(client: EngineClient, checkpoint: Path, tmp_path: Path) -> None:
    """A file rewritten in place, size and mtime as before, is loaded anew; old tensors stay."""
    file = checkpoint / FILE
    before = file.stat()
    old = client.acquire(Checkpoint(checkpoint))
    old_bytes = stored_bytes(checkpoint)
    with file.open("r+b") as opened:
        opened.write((small_checkpoint(tmp_path / "other", seed=9) / FILE).read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )
    with client.acquire(Checkpoint(checkpoint)) as new:
        assert new.how == "loaded"
        assert new.set_id != old.set_id
        assert bytes(new.memory("layer.0.weight")) == stored_bytes(checkpoint) != old_bytes
    assert bytes(old.memory("layer.0.weight")) == old_bytes
    old.release()


def touch_owner(checkpoint: Path, _other: Path) -> Path:
    status = (checkpoint / FILE).stat()
    os.chown(checkpoint / FILE, status.st_uid, status.st_gid)
    return checkpoint


def touch_mode(checkpoint: Path, _other: Path) -> Path:
    (checkpoint / FILE).chmod((checkpoint / FILE).stat().st_mode)
    return checkpoint


def hard_link(checkpoint: Path, other: Path) -> Path:
    other.mkdir()
    (other / FILE).hardlink_to(checkpoint / FILE)
    return other


def copy(checkpoint: Path, other: Path) -> Path:
    shutil.copytree(checkpoint, other)
    return other


def other_name(checkpoint: Path, other: Path) -> Path:
    other.mkdir()
    shutil.copy(checkpoint / FILE, other / "weights.safetensors")
    return other / "weights.safetensors"


def test_same_bytes_no_second_copy(
    shared_broker: RunningBroker, client: EngineClient, checkpoint: Path, tmp_path: Path
) -> None:
    """The same bytes under other stamps are read once, found resident, and then known at once."""
    with client.acquire(Checkpoint(checkpoint)) as weights:
        set_id = weights.set_id
    free = shared_broker.free_bytes()
    for change in (touch_owner, touch_mode, hard_link, copy, other_name):
        step = shared_broker.counts()
        same = change(checkpoint, tmp_path / change.__name__)
        assert served_bytes(client, Checkpoint(same)) == ("hashed", stored_bytes(checkpoint))
        assert [entry["id"] for entry in shared_broker.status()["sets"]] == [set_id]
        assert step.added("loads_shared_by_content") == 1
        assert shared_broker.free_bytes() == free
        with client.acquire(Checkpoint(same)) as again:
            assert (again.how, again.set_id) == ("resident", set_id), change
        assert step.added("loads_started") == 1  # the one that only read


def test_file_and_its_folder(client: EngineClient, checkpoint: Path) -> None:
    """A folder and the one file in it are the same checkpoint, at once."""
    assert served_bytes(client, Checkpoint(checkpoint))[0] == "loaded"
    assert served_bytes(client, Checkpoint(checkpoint / FILE))[0] == "resident"


def test_copy_asked_for_during_the_load(
    shared_broker: RunningBroker,
    client: EngineClient,
    checkpoint: Path,
    tmp_path: Path,
    start_engine: Callable[..., Engine],
) -> None:
    """A copy that is asked for while the first is being loaded waits for it and shares it."""
    twin = copy(checkpoint, tmp_path / "twin")
    step = shared_broker.counts()
    first, second = start_engine(shared_broker), start_engine(shared_broker)
    shared_broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    first.tell("acquire", path=str(checkpoint))
    shared_broker.stopped_loader()
    second.tell("acquire", path=str(twin))
    eventually(lambda: shared_broker.waiting() == 2, 10, "two waiting requests")
    assert step.added("loads_started") == 1
    shared_broker.let_loader_go()
    one, other = first.answer()["ok"], second.answer()["ok"]
    assert (one["how"], other["how"]) == ("loaded", "hashed")
    assert one["set"] == other["set"]
    assert (len(shared_broker.status()["sets"]), step.added("sets_sealed")) == (1, 1)


# --- demands ------------------------------------------------------------------------------------


DEMANDS: list[tuple[dict[str, Any], Any]] = [
    ({"dtype": "bfloat16"}, "float32"),
    ({"layout": {"tp_rank": 1, "tp_size": 2}}, {}),
    ({"format": "vllm-0.32.0"}, "hf"),
    ({"quantization": "fp8"}, ""),
]
"""A demand that a small checkpoint does not meet, and what it has instead."""


@pytest.mark.parametrize("is_resident", [False, True])
def test_mismatch_names_the_field(
    shared_broker: RunningBroker, client: EngineClient, checkpoint: Path, is_resident: bool
) -> None:
    """A demand the weights do not meet is a mismatch with field, ours and theirs."""
    asked: list[Checkpoint | str] = [Checkpoint(checkpoint)]
    if is_resident:
        client.acquire(Checkpoint(checkpoint, "line")).release()
        asked.append("line")
    for demand, has in DEMANDS:
        ((field, wanted),) = demand.items()
        for weights in asked:
            with pytest.raises(Mismatch, match=field) as caught:
                client.acquire(weights, **demand)
            assert caught.value.differing == {field: {"wanted": wanted, "resident": has}}
            assert repr(wanted) in caught.value.sentence
    expected = 1 if is_resident else 0
    eventually(lambda: len(shared_broker.status()["sets"]) == expected, 5, "no set too many")


def test_fitting_demands_are_served(client: EngineClient, checkpoint: Path) -> None:
    """A demand for what is there is no obstacle, before and after the load."""
    for how in ("loaded", "resident"):
        weights = client.acquire(Checkpoint(checkpoint), dtype="float32", format="hf", layout={})
        assert weights.how == how
        weights.release()


def test_acquire_by_key(client: EngineClient, checkpoint: Path, tmp_path: Path) -> None:
    """A set's whole key finds it; the same key with another content is not found."""
    with client.acquire(Checkpoint(checkpoint)) as weights:
        key = weights.key
        assert served_bytes(client, key) == ("resident", stored_bytes(checkpoint))
    with pytest.raises(NotFound, match="blake3:0000"):
        client.acquire(WeightKey(device=key.device, checkpoint="blake3:0000"))
    with pytest.raises(BadRequest, match="GPU-1"):
        client.acquire(WeightKey(device="GPU-1", checkpoint=key.checkpoint))


def test_acquire_of_nothing(client: EngineClient) -> None:
    """Something that names no weights is refused with a sentence."""
    with pytest.raises(BadRequest, match="PosixPath"):
        client.acquire(Path("/models/m"))  # type: ignore[call-overload]
    for nothing in ("", "\n", "x" * 300):
        with pytest.raises(BadRequest, match="name"):
            client.acquire(nothing)


# --- names and generations ----------------------------------------------------------------------


def test_unknown_name_lists_the_known(client: EngineClient, checkpoint: Path) -> None:
    """A name nobody has given is not found; the sentence lists the names there are."""
    with pytest.raises(NotFound, match="no named set is resident"):
        client.acquire("nobody")
    client.acquire(Checkpoint(checkpoint, "assistant")).release()
    with pytest.raises(NotFound, match=r"'nobody'.*assistant"):
        client.acquire("nobody")


def test_checkpoints_without_name_are_of_no_line(
    shared_broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """Two folders called `final` never become generations of each other."""
    for seed, run in enumerate("ab"):
        final = small_checkpoint(tmp_path / run / "final", seed)
        with client.acquire(Checkpoint(final)) as weights:
            assert weights.generation is None
    assert len(shared_broker.status()["sets"]) == 2
    with pytest.raises(NotFound):
        client.acquire("final")


def test_generations(client: EngineClient, tmp_path: Path) -> None:
    """A name means its newest generation, or the one that is demanded while somebody has it."""
    first, second = (small_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab"))
    old = client.acquire(Checkpoint(first, "chat"))
    assert served_bytes(client, "chat") == ("resident", stored_bytes(first))
    new = client.acquire(Checkpoint(second, "chat"))
    assert (old.generation, new.generation) == ("1", "2")
    assert served_bytes(client, "chat")[1] == stored_bytes(second)
    with client.acquire("chat", generation="1") as again:
        assert again.set_id == old.set_id
    with pytest.raises((NotFound, Mismatch), match="'7'"):
        client.acquire("chat", generation="7")
    old.release()
    with pytest.raises((NotFound, Mismatch), match="'1'"):
        client.acquire("chat", generation="1")
    new.release()


def test_superseded_generation_is_freed(
    shared_broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """When a newer generation is there, the old one goes with its last lease."""
    first, second = (small_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab"))
    old = client.acquire(Checkpoint(first, "chat"))
    new = client.acquire(Checkpoint(second, "chat"))
    assert shared_broker.slabs() == 2
    old.release()
    eventually(lambda: shared_broker.slabs() == 1, 2, "the end of the old slab")
    (entry,) = shared_broker.status()["sets"]
    assert entry["id"] == new.set_id
    new.release()
