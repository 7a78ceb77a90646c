"""From a module or a mapping to a set that others map: nothing is lost."""

from __future__ import annotations

import _thread
import ctypes
import gc
import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from broker.errors import Busy, UsageError
from broker.weights import WeightKey
from engine_client import EngineClient, WeightSet, publishing
from engine_client.binding import binding_of
from engine_client.claim import HeldClaim
from engine_client.deadline import Deadline
from engine_client.publisher import Publisher
from engine_client.storages import is_shared_address
from tests.campaign import kernel
from tests.engine_client.drawn import kinds, mappings, modules, named_tensors
from tests.engine_client.modules import TiedModel
from tests.support.clock import eventually
from tests.support.nursery import BornEngine
from tests.support.torch_engine import described

# torch's own remark, once in a process, on making a tensor of complex32.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

in_one_broker = settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check_same(
    found: dict[str, Any], tensors: Mapping[str, Tensor], kinds: Mapping[str, str]
) -> None:
    """What another process found is all there is to know of the tensors."""
    wanted = described(dict(tensors))
    for name, what in wanted.items():
        assert found[name] == {**what, "kind": kinds[name]}
    assert found.keys() == wanted.keys()


def seen_by(onlooker: BornEngine, weights: WeightSet) -> dict[str, Any]:
    """The set as another process sees it."""
    onlooker.ask("acquire_name", name=weights.key.name)
    found: dict[str, Any] = onlooker.ask("describe")
    onlooker.ask("release")
    return found


# --- a round trip -------------------------------------------------------------------------------


@in_one_broker
@given(tensors=mappings())
def test_a_mapping_loses_nothing(
    client: EngineClient, onlooker: BornEngine, tensors: dict[str, Tensor]
) -> None:
    """Names, dtypes, shapes, strides, bytes, and who shares which bytes of a storage with whom."""
    with client.publish("drawn", tensors) as weights:
        check_same(seen_by(onlooker, weights)["tensors"], tensors, dict.fromkeys(tensors, "tensor"))
    client.evict(str(weights.set_id))


@in_one_broker
@given(module=modules())
def test_a_module_loses_nothing(client: EngineClient, onlooker: BornEngine, module: Module) -> None:
    """Also ties, both kinds of buffers, and modules with two paths; the publisher's own parameters
    are now those that others map, and its buffers the very objects they were."""
    before, buffers = described(named_tensors(module)), dict(module.named_buffers())
    wanted, what = named_tensors(module), kinds(module)
    weights = client.publish("drawn", module)
    found = seen_by(onlooker, weights)["tensors"]
    for name in before:
        assert found[name] == {**before[name], "kind": what[name]}
    assert found.keys() == before.keys()
    assert [id(buffer) for buffer in buffers.values()] == [id(b) for b in module.buffers()]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert not parameter.requires_grad
        assert not parameter.numel() or is_shared_address(parameter.data_ptr())
        assert described({name: parameter})[name]["bytes"] == before[name]["bytes"]
        assert parameter.stride() == wanted[name].stride()
    client.evict(str(weights.set_id))
    weights.let_go()


def test_metadata_arrives(client: EngineClient, onlooker: BornEngine) -> None:
    """Everything msgpack can hold, as msgpack has it: a tuple as a list."""
    metadata = {"steps": 7, "loss": 0.5, "tags": ("a", "é"), "nested": {"none": None, "on": True}}
    arrived = {**metadata, "tags": ["a", "é"]}
    with client.publish("m", {"w": torch.ones(1)}, metadata=metadata) as weights:
        assert weights.metadata == arrived
        assert seen_by(onlooker, weights)["metadata"] == arrived
        assert client.acquire("m", copy=True).metadata == arrived


def leases_of(client: EngineClient) -> list[str]:
    """Of the one set that is there."""
    (entry,) = client.status()["sets"]
    return [lease["lease"] for lease in entry["leases"]]


def test_a_copy_is_private_and_whole(client: EngineClient, onlooker: BornEngine) -> None:
    """With `copy` an engine gets writable tensors with the ties they had, and holds no lease."""
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "base": base,
        "row": base[1],
        "empty": torch.empty(0, 3),
        "t": base.t(),
        "i": base[2, 1],
    }
    with client.publish("m", tensors, metadata={"a": 1}) as weights:
        wanted = described(tensors)
        copy = onlooker.ask("copy_of", name="m")
        given = {"generation": weights.generation, "metadata": {"a": 1}}
        assert copy == {"tensors": wanted, **given}
        eventually(lambda: leases_of(client) == [weights._lease.granted.lease], 5, "its release")
        assert described(dict(weights.tensors())) == wanted  # nobody wrote to the shared ones


# --- a module of the publisher's own ------------------------------------------------------------


def test_a_published_module_runs_on_the_shared_copy(client: EngineClient) -> None:
    """Its outputs are what they were; its private copies are gone; ties are ties."""
    model = TiedModel().eval()
    ids = torch.tensor([1, 2])
    before = model(ids)
    weights = client.publish("m", model)
    assert torch.equal(model(ids), before)
    assert model.head.weight is model.embed.weight
    assert weights.live_tensors() == ["embed.weight", "head.weight", "norm.weight", "norm.bias"]
    weights.detach(model)
    assert model.embed.weight.requires_grad
    weights.release()


def test_a_bound_module_is_published_again(client: EngineClient) -> None:
    """A trainer takes it back, changes it and publishes it anew; one that is still bound may be
    published as it is, under another name; a guard stays."""
    model = Linear(2, 2)
    first = client.publish("m", model)
    first.detach(model)
    with torch.no_grad():
        model.weight.fill_(5)
    second = client.publish("m", model)
    assert second["weight"].tolist() == [[5.0, 5.0], [5.0, 5.0]]
    first.release()
    second.detach(model)
    second.bind(model, guard=True)
    third = client.publish("n", model)
    binding = binding_of(model)
    assert binding is not None
    assert binding.guard is not None
    with pytest.raises(UsageError, match="would write to 'weight'"):
        model.weight.data.add_(1)
    second.release()
    third.detach(model)
    third.release()


def test_a_mapping_of_parameters_stays_the_publishers(client: EngineClient) -> None:
    """A mapping is not rebound: a trainer's state dict goes on being trained."""
    model = Linear(2, 2)
    state = model.state_dict()
    with client.publish("m", state):
        assert not is_shared_address(model.weight.data_ptr())
        assert model.weight.requires_grad
    with client.publish("m", dict(model.named_parameters())) as weights:
        assert {group.kind for group in weights.manifest.groups} == {"parameter"}


def test_values_behind_conjugation_are_published(client: EngineClient) -> None:
    """A conjugated view and a negated one arrive as the values they stand for."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"conj": base.conj(), "imag": base.conj().imag}
    assert (tensors["conj"].is_conj(), tensors["imag"].is_neg()) == (True, True)
    with client.publish("m", tensors) as weights:
        assert weights["conj"].tolist() == [1 - 2j, 3 + 4j]
        assert weights["imag"].tolist() == [-2.0, 4.0]


# --- names and identities --------------------------------------------------------------------


def test_a_label_is_given_once(client: EngineClient) -> None:
    """While its generation is resident no other can have it."""
    first = client.publish("m", {"w": torch.ones(1)}, generation="red")
    with pytest.raises(Busy, match=r"^generation 'red' of 'm' is resident already, as set \d+; "):
        client.publish("m", {"w": torch.ones(1)}, generation="red")
    with client.get_or_publish("m", dict, generation="red") as same:
        assert same.set_id == first.set_id
    first.release()


def test_content_under_an_identity_of_the_engines_own(client: EngineClient) -> None:
    """A key may say what the content is: who asks by it gets it, and only it is found twice."""
    key = WeightKey("", "m", checkpoint="quantised:abc", quantization="int8")
    first = client.publish(key, {"w": torch.ones(1)})
    assert first.key.checkpoint == "quantised:abc"
    again = client.get_or_publish(key, dict)
    assert again.set_id == first.set_id
    other = client.publish(key, {"w": torch.ones(1)})
    assert other.set_id == first.set_id  # the same content: one copy
    for weights in (first, again, other):
        weights.release()


# --- threads and processes ----------------------------------------------------------------------


def test_one_client_in_several_threads(client: EngineClient) -> None:
    """Publishing different names at once, and one name together: as from several engines."""
    results: list[tuple[str, str]] = []

    def work(number: int) -> None:
        with client.publish(f"own {number}", {"w": torch.full((1000,), number)}) as weights:
            assert set(weights["w"].tolist()) == {number}
        together = client.get_or_publish("together", lambda: {"w": torch.ones(1)}, timeout=20)
        results.append((together.how, str(together.set_id)))
        together.let_go()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 6
    assert [how for how, _set in results].count("published") == 1
    assert len({set_id for _how, set_id in results}) == 1


def test_a_forked_child_is_refused(client: EngineClient) -> None:
    """It must make its own client; nothing of its parent's is disturbed."""
    model = Linear(2, 2)
    weights = client.publish("m", model)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            client.publish("n", {"w": torch.ones(1)})
        except UsageError as error:
            os.write(writer, error.sentence.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 4096).startswith(b"this client was made before a fork")
    os.close(reader)
    assert ctypes.string_at(model.weight.data_ptr(), 16) == ctypes.string_at(
        weights["weight"].data_ptr(), 16
    )
    assert [entry["id"] for entry in client.status()["sets"]] == [weights.set_id]
    weights.detach(model)
    weights.release()


def test_parameters_of_a_class_of_their_own_are_published(client: EngineClient) -> None:
    """As engines have them; class and attributes are kept when they are rebound."""

    class Scaled(Parameter):
        scale: float

    model = Linear(2, 2, bias=False)
    model.weight = Scaled(torch.ones(2, 2))
    model.weight.scale = 0.5
    weights = client.publish("m", model)
    assert type(model.weight) is Scaled
    assert model.weight.scale == 0.5
    weights.detach(model)
    weights.release()


def test_a_claim_that_is_dropped(client: EngineClient) -> None:
    """As by an interrupt between two steps: the name is free again, whoever asks."""
    claim = client._claim(
        client._own_key("dropped"), None, Deadline(None), fresh=True, what="the right to publish"
    )
    with pytest.raises(Busy):
        client.publish("dropped", {"a": torch.ones(1)})
    del claim
    eventually(lambda: not client.status()["sets"], 5, "the end of the claim")
    client.publish("dropped", {"a": torch.ones(1)}).release()


def test_names_of_a_class_of_their_own(client: EngineClient) -> None:
    """They are text all the same."""

    class Name(str):
        __slots__ = ()

    with client.publish("named", {Name("a"): torch.ones(1)}) as weights:
        assert list(weights) == ["a"]


def held() -> tuple[int, int]:
    """Descriptors of this process, and its mappings of slabs."""
    gc.collect()  # what an error's traceback held
    return kernel.descriptors(os.getpid()), kernel.mapped(os.getpid()).total()


@pytest.mark.parametrize(
    ("where", "step"),
    [(publishing, "_writable"), (Publisher, "_attached"), (HeldClaim, "_reserve")],
)
def test_an_interrupt_leaves_nothing(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, where: Any, step: str
) -> None:
    """Neither a claim nor a mapping or a descriptor, and the name is free at once."""
    client.publish("before", {"a": torch.ones(1000)}).release()
    before = held()
    done = getattr(where, step)

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.undo()
        _thread.interrupt_main()
        return done(*arguments)

    monkeypatch.setattr(where, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.publish("interrupted", {"a": torch.ones(1000)})
    eventually(
        lambda: all(e["state"] == "sealed" and not e["leases"] for e in client.status()["sets"]),
        5,
        "the end of what was begun, or was done and is nobody's",
    )
    eventually(lambda: held() == before, 5, "the end of every descriptor and mapping")
    client.publish("interrupted", {"a": torch.ones(1000)}).release()
