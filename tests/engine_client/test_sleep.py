"""Weights that sleep: unmapped, given back, and mapped again at the same addresses."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear

from broker.devices.base import DeviceError
from broker.errors import BrokerLost, InternalError, NotFound, UsageError
from broker.weights import WeightKey
from engine_client import Checkpoint, EngineClient, WeightSet, sleeping
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import eventually
from tests.support.processes import RIGHT_SECONDS, ROOT, RunningBroker
from tests.support.stored import small_checkpoint

INPUT = torch.ones(1, 2)


def publish(client: EngineClient, value: float, key: WeightKey | str = "m") -> None:
    """A generation that nobody leases."""
    number = float(value)
    tensors = {"weight": torch.full((2, 2), number), "bias": torch.full((2,), number)}
    client.publish(key, tensors).release()


def bound(client: EngineClient) -> tuple[Linear, WeightSet]:
    model, weights = Linear(2, 2), client.acquire("m")
    weights.bind(model)
    return model, weights


def state(weights: WeightSet) -> str:
    return "asleep" if weights.is_asleep else "awake"


def mapped_slabs() -> int:
    """Mappings of slabs in this process, by the kernel's word."""
    return Path("/proc/self/maps").read_text().count("weight-broker-slab")


def is_reserved(address: int) -> bool:
    """Whether the kernel has given the address to this process, readable or not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


def leases(client: EngineClient) -> int:
    return sum(len(entry["leases"]) for entry in client.status()["sets"])


# --- there and back -----------------------------------------------------------------------------


def test_a_bound_module_sleeps_and_wakes(client: EngineClient) -> None:
    """Asleep nothing is mapped and no lease is held; awake the same tensor objects are at the same
    addresses with the same values, and the module runs."""
    publish(client, 3)
    model, weights = bound(client)
    before, output, parameter = model.weight.data_ptr(), model(INPUT).tolist(), model.weight
    mapped = mapped_slabs()
    weights.sleep()
    assert (state(weights), leases(client), mapped_slabs()) == ("asleep", 0, mapped - 1)
    assert is_reserved(before)
    weights.sleep()
    weights.wake()
    assert (state(weights), leases(client), mapped_slabs()) == ("awake", 1, mapped)
    assert model.weight is parameter
    assert (model.weight.data_ptr(), model(INPUT).tolist()) == (before, output)
    assert torch.equal(weights["weight"], parameter)
    weights.wake()
    assert leases(client) == 1
    weights.detach(model)
    weights.release()
    assert not is_reserved(before)


def test_sleep_again_and_again(client: EngineClient) -> None:
    """Every time is like the first; the last lease is released like any other."""
    publish(client, 3)
    weights = client.acquire("m")
    tensor = weights["weight"]
    for _ in range(10):
        weights.sleep()
        weights.wake()
        assert tensor.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    del tensor
    weights.release()
    eventually(lambda: leases(client) == 0, RIGHT_SECONDS, "the end of the lease")


def test_weights_without_tensors_sleep_too(client: EngineClient) -> None:
    """Nothing was mapped into torch yet; memory is read again after waking."""
    publish(client, 3)
    weights = client.acquire("m")
    weights.sleep()
    weights.wake()
    assert weights.memory("bias").cast("f").tolist() == [3.0, 3.0]
    weights.release()


# --- asleep -------------------------------------------------------------------------------------


def test_what_a_sleeper_refuses(client: EngineClient) -> None:
    """Everything that would touch the weights says that they are asleep; what describes them
    answers."""
    publish(client, 3)
    model, weights = bound(client)
    weights.sleep()
    attempts: list[Callable[[], Any]] = [
        lambda: weights["weight"],
        weights.tensors,
        lambda: weights.memory("weight"),
        weights.slab_memory,
        lambda: weights.bind(Linear(2, 2)),
        lambda: weights.detach(model),
        lambda: weights.swap(model),
        weights.copy,
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match=r"^these weights are asleep: wake\(\) them first$"):
            attempt()
    assert (list(weights), len(weights), weights.metadata) == (["weight", "bias"], 2, {})
    assert weights.live_tensors() == ["weight", "bias"]
    with pytest.raises(UsageError, match=r"^release: tensors of these weights are still alive"):
        weights.release()
    weights.wake()
    weights.detach(model)
    weights.release()
    for attempt in (weights.sleep, weights.wake):
        with pytest.raises(UsageError, match=r"^these weights have been released"):
            attempt()


def test_sleepers_can_be_released(client: EngineClient) -> None:
    """Without tensors at once; with them when the last has died; the addresses are given back."""
    publish(client, 3)
    model, weights = bound(client)
    address = model.weight.data_ptr()
    weights.sleep()
    weights.let_go()
    assert is_reserved(address)
    del model
    assert not is_reserved(address)
    other = client.acquire("m")
    address = other["weight"].data_ptr()
    other.sleep()
    other.release()
    assert not is_reserved(address)
    assert leases(client) == 0


def test_a_client_that_closes_over_a_sleeper(live_broker: RunningBroker) -> None:
    """It gives the addresses back; nothing wakes any more."""
    with live_broker.client() as client:
        publish(client, 3)
        weights = client.acquire("m")
        address = weights["weight"].data_ptr()
        weights.sleep()
    assert not is_reserved(address)
    with pytest.raises(UsageError, match="released"):
        weights.wake()


TOUCH_SCRIPT = """
import ctypes, sys
from pathlib import Path
from engine_client import EngineClient

client = EngineClient("simulated", directory=Path(sys.argv[1]))
weights = client.acquire("m")
address = weights._lease.mapping.address
print(ctypes.string_at(address, 4).hex(), flush=True)
weights.sleep()
print("asleep", flush=True)
ctypes.string_at(address, 4)
print("survived", flush=True)
"""


def test_touching_a_sleeper_is_a_fault(client: EngineClient, live_broker: RunningBroker) -> None:
    """SIGSEGV of the process that does it; nobody else notices."""
    publish(client, 3)
    with client.acquire("m") as weights:
        done = subprocess.run(
            [sys.executable, "-c", TOUCH_SCRIPT, str(live_broker.directory)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        assert (done.stdout, done.returncode) == ("00004040\nasleep\n", -11)
        assert weights["bias"].tolist() == [3.0, 3.0]


def test_a_forked_child_cannot_send_its_parents_weights_to_sleep(client: EngineClient) -> None:
    """Neither mapping nor lease are the child's."""
    publish(client, 3)
    weights = client.acquire("m")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            weights.sleep()
        except UsageError as error:
            os.write(writer, error.sentence.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"mapped before a fork" in os.read(reader, 4096)
    os.close(reader)
    assert weights.memory("bias").cast("f").tolist() == [3.0, 3.0]
    weights.release()


# --- what cannot sleep --------------------------------------------------------------------------


def test_a_live_memory_view_keeps_weights_awake(client: EngineClient) -> None:
    """Whoever holds it would fault: it is refused, and everything is as it was."""
    publish(client, 3)
    weights = client.acquire("m")
    view = weights.memory("bias")
    with pytest.raises(UsageError, match=r"^sleep: memory views of these weights are alive"):
        weights.sleep()
    assert view.cast("f").tolist() == [3.0, 3.0]
    assert leases(client) == 1
    del view
    weights.sleep()
    weights.release()


def test_a_device_that_cannot(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are in the sentence; what could not be unmapped stays awake, what could not be
    mapped stays asleep, and no lease is held for nothing."""
    publish(client, 3)
    weights = client.acquire("m")

    def fail(*given: object) -> None:
        raise DeviceError("call on SIM-0: out of order")

    mapping = weights._lease.mapping
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "suspend", fail)
        with pytest.raises(UsageError, match=r"^these weights cannot sleep now: call on SIM-0"):
            weights.sleep()
    assert (state(weights), leases(client)) == ("awake", 1)
    weights.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "resume", fail)
        with pytest.raises(InternalError, match=r"^the weights cannot be mapped again: call on"):
            weights.wake()
    assert state(weights) == "asleep"
    eventually(lambda: leases(client) == 0, RIGHT_SECONDS, "the end of the lease")
    weights.wake()
    assert weights["bias"].tolist() == [3.0, 3.0]
    weights.release()


# --- what became of them ------------------------------------------------------------------------


def check_gone(weights: WeightSet, sentence: str) -> None:
    with pytest.raises(NotFound) as error:
        weights.wake()
    assert error.value.sentence == (
        f"set {weights.set_id} is not resident any more: {sentence}; these weights stay asleep"
    )
    assert error.value.set == weights.set_id
    assert state(weights) == "asleep"


def test_a_newer_generation_came(client: EngineClient) -> None:
    """A sleeper holds no lease: its generation went with the next one."""
    publish(client, 3)
    model, weights = bound(client)
    weights.sleep()
    publish(client, 4)
    check_gone(weights, "it was superseded by a newer generation of 'm'")
    del model
    weights.release()


def test_it_was_evicted(client: EngineClient) -> None:
    """By hand."""
    publish(client, 3)
    weights = client.acquire("m")
    weights.sleep()
    client.evict("m")
    check_gone(weights, "it was evicted")
    weights.release()


def test_its_memory_was_needed_unless_it_is_pinned() -> None:
    """A sleeper gives way to who needs memory; a pinned one does not."""
    with private_directory() as directory, brokers(directory) as start:
        broker = start("--memory-limit", str(2 * 4096))
        with broker.client() as client:
            publish(client, 3)
            weights = client.acquire("m")
            client.pin("m")
            weights.sleep()
            publish(client, 5, "n")
            publish(client, 5, "o")
            weights.wake()
            weights.sleep()
            client.unpin("m")
            client.acquire("o").release()
            publish(client, 5, "p")
            check_gone(weights, "its memory was needed and nobody leased it")
            weights.release()


def test_the_same_content_came_back(client: EngineClient, tmp_path: Path) -> None:
    """Evicted and loaded again: another set, the same bytes at the same places."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c"))
    weights = client.acquire(checkpoint)
    tensor = weights["layer.1.weight"]
    address, first, values = tensor.data_ptr(), weights.set_id, tensor[:4].tolist()
    weights.sleep()
    client.evict(str(first))
    check_gone(weights, "it was evicted")
    with client.acquire(checkpoint) as again:
        weights.wake()
        assert weights.set_id == again.set_id != first
    assert (tensor.data_ptr(), tensor[:4].tolist()) == (address, values)
    del tensor
    weights.release()


def test_the_same_content_laid_out_otherwise(client: EngineClient) -> None:
    """Never other bytes at the old addresses: it stays asleep until the right ones are there."""
    key = WeightKey("", "m", checkpoint="content:1")
    publish(client, 3, key)
    weights = client.acquire("m")
    first = weights.set_id
    weights.sleep()
    client.evict("m")
    other = client.publish(key, {"bias": torch.full((2,), 3.0), "weight": torch.ones(2, 2)})
    with pytest.raises(NotFound) as error:
        weights.wake()
    assert error.value.sentence == (
        f"set {first} is gone, and set {other.set_id}, of the same content, is laid out in "
        "another way: these weights stay asleep; acquire them anew"
    )
    other.release()
    client.evict("m")
    publish(client, 3, key)
    weights.wake()
    assert weights["weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    weights.release()


@pytest.mark.parametrize("end", [RunningBroker.stop, RunningBroker.kill])
def test_the_broker_ended(end: Callable[[RunningBroker], object]) -> None:
    """Nothing can be mapped again: who is awake stays awake, who sleeps sleeps on."""
    with private_directory() as directory, brokers(directory) as start:
        broker = start()
        with broker.client() as client:
            publish(client, 3)
            awake, asleep = client.acquire("m"), client.acquire("m")
            tensor = awake["bias"]
            asleep.sleep()
            end(broker)
            eventually(lambda: not client.is_connected, RIGHT_SECONDS, "the end of the session")
            for attempt in (awake.sleep, asleep.wake):
                with pytest.raises(BrokerLost):
                    attempt()
            assert (state(awake), state(asleep)) == ("awake", "asleep")
            assert tensor.tolist() == [3.0, 3.0]
            del tensor
            awake.release()
            asleep.release()


@pytest.mark.parametrize("what", ["put_to_sleep", "wake_up"])
def test_an_interrupt_in_the_midst(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What was begun is done in whole, or not at all, and the weights say which: they can be woken
    and read afterwards."""
    weights = client.publish("interrupted", {"a": torch.arange(1000.0)})
    tensor = weights["a"]
    if what == "wake_up":
        weights.sleep()
    step = getattr(sleeping, what)

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        _thread.interrupt_main()
        step(*arguments)

    monkeypatch.setattr(sleeping, what, interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.sleep() if what == "put_to_sleep" else weights.wake()
    eventually(lambda: leases(client) == (not weights.is_asleep), RIGHT_SECONDS, "the right lease")
    weights.wake()
    assert (weights.is_asleep, leases(client)) == (False, 1)
    assert tensor.sum() == sum(range(1000))
    del tensor
    weights.release()
