"""A bound module moves to another generation: every tensor or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential

from broker.errors import BindError, NotFound, UsageError
from engine_client import Checkpoint, EngineClient, WeightSet
from engine_client.binding import binding_of
from tests.engine_client.modules import TiedModel
from tests.support.clock import eventually
from tests.support.processes import RIGHT_SECONDS
from tests.support.stored import small_checkpoint

IDS = torch.tensor([1, 2])


def model_of(value: float) -> TiedModel:
    model = TiedModel().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
        model.steps.fill_(value)
        model.angles.fill_(value)
    return model


def publish(client: EngineClient, value: float, name: str = "m", **options: Any) -> None:
    """A generation made of a whole module, by an engine that goes away at once."""
    model = model_of(value)
    client.publish(name, model, **options).let_go()


def bound(client: EngineClient, **options: Any) -> tuple[TiedModel, WeightSet]:
    model, weights = model_of(0), client.acquire("m")
    weights.bind(model, **options)
    return model, weights


def resident(client: EngineClient) -> list[int]:
    return [entry["id"] for entry in client.status()["sets"]]


def end(model: Module, weights: WeightSet) -> None:
    weights.detach(model)
    weights.release()


def test_everything_moves(client: EngineClient) -> None:
    """Parameters stay the same objects, ties tied, buffers the same objects with new values; the
    output is the new generation's, and the old set is gone."""
    publish(client, 1)
    model, old = bound(client)
    objects = [*model.parameters(), *model.buffers()]
    publish(client, 2)
    new = old.swap(model)
    assert torch.equal(model(IDS), model_of(2)(IDS))
    assert [id(o) for o in (*model.parameters(), *model.buffers())] == [id(o) for o in objects]
    assert model.head.weight is model.embed.weight
    assert (model.steps.tolist(), model.angles.tolist()) == ([2.0, 2.0], [2.0] * 4)
    assert not model.embed.weight.requires_grad
    assert old.is_released
    binding = binding_of(model)
    assert binding is not None
    assert binding.is_bound
    eventually(lambda: resident(client) == [new.set_id], RIGHT_SECONDS, "the end of the old set")
    end(model, new)


def test_the_newest_already(client: EngineClient) -> None:
    """Nothing moves, and no second lease stays."""
    publish(client, 1)
    model, weights = bound(client)
    assert weights.swap(model) is weights
    assert not weights.is_released
    eventually(lambda: len(client.status()["sets"][0]["leases"]) == 1, RIGHT_SECONDS, "one lease")
    end(model, weights)


def test_the_generation_that_ranks_agreed_on(client: EngineClient) -> None:
    """Not the newest but the one demanded, also an older one that another engine keeps."""
    publish(client, 1, generation="step-1")
    model, weights = bound(client)
    kept = client.acquire("m")
    publish(client, 2, generation="step-2")
    other = client.acquire("m", generation="step-2")
    publish(client, 3, generation="step-3")
    weights = weights.swap(model, "step-2")
    assert (weights.generation, model.steps.tolist()) == ("step-2", [2.0, 2.0])
    weights = weights.swap(model, "step-1")
    assert torch.equal(model(IDS), model_of(1)(IDS))
    with pytest.raises(NotFound, match=r"^'m', generation 'step-4', is not resident"):
        weights.swap(model, "step-4")
    assert torch.equal(model(IDS), model_of(1)(IDS))
    end(model, weights)
    kept.release()
    other.release()


def test_who_holds_an_old_tensor_keeps_the_old_set(client: EngineClient) -> None:
    """It stays readable, and the set resident, until that tensor dies too."""
    publish(client, 1)
    model, old = bound(client)
    first = old.set_id
    kept = old["norm.weight"]
    publish(client, 2)
    new = old.swap(model)
    assert kept.tolist() == [1.0] * 4
    assert resident(client) == [first, new.set_id]
    del kept
    eventually(lambda: resident(client) == [new.set_id], RIGHT_SECONDS, "the end of the old set")
    end(model, new)


def test_the_guard_watches_the_new_weights(client: EngineClient) -> None:
    """A guarded module is guarded after the swap as before."""
    publish(client, 1)
    model, weights = bound(client, guard=True)
    publish(client, 2)
    weights = weights.swap(model)
    with pytest.raises(UsageError, match=r"would write to 'norm.weight'"):
        model.norm.weight.data.zero_()
    end(model, weights)


def test_a_parameter_that_a_hook_permuted_stays_permuted(client: EngineClient) -> None:
    """Engines transpose weights in place after they are loaded: the new ones are seen the same
    way."""
    client.publish("m", {"weight": torch.arange(6.0).view(2, 3)}).release()
    model, weights = Linear(3, 2, bias=False), client.acquire("m")
    weights.bind(model)
    model.weight.data = model.weight.data.t()
    client.publish("m", {"weight": torch.arange(6.0).view(2, 3) * 10}).release()
    weights = weights.swap(model)
    assert model.weight.tolist() == [[0.0, 30.0], [10.0, 40.0], [20.0, 50.0]]
    assert model.weight.stride() == (1, 3)
    end(model, weights)


def test_what_is_not_shared_any_more_is_left_alone(client: EngineClient) -> None:
    """Parameters and buffers that were replaced or converted since the bind are the engine's."""
    publish(client, 1)
    model, weights = bound(client)
    model.norm.half()
    model.register_buffer("steps", torch.full((2,), 9, dtype=torch.int64))
    own = model.norm.weight.data_ptr()
    publish(client, 2)
    weights = weights.swap(model)
    assert (model.norm.weight.dtype, model.norm.weight.data_ptr()) == (torch.float16, own)
    assert model.norm.weight.tolist() == [1.0] * 4
    assert model.steps.tolist() == [9, 9]
    assert model.embed.weight.unique().tolist() == [2.0]  # type: ignore[no-untyped-call]
    end(model, weights)


def test_a_state_dict_follows_a_module(client: EngineClient) -> None:
    """A trainer that publishes its state dict publishes the same structure: what is a parameter and
    what a buffer, the bound module knows itself."""
    source = Sequential(Linear(2, 2), torch.nn.BatchNorm1d(2)).eval()
    client.publish("m", source).let_go()
    model, weights = Sequential(Linear(2, 2), torch.nn.BatchNorm1d(2)).eval(), client.acquire("m")
    weights.bind(model)
    state = {name: torch.full_like(t, 3) for name, t in source.state_dict().items()}
    client.publish("m", state).release()
    weights = weights.swap(model)
    assert {float(t.min()) for t in model.state_dict().values()} == {3.0}
    end(model, weights)


# --- refused ------------------------------------------------------------------------------------


def other_structure(model: TiedModel) -> Module:
    model.register_parameter("extra", Parameter(torch.ones(1)))
    model.norm.bias = Parameter(torch.ones(5))
    model.head.weight = Parameter(model.head.weight.detach().clone())
    del model.steps
    return model


def test_another_structure_is_refused_with_all_differences(client: EngineClient) -> None:
    """Missing, new, of another shape, tied no more: all are listed; the module runs on, on the old
    weights, and no lease on the new ones stays."""
    publish(client, 1)
    model, weights = bound(client)
    client.publish("m", other_structure(model_of(2))).let_go()
    with pytest.raises(BindError) as error:
        weights.swap(model)
    assert error.value.reason == "structure"
    assert error.value.missing == ["steps"]
    assert error.value.unexpected == ["extra"]
    assert sorted(error.value.mismatched) == ["embed.weight", "head.weight", "norm.bias"]
    assert error.value.sentence == (
        "the new generation has another structure, so the module stays on the old one: "
        "1 missing from the new generation: steps; 1 only in the new generation: extra; "
        "3 of another dtype, shape, stride or tie: embed.weight, head.weight, norm.bias; "
        "build a module for it and bind that"
    )
    assert torch.equal(model(IDS), model_of(1)(IDS))
    assert not weights.is_released
    newest = client.status()["sets"][-1]["id"]
    eventually(
        lambda: [e["leases"] for e in client.status()["sets"] if e["id"] == newest] == [[]],
        RIGHT_SECONDS,
        "the end of the lease on the new set",
    )
    end(model, weights)


def test_modules_and_weights_that_cannot_swap(client: EngineClient, tmp_path: Path) -> None:
    """Not bound, bound to others, released, or weights without a name."""
    publish(client, 1)
    model, weights = bound(client)
    with pytest.raises(UsageError, match=r"^this module is not bound to these weights$"):
        weights.swap(TiedModel())
    other = client.acquire("m")
    with pytest.raises(UsageError, match=r"^this module is not bound to these weights$"):
        other.swap(model)
    other.release()
    with pytest.raises(UsageError, match=r"^these weights have been released"):
        other.swap(model)
    unnamed = client.acquire(Checkpoint(small_checkpoint(tmp_path / "c", tensors=1, nbytes=16)))
    layer = Module()
    layer.weight = Parameter(torch.zeros(4))
    unnamed.bind(layer, prefix="layer.0.")
    with pytest.raises(UsageError, match=r"^swap: these weights have no name"):
        unnamed.swap(layer)
    end(layer, unnamed)
    end(model, weights)


class InterruptedParameter(Parameter):
    """Ctrl-C arrives when its memory is exchanged, the first time."""

    patience = 0

    @property
    def data(self) -> Tensor:
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.patience:
            self.patience -= 1
            raise KeyboardInterrupt
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def test_an_interrupt_undoes_the_whole_move(client: EngineClient) -> None:
    """In the middle of the exchange: every tensor is the old one's again; a second try works."""
    publish(client, 1)
    model, weights = model_of(0), client.acquire("m")
    model.norm.bias = InterruptedParameter(torch.zeros(4))
    weights.bind(model)
    publish(client, 2)
    model.norm.bias.patience = 1
    with pytest.raises(KeyboardInterrupt):
        weights.swap(model)
    assert torch.equal(model(IDS), model_of(1)(IDS))
    assert model.steps.tolist() == [1.0, 1.0]
    assert not weights.is_released
    weights = weights.swap(model)
    assert torch.equal(model(IDS), model_of(2)(IDS))
    end(model, weights)


def test_no_memory_for_the_buffers_changes_nothing(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that can fail comes before the first exchange."""
    publish(client, 1)
    model, weights = bound(client)
    publish(client, 2)
    clone: Callable[[Tensor], Tensor] = Tensor.clone

    def full(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory for a buffer")

    monkeypatch.setattr(Tensor, "clone", full)
    with pytest.raises(torch.OutOfMemoryError):
        weights.swap(model)
    monkeypatch.setattr(Tensor, "clone", clone)
    assert torch.equal(model(IDS), model_of(1)(IDS))
    end(model, weights)
