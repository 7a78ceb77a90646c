"""One model's weights on another model, through a broker: as loaded, and as processed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from broker.errors import Mismatch, UnsupportedQuantForIPCError
from broker.weights import WeightKey
from engine_client import EngineClient, parameters_on_meta
from engine_client.integrations.vllm import sharing
from engine_client.integrations.vllm.carried import NAME, Carried, apply, carry, published_with
from engine_client.integrations.vllm.observed import Changes, Observation, meta_tensors
from engine_client.integrations.vllm.options import Stage
from engine_client.integrations.vllm.structure import (
    adopt_structure,
    layouts_of,
    require_structure,
)
from engine_client.storages import is_shared_address
from engine_client.weight_set import WeightSet
from tests.integrations.vllm_toys import Kernel, Model, load, process, process_again
from tests.processes.conftest import brokers, private_directory
from tests.support.processes import RunningBroker

INPUTS = torch.arange(5.0)
FILES = "vllm:toy:00"


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with private_directory() as directory, brokers(directory) as start:
        yield start()


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[EngineClient]:
    with broker.client(label="vllm") as client:
        yield client
    gc.collect()
    broker.evict_all()


@pytest.fixture
def other(broker: RunningBroker) -> Iterator[EngineClient]:
    """Another engine's client, in this process."""
    with broker.client(label="vllm, another") as client:
        yield client


def key(stage: str = "processed", checkpoint: str = "blake3:00", **layout: int) -> WeightKey:
    return WeightKey(device="", checkpoint=checkpoint, layout=layout, format=f"vllm-{stage}")


def published(client: EngineClient, stage: Stage, key: WeightKey) -> tuple[Model, WeightSet]:
    """A model that was loaded, for that stage processed, and published."""
    made: list[Model] = []

    def build() -> nn.Module:
        model = Model()
        before = Observation(model)
        load(model)
        if stage == "processed":
            process(model)
        carried, tensors = carry(model, before.changes(model), {}, stage)
        stack.enter_context(published_with(model, carried, tensors))
        made.append(model)
        return model

    with ExitStack() as stack:
        weights = sharing.publish_or_wait(client, key, FILES, build, {}, None, print)
    return made[0], weights


def built_on(weights: WeightSet, stage: Stage) -> tuple[Model, Carried, list[torch.Tensor]]:
    """A model of another engine, bound, with what is carried."""
    layouts, carried = layouts_of(weights.manifest), sharing.carried_by(weights)
    with parameters_on_meta(same_objects=True):
        model = Model()
    if stage == "processed":
        adopt_structure(model, layouts, carried, torch.device("cpu"))
    tensors = sharing.bind(model, weights, layouts, carried)
    apply(model, carried, tensors)
    return model, carried, tensors


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_processed_weights_need_no_processing(client: EngineClient, other: EngineClient) -> None:
    """The other model has the same tensors, attributes and answers, and shares the bytes."""
    first, _weights = published(client, "processed", key())
    found = sharing.find_published(other, key(checkpoint=""), FILES)
    assert found is not None
    model, carried, tensors = built_on(found, "processed")
    process_again(model)
    apply(model, carried, tensors)
    require_structure(model, layouts_of(found.manifest))
    assert meta_tensors(model) == []
    assert model.first.tag == first.first.tag
    assert model.first.tag["dtype"] is torch.bfloat16
    assert model.second.quant_method.kernel.tuned == 7
    assert torch.equal(model.first.table, first.first.table)
    assert not hasattr(model.first, "k_scale")
    inputs = INPUTS[:5]
    for ours, theirs in zip(tensors_of(first).items(), tensors_of(model).items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(model.first.weight.t() @ inputs, first.first.weight.t() @ inputs)
    assert is_shared_address(model.first.weight.data_ptr())
    assert is_shared_address(first.first.weight.data_ptr()), "the publisher has no copy of its own"
    assert not is_shared_address(model.first.steps.data_ptr()), "buffers are each engine's own"
    assert not is_shared_address(model.first.table.data_ptr())


def test_loaded_weights_are_processed_by_each(client: EngineClient, other: EngineClient) -> None:
    """Attributes that loaders set on parameters are there, so processing finds what it needs."""
    first, _weights = published(client, "loaded", key("loaded"))
    found = sharing.find_published(other, key("loaded", checkpoint=""), FILES)
    assert found is not None
    model, _carried, _tensors = built_on(found, "loaded")
    assert model.first.weight.output_dim == 0  # type: ignore[attr-defined]
    assert callable(model.first.weight.weight_loader)  # type: ignore[attr-defined]
    assert is_shared_address(model.first.weight.data_ptr())
    process(first)
    process(model)
    for ours, theirs in zip(tensors_of(first).items(), tensors_of(model).items(), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]


def test_nothing_of_the_carrying_stays_on_a_model(client: EngineClient) -> None:
    """Neither on the publisher's nor on another's."""
    first, weights = published(client, "processed", key())
    model, _carried, _tensors = built_on(weights, "processed")
    for each in (first, model):
        assert NAME not in dict(each.named_modules())
        assert not any(NAME in name for name in each.state_dict())


def test_a_set_is_found_by_its_files_or_its_content(
    client: EngineClient, other: EngineClient, broker: RunningBroker
) -> None:
    """One copy, also when the same bytes lie elsewhere; from then on by both names."""
    _first, weights = published(client, "processed", key())
    assert sharing.find_published(other, key(checkpoint=""), "vllm:copy:11") is None

    def build() -> Any:
        raise AssertionError("it is there already")

    again = sharing.publish_or_wait(other, key(), "vllm:copy:11", build, {}, None, print)
    assert again.set_id == weights.set_id
    found = sharing.find_published(other, key(checkpoint=""), "vllm:copy:11")
    assert found is not None
    assert found.set_id == weights.set_id
    assert len(broker.status()["sets"]) == 1


@pytest.mark.parametrize(
    "wrong",
    [key("loaded"), key(tp_rank=1), key(checkpoint="blake3:11")],
    ids=["stage", "rank", "content"],
)
def test_a_wrong_key_never_attaches(
    client: EngineClient, other: EngineClient, wrong: WeightKey
) -> None:
    """Not even under the same name of files: it is built anew."""
    _first, weights = published(client, "processed", key())
    asked = msgspec.structs.replace(wrong, checkpoint="")
    if wrong.checkpoint == key().checkpoint:
        assert sharing.find_published(other, asked, FILES) is None
    built: list[int] = []

    def build() -> Any:
        built.append(1)
        return {"a": torch.zeros(1)}

    mine = sharing.publish_or_wait(other, wrong, "vllm:wrong:22", build, {}, None, print)
    assert built == [1]
    assert mine.set_id != weights.set_id


def test_what_the_broker_holds_is_known_without_mapping(client: EngineClient) -> None:
    """By name, by content if the name is another, and 0 for what is not there."""
    _first, weights = published(client, "processed", key())
    open_key = key(checkpoint="")
    never: Any = None
    assert sharing.resident_nbytes(client, open_key, FILES, never) == weights.nbytes
    assert sharing.resident_nbytes(client, open_key, "x", lambda: "blake3:00") == weights.nbytes
    assert sharing.resident_nbytes(client, open_key, "x", lambda: "blake3:11") == 0
    assert sharing.resident_nbytes(client, key("loaded", ""), FILES, never) == 0


def test_what_cannot_be_carried_is_refused_by_name() -> None:
    """Unless it is known to be made anew."""
    model = Model()
    before = Observation(model)
    model.first.cpu_linear = lambda x: x  # type: ignore[assignment]
    model.first.quant_method.kernel = Kernel()
    changes = before.changes(model)
    with pytest.raises(UnsupportedQuantForIPCError) as refusal:
        carry(model, changes, {"first": ("kernel",)}, "processed")
    assert "first.cpu_linear (a builtins.function)" in refusal.value.sentence
    assert "kernel" not in refusal.value.sentence
    carried, tensors = carry(model, changes, {"first": ("kernel", "cpu_linear")}, "processed")
    assert (carried.plain, tensors) == ({}, [])


def test_another_model_is_not_given_attributes(client: EngineClient) -> None:
    """It says what it has not, rather than run with half of them."""
    carried, _tensors = carry(Model(), Changes(plain={"third": {"tag": 1}}), {}, "processed")
    with pytest.raises(Mismatch, match="had third, this one has not"):
        apply(Model(), carried, [])
    carried, _tensors = carry(Model(), Changes(plain={"first:quant_method.lost": {}}), {}, "loaded")
    with pytest.raises(Mismatch, match=r"had first\.quant_method\.lost"):
        apply(Model(), carried, [])


def test_a_set_that_is_not_of_this_plugin_is_refused(client: EngineClient) -> None:
    """Whatever its key says."""
    weights = client.publish("stranger", {"a": torch.zeros(1)})
    with pytest.raises(Mismatch, match="not published by vLLM's plugin"):
        sharing.carried_by(weights)
    claims = {f"{NAME}.state": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(Mismatch, match="has not what vLLM's plugin publishes"):
        sharing.carried_by(client.publish("liar", claims))
    reach = msgspec.json.encode(Carried(plain={"first:__class__": {"tag": 1}}))
    claims = {f"{NAME}.state": torch.frombuffer(bytearray(reach), dtype=torch.uint8)}
    with pytest.raises(Mismatch, match="no vLLM publishes: __class__"):
        sharing.carried_by(client.publish("reaching", claims))


def test_a_parameter_of_a_class_of_its_own_is_not_made_up(client: EngineClient) -> None:
    """Nobody knows how it is made."""
    _first, weights = published(client, "processed", key())
    carried = sharing.carried_by(weights)
    carried.classes["first.weight"] = "vllm.model_executor.parameter.Odd"
    with parameters_on_meta(same_objects=True):
        model = Model()
    with pytest.raises(Mismatch, match=r"first\.weight is a vllm\.model_executor\.parameter\.Odd"):
        adopt_structure(model, layouts_of(weights.manifest), carried, torch.device("cpu"))


def test_a_model_that_ends_with_other_tensors_is_refused(client: EngineClient) -> None:
    """Processing that went another way than the publisher's shows."""
    _first, weights = published(client, "processed", key())
    model, _carried, _tensors = built_on(weights, "processed")
    model.second.register_buffer("late", torch.zeros(1))
    with pytest.raises(Mismatch, match=r"second\.late"):
        require_structure(model, layouts_of(weights.manifest))


def test_private_copies_can_be_written(client: EngineClient) -> None:
    """Of the modules that were asked for, and only of those; each parameter stays the object."""
    _first, weights = published(client, "loaded", key("loaded"))
    model, _carried, _tensors = built_on(weights, "loaded")
    parameter = model.first.weight
    sharing.make_private([model.first])
    assert model.first.weight is parameter
    parameter.data.fill_(1.0)
    assert not is_shared_address(parameter.data_ptr())
    assert is_shared_address(model.second.weight.data_ptr())
