"""What is done with ordinary modules is done with bound ones, with the same results and sizes."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from engine_client.binding import bind_module, parameters_on_meta
from engine_client.views import SlabTensors
from tests.engine_client.conftest import MakeSlab
from tests.engine_client.modules import TiedModel, stored

IDS = torch.tensor([[1, 2]])


@pytest.fixture
def ordinary() -> TiedModel:
    return TiedModel().requires_grad_(False)


@pytest.fixture
def tensors(ordinary: TiedModel, make_slab: MakeSlab) -> SlabTensors:
    ballast = {"zz.ballast": torch.zeros(1 << 20)}
    return make_slab({**stored(ordinary), **ballast}).open()


@pytest.fixture
def bound(tensors: SlabTensors) -> TiedModel:
    with parameters_on_meta():
        module = TiedModel()
    bind_module(module, tensors, ignore=["zz.*"])
    return module


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_state_dict_has_the_same_names_values_and_ties(
    ordinary: TiedModel, bound: TiedModel
) -> None:
    """Names in the same order, equal values, tied names over one storage."""
    ours, theirs = bound.state_dict(), ordinary.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["head.weight"].data_ptr() == ours["embed.weight"].data_ptr()


def test_torch_save_writes_the_same_sizes_and_loads_anywhere(
    ordinary: TiedModel, bound: TiedModel
) -> None:
    """Of the state dict and of the module, which needs nothing of this package to be loaded."""
    assert len(saved(bound.state_dict())) == len(saved(ordinary.state_dict()))
    assert len(saved(bound)) == len(saved(ordinary))
    assert b"engine_client" not in saved(bound).replace(b"tests.engine_client", b"")
    loaded = torch.load(io.BytesIO(saved(bound)), weights_only=False)
    assert torch.equal(loaded(IDS), ordinary(IDS))
    loaded.embed.weight.add_(1)


def test_pickle_gives_a_private_module(ordinary: TiedModel, bound: TiedModel) -> None:
    """As for torch.save."""
    loaded = pickle.loads(pickle.dumps(bound))
    assert torch.equal(loaded(IDS), ordinary(IDS))
    loaded.load_state_dict(ordinary.state_dict())


def test_safetensors_save_model_writes_the_same_file(
    ordinary: TiedModel, bound: TiedModel, tmp_path: Path
) -> None:
    """Byte for byte: a tied pair is recognised and stored once."""
    safetensors.torch.save_model(bound, str(tmp_path / "bound"))
    safetensors.torch.save_model(ordinary, str(tmp_path / "ordinary"))
    assert (tmp_path / "bound").read_bytes() == (tmp_path / "ordinary").read_bytes()


def test_a_deep_copy_is_an_ordinary_private_module(
    ordinary: TiedModel, bound: TiedModel, tensors: SlabTensors
) -> None:
    """Ties kept, writable, bindable; the original stays bound."""
    copied = copy.deepcopy(bound)
    assert copied.head.weight is copied.embed.weight
    assert torch.equal(copied(IDS), ordinary(IDS))
    assert copied.norm.weight.untyped_storage().nbytes() == 16
    assert not any(tensors.owns(p) for p in copied.parameters())
    copied.load_state_dict(ordinary.state_dict())
    bind_module(copied, tensors, ignore=["zz.*"])
    assert tensors.owns(bound.norm.weight)


def test_converting_to_another_dtype_makes_it_private(
    ordinary: TiedModel, bound: TiedModel, tensors: SlabTensors
) -> None:
    """`.to(float64)` gives what it gives an ordinary module; after it nothing is shared."""
    bound.to(torch.float64)
    ordinary.to(torch.float64)
    assert torch.equal(bound(IDS), ordinary(IDS))
    assert bound.head.weight is bound.embed.weight
    assert tensors.live_count() == 0
    bound.load_state_dict(ordinary.state_dict())
    with torch.no_grad():
        bound.norm.weight.add_(1)


def test_converting_to_the_same_dtype_changes_nothing(
    bound: TiedModel, tensors: SlabTensors
) -> None:
    """`.to(float32)` of a float32 module makes no copies, as ever."""
    bound.to(torch.float32)
    assert all(tensors.owns(parameter) for parameter in bound.parameters())


def test_an_adapter_beside_a_bound_module_can_be_trained(bound: TiedModel) -> None:
    """Gradients flow through shared weights to the adapter's own."""
    adapter = nn.Linear(6, 2)
    optimiser = torch.optim.Adam(adapter.parameters())
    before = adapter.weight.tolist()
    adapter(bound(IDS)).sum().backward()
    optimiser.step()
    assert adapter.weight.tolist() != before
    assert bound.embed.weight.grad is None
