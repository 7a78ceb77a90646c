"""Binding by a mapping of names: stored ones that differ, and places that keep what they have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from broker.errors import BindError, UsageError
from engine_client.binding import bind_module, parameters_on_meta
from tests.engine_client.conftest import MakeSlab
from tests.engine_client.modules import TiedModel, snapshot, stored

IDS = torch.tensor([[0, 3, 5]])
NAMES = {
    "embed.weight": "wte",
    "head.weight": "wte",
    "norm.weight": "ln.g",
    "norm.bias": "ln.b",
    "steps": "counts",
}
"""What TiedModel's tensors are called in the slabs of this file."""


def renamed(model: nn.Module) -> dict[str, Tensor]:
    tensors = stored(model)
    return {new: tensors[old] for old, new in NAMES.items()} | {"left over": torch.ones(3)}


def on_meta(*, tied: bool = True) -> TiedModel:
    with parameters_on_meta():
        return TiedModel(tied=tied)


def test_every_place_has_its_own_stored_name(make_slab: MakeSlab) -> None:
    """Bound by names that have nothing in common with the module's; what is left over stays so."""
    ordinary = TiedModel()
    ordinary.steps += 7
    tensors = make_slab(renamed(ordinary)).open()
    module = on_meta()
    binding = bind_module(module, tensors, names=NAMES)
    assert torch.equal(module(IDS), ordinary(IDS))
    assert module.head.weight is module.embed.weight
    assert module.steps.tolist() == [7.0, 7.0]
    assert not tensors.owns(module.steps)
    assert binding.ignored == ["left over"]
    assert binding.copied == ["counts"]
    assert {binding.stored_name(name) for name in NAMES} == set(NAMES.values())


def test_places_that_are_not_named_keep_what_they_have(make_slab: MakeSlab) -> None:
    """Parameters and buffers of the module's own, persistent or not, are left alone."""
    tensors = make_slab(renamed(TiedModel())).open()
    module = TiedModel()
    kept = {name: held for name, held in snapshot(module).items() if not name.endswith("weight")}
    bias = module.norm.bias
    weights = {name: new for name, new in NAMES.items() if name.endswith("weight")}
    bind_module(module, tensors, names=weights)
    assert {name: snapshot(module)[name] for name in kept} == kept
    assert module.norm.bias is bias
    assert bias.requires_grad
    assert tensors.owns(module.norm.weight)


def test_detached_as_it_was(make_slab: MakeSlab) -> None:
    """`requires_grad` comes back by the module's places, whatever their stored names are."""
    module = on_meta()
    module.norm.bias.requires_grad_(False)
    binding = bind_module(module, make_slab(renamed(TiedModel())).open(), names=NAMES)
    binding.detach()
    wanted = {name: p.requires_grad for name, p in module.named_parameters()}
    assert wanted == {"embed.weight": True, "norm.weight": True, "norm.bias": False}


def test_misfits_are_listed(make_slab: MakeSlab) -> None:
    """A stored name that is not there, a shape, and a place without a value: all in one error."""
    tensors = renamed(TiedModel())
    tensors["ln.g"] = torch.ones(5)
    del tensors["wte"]
    module = on_meta()
    names = {name: new for name, new in NAMES.items() if name != "norm.bias"}
    before = snapshot(module)
    with pytest.raises(BindError) as refusal:
        bind_module(module, make_slab(tensors).open(), names=names)
    assert refusal.value.missing == ["wte"]
    assert list(refusal.value.mismatched) == ["ln.g"]
    assert refusal.value.fields["on_meta"] == ["norm.bias"]
    assert snapshot(module) == before


def test_one_stored_tensor_for_two_that_are_not_tied(make_slab: MakeSlab) -> None:
    """They would be tied without anybody having said so: refused, and the module unchanged."""
    tensors = make_slab(renamed(TiedModel())).open()
    module = on_meta(tied=False)
    before = snapshot(module)
    with pytest.raises(UsageError, match=r"'wte' is to become 'head\.weight' and another"):
        bind_module(module, tensors, names=NAMES)
    assert snapshot(module) == before


@pytest.mark.parametrize("odd", ["wieght", "norm", "norm.weight.", ""])
def test_a_name_that_is_no_place(make_slab: MakeSlab, odd: str) -> None:
    """A misspelt one would leave its place with whatever it has: refused, the module unchanged."""
    tensors = make_slab(renamed(TiedModel())).open()
    module = TiedModel()
    before = snapshot(module)
    with pytest.raises(BindError, match="1 named in `names` and not in the module") as refusal:
        bind_module(module, tensors, names={"norm.bias": "ln.b", odd: "ln.g"})
    assert refusal.value.fields["no_place"] == [odd]
    assert refusal.value.reason == "no_place"
    assert snapshot(module) == before


def test_a_name_of_a_place_without_a_tensor(make_slab: MakeSlab) -> None:
    """A bias that the module does without is no place."""
    module = nn.Linear(4, 4, bias=False)
    names = {"weight": "w", "bias": "b"}
    tensors = make_slab({"w": torch.ones(4, 4), "b": torch.ones(4)}).open()
    with pytest.raises(BindError) as refusal:
        bind_module(module, tensors, names=names)
    assert refusal.value.fields["no_place"] == ["bias"]
