"""What loading and processing leave on modules, parameters and what modules hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_client.integrations.vllm.observed import Changes, Observation, meta_tensors, owners
from engine_client.integrations.vllm.plain import encode
from tests.integrations.vllm_toys import Kernel, Model, PlainMethod, load, process


def observed(model: nn.Module, change: Any) -> Changes:
    before = Observation(model)
    change()
    return before.changes(model)


def test_owners_are_modules_parameters_and_objects_of_vllm() -> None:
    """Each once, by a path that leads to it."""
    paths = [path for path, _owner in owners(Model())]
    assert len(set(paths)) == len(paths)
    assert {"", "first", "first:weight", "first:quant_method"} <= set(paths)
    assert "first:quant_method.kernel" in paths


def test_loading_values_is_no_change() -> None:
    """Tensors travel as tensors."""
    model = Model()
    assert observed(model, lambda: load(model)) == Changes()


def test_processing_shows_with_everything_it_leaves() -> None:
    """Data by value, tensors as such, what is gone by name; on whoever holds it."""
    model = Model()
    load(model)
    changes = observed(model, lambda: process(model))
    tag = {"factor": 2.0, "shape": (1, 2), "dtype": torch.bfloat16}
    assert changes.plain["first"] == {"tag": encode(tag)}
    assert changes.plain["second:quant_method.kernel"] == {"tuned": 7}
    assert set(changes.tensors) == {("first", "table"), ("second", "table")}
    # The parameter was replaced, and the new one does not know how it is loaded.
    assert sorted(changes.removed["first:weight"]) == ["output_dim", "weight_loader"]
    assert changes.opaque == {}


def test_what_is_more_than_data_is_opaque() -> None:
    """A closure, a new object, an object in a list: by owner, name and class."""
    model = Model()

    def change() -> None:
        model.first.cpu_linear = lambda x: x  # type: ignore[assignment]
        model.first.quant_method.kernel = Kernel()
        model.second.tag = [1, object()]

    changes = observed(model, change)
    assert set(changes.opaque) == {
        ("first", "cpu_linear"),
        ("first:quant_method", "kernel"),
        ("second", "tag"),
    }
    assert changes.opaque["first", "cpu_linear"] == "a builtins.function"


def test_a_container_that_was_changed_in_place_shows() -> None:
    """Although it is the same object."""
    model = Model()
    model.first.tag = {"sizes": [1, 2]}
    changes = observed(model, lambda: model.first.tag["sizes"].append(3))
    assert changes.plain == {"first": {"tag": encode({"sizes": [1, 2, 3]})}}


def test_a_tensor_that_was_changed_in_place_shows() -> None:
    """Although it is the same object at the same address."""
    model = Model()
    model.first.table = torch.zeros(2)
    changes = observed(model, lambda: model.first.table.add_(1))
    assert set(changes.tensors) == {("first", "table")}


def test_new_submodules_and_hooks_are_opaque() -> None:
    """Nobody can carry them."""
    model = Model()

    def change() -> None:
        model.first.add_module("late", nn.Linear(1, 1))
        model.second.register_forward_hook(lambda *_: None)

    changes = observed(model, change)
    assert set(changes.opaque) == {("first", "_modules"), ("second", "_forward_hooks")}


def test_an_object_that_two_modules_hold_is_one_owner() -> None:
    """What changes in it shows once."""
    model = Model()
    model.second.quant_method = model.first.quant_method
    changes = observed(model, lambda: setattr(model.first.quant_method, "tuned", True))
    assert changes.plain == {"first:quant_method": {"tuned": True}}


def test_objects_of_others_are_not_looked_into() -> None:
    """Configurations lead everywhere, and are the key's business."""
    model = Model()
    configuration = type("QuantConfig", (PlainMethod,), {"__module__": PlainMethod.__module__})()
    model.first.quant_method.quant_config = configuration
    changes = observed(model, lambda: setattr(configuration, "seen", True))
    assert changes == Changes()


def test_tensors_without_values_are_found() -> None:
    """Parameters, buffers and attributes, by name."""
    model = Model()
    assert meta_tensors(model) == []
    model.first.weight = nn.Parameter(torch.empty(1, device="meta"))
    model.first.steps = torch.empty(1, device="meta")
    model.second.table = torch.empty(1, device="meta")
    assert sorted(meta_tensors(model)) == ["first.steps", "first.weight", "second.table"]
