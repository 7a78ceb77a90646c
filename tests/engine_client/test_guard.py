"""Writes to shared weights that are named instead of killing the process."""

from __future__ import annotations

import copy
import ctypes
import inspect
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from broker.errors import UsageError
from engine_client.binding import Binding, bind_module, parameters_on_meta
from engine_client.guard import WriteGuard
from tests.engine_client.conftest import MakeSlab
from tests.engine_client.modules import TiedModel, snapshot, stored

IDS = torch.tensor([[1, 2]])


@pytest.fixture
def binding(make_slab: MakeSlab) -> Binding:
    with parameters_on_meta():
        module = TiedModel()
    binding = bind_module(module, make_slab(stored(TiedModel())).open())
    binding.held_by_test = module  # type: ignore[attr-defined]
    return binding


@pytest.fixture
def module(binding: Binding) -> TiedModel:
    module = binding.module
    assert isinstance(module, TiedModel)
    return module


WRITES: dict[str, tuple[Callable[[TiedModel], object], str, str]] = {
    "in place": (lambda m: m.norm.weight.add_(1), "aten.add_", "norm.weight"),
    "augmented": (lambda m: m.norm.weight.data.__iadd__(1), "aten.add_", "norm.weight"),
    "a view": (lambda m: m.norm.bias[1:].zero_(), "aten.zero_", "norm.bias"),
    "detached": (lambda m: m.norm.bias.detach().fill_(0), "aten.fill_", "norm.bias"),
    "an item": (lambda m: m.norm.bias.__setitem__(0, 1.0), "aten.copy_|fill_", "norm.bias"),
    "initialisation": (lambda m: nn.init.normal_(m.head.weight), "aten.normal_", "embed.weight"),
    "reset": (lambda m: m.norm.reset_parameters(), "aten.fill_", "norm.weight"),
    "out=": (
        lambda m: torch.add(m.norm.bias, 1, out=m.norm.weight.data),
        "aten.add.out",
        "norm.weight",
    ),
    "foreach": (
        lambda m: torch._foreach_mul_([torch.ones(4), m.norm.bias], 2),
        "aten._foreach_mul_",
        "norm.bias",
    ),
    "max_norm": (
        lambda m: nn.functional.embedding(IDS, m.embed.weight, max_norm=0.1),
        "aten.embedding_renorm_",
        "embed.weight",
    ),
    "copy_": (lambda m: m.norm.bias.copy_(torch.ones(4)), "aten.copy_", "norm.bias"),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_write_is_named_with_the_tensor_before_it_happens(
    case: str, binding: Binding, module: TiedModel
) -> None:
    """The sentence has the operation and the stored name, and says what to do."""
    write, operation, name = WRITES[case]
    before = snapshot(module)
    with (
        torch.no_grad(),
        WriteGuard(binding),
        pytest.raises(UsageError, match=rf"would write to '{name}'.*detach\(\)") as refusal,
    ):
        write(module)
    assert any(part in refusal.value.operation for part in operation.split("|"))
    assert refusal.value.tensor == name
    assert snapshot(module) == before


@pytest.mark.parametrize("fused", [None, "foreach", "fused"])
def test_an_optimiser_step_is_named(fused: str | None, binding: Binding, module: TiedModel) -> None:
    """Whichever implementation the optimiser chooses."""
    module.norm.requires_grad_(True)
    optimiser = torch.optim.SGD(
        module.norm.parameters(), lr=0.1, **({fused: True} if fused else {})
    )
    module(IDS).sum().backward()
    with WriteGuard(binding), pytest.raises(UsageError, match=r"would write to 'norm.weight'"):
        optimiser.step()


def test_reading_and_writing_elsewhere_pass(binding: Binding, module: TiedModel) -> None:
    """Forward passes, private buffers, copies, and changes of a view's shape are no writes."""
    with torch.no_grad(), WriteGuard(binding):
        module(IDS)
        module.steps.add_(1)
        module.norm.weight.clone().mul_(2)
        copy.deepcopy(module).norm.weight.mul_(2)
        view = module.head.weight.detach()
        view.t_().unsqueeze_(0)
        torch.add(module.norm.weight, 1, out=torch.empty(4))
    assert module.steps.tolist() == [1.0, 1.0]


def test_the_guard_of_a_bind_stands_until_the_module_is_detached(make_slab: MakeSlab) -> None:
    """It is asked for with guard=True, and costs nothing afterwards."""
    module = nn.Linear(2, 2).requires_grad_(False)
    binding = bind_module(module, make_slab(stored(module)).open(), guard=True)
    with pytest.raises(UsageError, match="would write to 'weight'"):
        module.weight.zero_()
    binding.detach()
    module.weight.zero_()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_slab_that_is_gone_has_no_names(make_slab: MakeSlab) -> None:
    """A guard that outlives its module accuses nobody of writing to what lies there by now."""
    module = nn.Linear(2, 2)
    tensors = make_slab(stored(module)).open()
    binding = bind_module(module, tensors, guard=True)
    address = module.weight.data_ptr()
    del module
    tensors.close()
    later = torch.frombuffer((ctypes.c_ubyte * 16).from_address(address), dtype=torch.uint8)
    assert tensors.name_of(later) is None
    assert binding.guard is not None
    binding.guard.stop()


def test_a_guard_that_is_not_the_innermost_mode_lets_everything_through(
    make_slab: MakeSlab,
) -> None:
    """Detaching under a mode entered later must not end that mode."""

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen += 1
            return func(*args, **(kwargs or {}))

    module = nn.Linear(2, 2).requires_grad_(False)
    binding = bind_module(module, make_slab(stored(module)).open(), guard=True)
    assert binding.guard is not None
    with Counting() as counting:  # type: ignore[no-untyped-call]
        binding.detach()
        before = counting.seen
        module.weight.zero_()
        assert counting.seen == before + 1
    module.weight.zero_()
    binding.guard.stop()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_guard_concerns_the_thread_that_entered_it(binding: Binding, module: TiedModel) -> None:
    """Another thread's operations do not pass through it."""
    depths: list[int] = []
    with WriteGuard(binding):
        thread = threading.Thread(
            target=lambda: depths.append(torch._C._len_torch_dispatch_stack())
        )
        thread.start()
        thread.join()
    assert depths == [0]


# --- load_state_dict ---------------------------------------------------------------------------


def refused(load: Callable[[], object]) -> str:
    with pytest.raises(UsageError, match=r"load_state_dict would write to .*detach\(\)") as refusal:
        load()
    return str(refusal.value.tensor)


def test_loading_into_a_bound_module_is_refused(binding: Binding, module: TiedModel) -> None:
    """The module itself and a part of it, with the name of a parameter."""
    other = TiedModel().state_dict()
    before = snapshot(module)
    assert refused(lambda: module.load_state_dict(other)) == "embed.weight"
    assert refused(lambda: module.norm.load_state_dict(nn.LayerNorm(4).state_dict())) == "weight"
    assert snapshot(module) == before


def test_loading_into_what_contains_a_bound_module_writes_nothing(
    binding: Binding, module: TiedModel
) -> None:
    """Not even into the private parts that come first."""
    outer = nn.ModuleDict({"own": nn.Linear(2, 2), "model": module})
    before = snapshot(outer)
    other = {name: torch.ones_like(tensor) for name, tensor in outer.state_dict().items()}
    assert refused(lambda: outer.load_state_dict(other)) == "model.embed.weight"
    assert refused(lambda: outer.load_state_dict(other, strict=False)) == "model.embed.weight"
    assert snapshot(outer) == before


def test_loading_what_is_private_is_fine(binding: Binding, module: TiedModel) -> None:
    """Adapters and buffers beside shared weights, not strictly; and assigning writes nowhere."""
    outer = nn.ModuleDict({"own": nn.Linear(2, 2), "model": module})
    ones = {"own.weight": torch.ones(2, 2), "model.steps": torch.ones(2)}
    outer.load_state_dict(ones, strict=False)
    assert module.steps.tolist() == [1.0, 1.0]
    nn.Linear(2, 2).load_state_dict(nn.Linear(2, 2).state_dict())
    copy.deepcopy(module).load_state_dict(TiedModel().state_dict())
    module.load_state_dict(TiedModel().state_dict(), assign=True)
    assert binding.tensors.live_count() == 0
    module.load_state_dict(TiedModel().state_dict())


def test_loading_into_a_detached_module_is_fine(binding: Binding, module: TiedModel) -> None:
    """It is an ordinary module again."""
    binding.detach()
    other = TiedModel()
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(IDS), other(IDS))


def test_load_state_dict_looks_as_it_did(binding: Binding) -> None:
    """Name, documentation and signature are torch's own."""
    assert nn.Module.load_state_dict.__name__ == "load_state_dict"
    assert "Copy parameters and buffers" in (nn.Module.load_state_dict.__doc__ or "")
    signature = inspect.signature(nn.Module.load_state_dict)
    assert list(signature.parameters) == ["self", "state_dict", "strict", "assign"]
