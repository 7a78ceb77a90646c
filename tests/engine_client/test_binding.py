"""Modules over shared weights: what they get, what is refused, and how they come off again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from broker.errors import BindError, Mismatch, UsageError
from engine_client.binding import bind_module, binding_of, parameters_on_meta
from tests.engine_client.conftest import MakeSlab
from tests.engine_client.modules import (
    LoadedParameter,
    StubbornModule,
    TiedModel,
    snapshot,
    stored,
)

M = TypeVar("M", bound=nn.Module)
IDS = torch.tensor([[0, 3, 5]])


def layers_of(module: nn.ModuleList | nn.ModuleDict) -> list[Any]:
    """The submodules, to be asked for anything they have."""
    return list(module.children())


def on_meta(make: Callable[[], M]) -> M:
    with parameters_on_meta():
        return make()


# --- what a bound module is ------------------------------------------------------------------


def test_a_bound_module_computes_what_the_ordinary_one_does(make_slab: MakeSlab) -> None:
    """Bit for bit, from views of the slab, with nothing left on meta."""
    ordinary = TiedModel()
    tensors = make_slab(stored(ordinary)).open()
    module = on_meta(TiedModel)
    bind_module(module, tensors)
    assert torch.equal(module(IDS), ordinary(IDS))
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter, name
        assert tensors.owns(parameter), name
        assert not parameter.requires_grad, name
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, name
        assert not tensors.owns(buffer), name


def test_each_module_gets_buffers_of_its_own(make_slab: MakeSlab) -> None:
    """Two engines of one process may write to their buffers; the slab keeps its values."""
    tensors = make_slab(stored(TiedModel())).open()
    one, other = on_meta(TiedModel), on_meta(TiedModel)
    assert bind_module(one, tensors).copied == ["steps"]
    bind_module(other, tensors)
    one.steps.add_(1)
    one.angles.add_(1)
    assert other.steps.tolist() == tensors.tensor("steps").tolist() == [0.0, 0.0]
    assert other.angles.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert one.embed.weight.data_ptr() == other.embed.weight.data_ptr()


def test_a_module_with_real_parameters_gives_its_own_up(make_slab: MakeSlab) -> None:
    """It need not be built on meta; its private copies are freed."""
    ordinary, module = TiedModel(), TiedModel()
    private = weakref.ref(module.norm.weight)
    bind_module(module, make_slab(stored(ordinary)).open())
    gc.collect()
    assert private() is None
    assert torch.equal(module(IDS), ordinary(IDS))


def test_class_and_attributes_of_parameters_are_kept(make_slab: MakeSlab) -> None:
    """An engine's Parameter subclass with its loader function, and attributes of ordinary ones."""

    def make() -> nn.Module:
        module = nn.Linear(2, 3)
        module.weight = LoadedParameter(module.weight.detach())
        module.weight.weight_loader = len
        module.bias.tag = "kept"  # type: ignore[attr-defined]
        return module

    tensors = make_slab(stored(make())).open()
    for module in (make(), on_meta(make)):
        bind_module(module, tensors)
        weight, bias = module.weight, module.bias
        assert type(weight) is LoadedParameter
        assert weight.weight_loader is len
        assert type(bias) is nn.Parameter
        assert bias.tag == "kept"  # type: ignore[attr-defined]
        assert tensors.owns(weight)


def test_a_parameter_class_with_slots_is_kept(make_slab: MakeSlab) -> None:
    """A class whose objects are laid out differently cannot be put on a view; it gets a new one."""

    class SlottedParameter(nn.Parameter):
        __slots__ = ("shard",)

    module = nn.Linear(2, 3, bias=False)
    module.weight = SlottedParameter(torch.ones(3, 2))
    tensors = make_slab({"weight": torch.zeros(3, 2)}).open()
    bind_module(module, tensors)
    assert type(module.weight) is SlottedParameter
    assert tensors.owns(module.weight)


def test_modules_that_keep_lists_of_their_parameters_see_the_new_ones(make_slab: MakeSlab) -> None:
    """An LSTM's flat weights are the bound ones, so its forward pass works."""
    ordinary = nn.LSTM(3, 4, num_layers=2)
    module = on_meta(lambda: nn.LSTM(3, 4, num_layers=2))
    bind_module(module, make_slab(stored(ordinary)).open())
    steps = torch.ones(5, 1, 3)
    assert torch.equal(module(steps)[0], ordinary(steps)[0])


def test_a_module_under_two_paths_is_stored_under_either(make_slab: MakeSlab) -> None:
    """A shared layer needs one of its names in the checkpoint, whichever."""

    def make() -> nn.ModuleDict:
        shared = nn.Linear(2, 2)
        return nn.ModuleDict({"a": shared, "b": shared})

    for name in ("a", "b"):
        wanted = {f"{name}.weight": torch.ones(2, 2), f"{name}.bias": torch.zeros(2)}
        tensors = make_slab(wanted).open()
        module = on_meta(make)
        bind_module(module, tensors)
        assert module["a"] is module["b"]
        assert layers_of(module)[0].weight.tolist() == [[1.0, 1.0]] * 2


def test_strides_of_the_stored_tensor_are_the_parameters(make_slab: MakeSlab) -> None:
    """A weight that was published transposed stays transposed."""
    wanted = torch.arange(6.0).view(2, 3).t()
    module = on_meta(lambda: nn.Linear(2, 3, bias=False))
    bind_module(module, make_slab({"weight": wanted}).open())
    assert module.weight.stride() == (1, 3)
    assert module.weight.tolist() == wanted.tolist()


def test_binding_leaves_the_collector_as_it_was(make_slab: MakeSlab) -> None:
    """It is off meanwhile; afterwards it is on if it was on, also after a refusal."""
    tensors = make_slab(stored(nn.Linear(2, 2))).open()
    gc.disable()
    try:
        bind_module(nn.Linear(2, 2), tensors)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(BindError):
        bind_module(nn.Linear(2, 3), tensors)
    assert gc.isenabled()


def test_contexts_of_the_caller_do_not_reach_the_parameters(make_slab: MakeSlab) -> None:
    """Binding under inference_mode and a default device gives ordinary parameters."""
    module = on_meta(lambda: nn.Linear(2, 2))
    tensors = make_slab(stored(nn.Linear(2, 2))).open()
    with torch.inference_mode(), torch.device("meta"):
        bind_module(module, tensors)
    assert not module.weight.is_inference()
    assert not module.weight.is_meta


# --- ties ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_pair_needs_one_of_its_names(name: str, make_slab: MakeSlab) -> None:
    """Whichever the checkpoint holds, both places get the same Parameter."""
    wanted = stored(TiedModel())
    table = wanted.pop("embed.weight")
    del wanted["head.weight"]
    tensors = make_slab({**wanted, name: table}).open()
    module = on_meta(TiedModel)
    bind_module(module, tensors)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.head.weight, table)


def test_a_tied_pair_may_be_stored_twice_with_equal_bytes(make_slab: MakeSlab) -> None:
    """Also where the bytes are NaN, which is not equal to itself."""
    wanted = stored(TiedModel())
    wanted["embed.weight"] = torch.full((6, 4), torch.nan)
    wanted["head.weight"] = torch.full((6, 4), torch.nan)
    module = on_meta(TiedModel)
    bind_module(module, make_slab(wanted).open())
    assert module.head.weight is module.embed.weight


def test_a_tied_pair_stored_with_different_bytes_is_refused(make_slab: MakeSlab) -> None:
    """Neither wins silently: the refusal names both, and the module is as it was."""
    wanted = stored(TiedModel(tied=False))
    module = on_meta(TiedModel)
    before = snapshot(module)
    with pytest.raises(BindError, match=r"embed.weight and head.weight.*tie") as refusal:
        bind_module(module, make_slab(wanted).open())
    assert refusal.value.reason == "tie_conflict"
    assert refusal.value.tie_conflicts == [["embed.weight", "head.weight"]]
    assert snapshot(module) == before


def test_parameters_untied_in_the_module_share_a_stored_tie(make_slab: MakeSlab) -> None:
    """One storage in the slab, two Parameters: fine, since neither can be written."""
    module = on_meta(lambda: TiedModel(tied=False))
    tensors = make_slab(stored(TiedModel())).open()
    bind_module(module, tensors)
    assert module.head.weight is not module.embed.weight
    assert module.head.weight.data_ptr() == module.embed.weight.data_ptr()


# --- what does not fit -----------------------------------------------------------------------


def test_everything_that_does_not_fit_is_listed_at_once(make_slab: MakeSlab) -> None:
    """Missing, unexpected, another shape, another dtype: one error with all names, and the module
    holds the very objects it held before."""
    module = on_meta(
        lambda: nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3), "n": nn.BatchNorm1d(3)})
    )
    wanted = {
        "a.weight": torch.ones(4, 2),
        "a.bias": torch.ones(3, dtype=torch.bfloat16),
        "b.weight": torch.ones(3, 2),
        "c.weight": torch.ones(1),
        "n.weight": torch.ones(3),
        "n.bias": torch.ones(3),
        "n.running_mean": torch.ones(3),
        "n.running_var": torch.ones(2),
    }
    before = snapshot(module)
    tensors = make_slab(wanted).open()
    with pytest.raises(Mismatch) as refusal:
        bind_module(module, tensors)
    error = refusal.value
    assert isinstance(error, BindError)
    assert error.missing == ["b.bias", "n.num_batches_tracked"]
    assert error.unexpected == ["c.weight"]
    assert error.mismatched == {
        "a.weight": {"module": "float32 [3, 2]", "stored": "float32 [4, 2]"},
        "a.bias": {"module": "float32 [3]", "stored": "bfloat16 [3]"},
        "n.running_var": {"module": "float32 [3]", "stored": "float32 [2]"},
    }
    assert error.reason == "missing_parameter"
    for name in (*error.missing, *error.unexpected, *error.mismatched):
        assert name in error.sentence
    assert "\n" not in error.sentence
    assert snapshot(module) == before
    assert binding_of(module) is None
    assert tensors.live_count() == 0


@pytest.mark.parametrize(
    ("change", "reason", "advice"),
    [
        ({"bias": None}, "missing_parameter", "own config"),
        ({"weight": torch.ones(9, 2)}, "shape_mismatch", "never casts"),
        ({"bias": torch.ones(3, dtype=torch.float16)}, "dtype_mismatch", "never casts"),
        ({"extra": torch.ones(1)}, "unexpected_tensor", "ignore="),
    ],
)
def test_each_kind_of_misfit_has_a_reason_and_an_advice(
    change: dict[str, Tensor | None], reason: str, advice: str, make_slab: MakeSlab
) -> None:
    """One word for programs, one sentence for persons."""
    everything: dict[str, Tensor | None] = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    wanted = {n: t for n, t in {**everything, **change}.items() if t is not None}
    with pytest.raises(BindError, match=advice) as refusal:
        bind_module(on_meta(lambda: nn.Linear(2, 3)), make_slab(wanted).open())
    assert refusal.value.reason == reason


def test_a_long_list_is_cut_in_the_sentence_and_whole_in_the_fields(make_slab: MakeSlab) -> None:
    """A hundred missing names: twenty are read, all are there for a program."""
    module = on_meta(lambda: nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(100)))
    with pytest.raises(BindError, match="and 80 more") as refusal:
        bind_module(module, make_slab({"x": torch.ones(1)}).open())
    assert len(refusal.value.missing) == 100


@pytest.mark.parametrize("prefix", ["_orig_mod.", "a.b."])
def test_a_prefix_of_the_stored_names_is_recognised(prefix: str, make_slab: MakeSlab) -> None:
    """Saved from a wrapped model: the refusal names the prefix, and with it the bind works."""
    wanted = {prefix + name: tensor for name, tensor in stored(TiedModel()).items()}
    tensors = make_slab(wanted).open()
    module = on_meta(TiedModel)
    with pytest.raises(BindError, match=f"prefix='{prefix}'") as refusal:
        bind_module(module, tensors)
    assert (refusal.value.prefix, refusal.value.reason) == (prefix, "missing_parameter")
    binding = bind_module(module, tensors, prefix=prefix)
    assert torch.equal(module.norm.weight, wanted[prefix + "norm.weight"])
    binding.detach()
    assert not tensors.owns(module.norm.weight)


def test_a_prefix_that_the_module_has_too_much_is_recognised(make_slab: MakeSlab) -> None:
    """Stored from the inner model, bound to the outer one: bind the submodule instead."""
    tensors = make_slab(stored(TiedModel())).open()
    outer = on_meta(lambda: nn.ModuleDict({"model": TiedModel()}))
    with pytest.raises(BindError, match="bind the submodule 'model' instead") as refusal:
        bind_module(outer, tensors)
    assert refusal.value.prefix == "model."
    bind_module(outer["model"], tensors)


def test_a_prefix_that_fits_only_some_names_is_not_offered(make_slab: MakeSlab) -> None:
    """One name in common with a longer one is no prefix."""
    tensors = make_slab({"x.weight": torch.ones(3, 2)}).open()
    with pytest.raises(BindError) as refusal:
        bind_module(on_meta(lambda: nn.Linear(2, 3)), tensors)
    assert refusal.value.prefix == ""


def test_parameters_without_a_shape_or_made_of_others_are_refused(make_slab: MakeSlab) -> None:
    """Lazy modules and wrapper subclasses: named, not half bound."""
    lazy = nn.LazyLinear(3)
    with pytest.raises(BindError) as refusal:
        bind_module(lazy, make_slab({"weight": torch.ones(3, 2), "bias": torch.ones(3)}).open())
    assert refusal.value.mismatched["weight"]["module"] == "uninitialised"

    class TwoTensors(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: object) -> object:
            raise NotImplementedError

    module = nn.Linear(2, 3, bias=False)
    wrapped: Any = torch.Tensor._make_wrapper_subclass(TwoTensors, (3, 2))
    module._parameters["weight"] = wrapped
    with pytest.raises(BindError, match="TwoTensors, made of other tensors"):
        bind_module(module, make_slab({"weight": torch.ones(3, 2)}).open())


def test_a_module_that_contains_itself_is_refused(make_slab: MakeSlab) -> None:
    """Instead of walking for ever."""
    module = nn.Linear(2, 3)
    module.itself = module
    with pytest.raises(UsageError, match="contains itself"):
        bind_module(module, make_slab({"weight": torch.ones(3, 2)}).open())


def test_a_module_that_resists_half_way_is_put_back(make_slab: MakeSlab) -> None:
    """Its own error comes out, every place holds what it held, and nothing shared lives."""
    module = StubbornModule()
    module.__dict__["accepted"] = module.weight.untyped_storage().data_ptr()
    before = snapshot(module)
    tensors = make_slab(stored(module)).open()
    with pytest.raises(RuntimeError, match="this weight is mine"):
        bind_module(module, tensors)
    assert snapshot(module) == before
    gc.collect()
    assert tensors.live_count() == 0


# --- buffers and leftovers -------------------------------------------------------------------


def test_a_stored_non_persistent_buffer_of_a_checkpoint_is_not_used(make_slab: MakeSlab) -> None:
    """The module keeps the values it computed; the stale ones are listed as ignored."""
    wanted = {**stored(TiedModel()), "angles": torch.full((4,), 9.0)}
    module = on_meta(TiedModel)
    binding = bind_module(module, make_slab(wanted).open())
    assert binding.ignored == ["angles"]
    assert module.angles.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_published_non_persistent_buffer_is_used(make_slab: MakeSlab) -> None:
    """An engine published it as such: its values are part of the model, also for one on meta."""
    wanted = {**stored(TiedModel()), "angles": torch.full((4,), 9.0)}
    tensors = make_slab(wanted, {"angles": "non-persistent-buffer"}).open()
    for module in (on_meta(TiedModel), TiedModel().to("meta")):
        binding = bind_module(module, tensors)
        assert module.angles.tolist() == [9.0] * 4
        assert not tensors.owns(module.angles)
        assert binding.ignored == []


def test_a_buffer_without_values_is_refused_with_how_to_build(make_slab: MakeSlab) -> None:
    """A model built under torch.device("meta") lost its non-persistent buffers."""
    with torch.device("meta"):
        module = TiedModel()
    with pytest.raises(BindError, match=r"angles.*parameters_on_meta\(\)") as refusal:
        bind_module(module, make_slab(stored(TiedModel())).open())
    assert (refusal.value.reason, refusal.value.on_meta) == ("on_meta", ["angles"])


def test_one_buffer_in_two_places_stays_one(make_slab: MakeSlab) -> None:
    """A shared buffer gets one private copy."""

    def make() -> nn.ModuleList:
        module = nn.ModuleList([nn.Module(), nn.Module()])
        scale = torch.ones(2)
        module[0].register_buffer("scale", scale)
        module[1].register_buffer("scale", scale)
        return module

    module = make()
    bind_module(module, make_slab({"0.scale": torch.tensor([2.0, 3.0])}).open())
    first, second = layers_of(module)
    assert first.scale is second.scale
    assert first.scale.tolist() == [2.0, 3.0]


def test_leftovers_of_old_releases_are_ignored_by_rule(make_slab: MakeSlab) -> None:
    """Position ids, rotary frequencies, and what the model's class lists; nothing else."""

    class Model(nn.Linear):
        _keys_to_ignore_on_load_unexpected = (r"pooler\.",)

    wanted = stored(nn.Linear(2, 3))
    leftovers = {
        "embeddings.position_ids": torch.arange(4),
        "layers.0.attn.rotary_emb.inv_freq": torch.ones(2),
        "encoder.pooler.weight": torch.ones(1),
    }
    module = on_meta(lambda: Model(2, 3))
    binding = bind_module(module, make_slab({**wanted, **leftovers}).open())
    assert sorted(binding.ignored) == sorted(leftovers)
    with pytest.raises(BindError, match="my_position_ids"):
        bind_module(
            on_meta(lambda: Model(2, 3)),
            make_slab({**wanted, "my_position_ids": torch.ones(1)}).open(),
        )


def test_what_may_stay_unused_can_be_said_with_patterns(make_slab: MakeSlab) -> None:
    """Shell patterns over whole stored names."""
    wanted = {**stored(nn.Linear(2, 3)), "mtp.a.weight": torch.ones(1), "mtp.b": torch.ones(1)}
    tensors = make_slab(wanted).open()
    with pytest.raises(BindError) as refusal:
        bind_module(on_meta(lambda: nn.Linear(2, 3)), tensors, ignore=["*.weight"])
    assert refusal.value.unexpected == ["mtp.b"]
    binding = bind_module(on_meta(lambda: nn.Linear(2, 3)), tensors, ignore=["mtp.*"])
    assert binding.ignored == ["mtp.a.weight", "mtp.b"]


# --- bound once ------------------------------------------------------------------------------


def test_a_bound_module_is_bound_again_only_after_detaching(make_slab: MakeSlab) -> None:
    """Neither it, nor a part of it, nor what contains it."""
    tensors = make_slab(stored(TiedModel())).open()
    module = on_meta(TiedModel)
    binding = bind_module(module, tensors)
    for again in (module, module.norm, nn.ModuleDict({"outer": module})):
        with pytest.raises(UsageError, match="bound to shared weights already: detach"):
            bind_module(again, tensors)
    states = [binding.is_bound]
    binding.detach()
    states.append(binding.is_bound)
    states.append(bind_module(module, tensors).is_bound)
    states.append(binding.is_bound)
    assert states == [True, False, True, False]


def test_a_binding_does_not_keep_its_module(make_slab: MakeSlab) -> None:
    """The module dies as it would unbound; then the weights can be released."""
    tensors = make_slab(stored(TiedModel())).open()
    module = on_meta(TiedModel)
    binding = bind_module(module, tensors)
    assert binding_of(module) is binding
    held = [binding.module is module, binding.is_bound]
    del module
    gc.collect()
    held += [binding.module is None, binding.is_bound]
    assert held == [True, True, True, False]
    assert tensors.live_count() == 0
    binding.detach()


def test_released_weights_bind_no_more(make_slab: MakeSlab) -> None:
    """The module is left as it was."""
    tensors = make_slab(stored(TiedModel())).open()
    tensors.close()
    module = on_meta(TiedModel)
    before = snapshot(module)
    with pytest.raises(UsageError, match="acquire them again"):
        bind_module(module, tensors)
    assert snapshot(module) == before


# --- detaching -------------------------------------------------------------------------------


def test_a_detached_module_is_private_writable_and_tied(make_slab: MakeSlab) -> None:
    """The same Parameter objects with bytes of their own; the slab is free to go."""
    ordinary = TiedModel()
    slab = make_slab(stored(ordinary))
    tensors = slab.open()
    module = on_meta(TiedModel)
    module.norm.bias.requires_grad_(False)
    binding = bind_module(module, tensors)
    table = module.embed.weight
    binding.detach()
    assert module.embed.weight is module.head.weight is table
    assert torch.equal(module(IDS), ordinary(IDS))
    assert table.untyped_storage().nbytes() == 6 * 4 * 4
    assert (table.requires_grad, module.norm.bias.requires_grad) == (True, False)
    assert tensors.live_tensors() == []
    before = slab.contents()
    with torch.no_grad():
        table.add_(1)
    assert slab.contents() == before
    binding.detach()  # again: nothing happens
    tensors.close()


def test_two_parameters_over_one_storage_share_one_after_detaching(make_slab: MakeSlab) -> None:
    """Fused weights published as slices of one storage stay slices of one."""
    fused = torch.arange(12.0).view(6, 2)
    tensors = make_slab({"0.weight": fused[:3], "1.weight": fused[3:]}).open()
    module = on_meta(lambda: nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(2)))
    bind_module(module, tensors).detach()
    first, second = (layer.weight for layer in layers_of(module))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.storage_offset() == 6
    assert second.tolist() == fused[3:].tolist()


def test_parameters_replaced_meanwhile_are_left_alone(make_slab: MakeSlab) -> None:
    """An adapter put in place of a weight, and a half-converted module, stay what they are."""
    tensors = make_slab(stored(TiedModel())).open()
    module = on_meta(TiedModel)
    binding = bind_module(module, tensors)
    own = nn.Parameter(torch.ones(4))
    module.norm.weight = own
    module.embed.half()
    binding.detach()
    assert module.norm.weight is own
    assert module.embed.weight.dtype is torch.float16
    assert tensors.live_count() == 0


# --- building --------------------------------------------------------------------------------


def test_parameters_are_built_on_meta_and_buffers_for_real() -> None:
    """Also inside ready-made layers; afterwards modules are built as ever."""
    module = on_meta(lambda: nn.Sequential(TiedModel(), nn.BatchNorm1d(3), nn.LSTM(2, 2)))
    assert all(p.is_meta and p.requires_grad for p in module.parameters())
    assert not any(b.is_meta for b in module.buffers())
    assert not any(p.is_meta for p in TiedModel().parameters())
    assert not hasattr(nn.Module.register_parameter, "__wrapped__")


def test_building_spends_nothing_on_values_that_meta_cannot_have() -> None:
    """No initialisation reaches a parameter, whichever way it is asked for; buffers get theirs."""

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        written: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func._schema.name.endswith("_") and args[0].is_meta:
                self.written.append(str(func))
            return func(*args, **(kwargs or {}))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4)])
            self.norm = nn.BatchNorm1d(3)
            self.scale = nn.Parameter(torch.ones(2))
            self.scale.data.normal_(std=0.02)
            nn.init.trunc_normal_(self.scale)
            nn.init.zeros_(tensor=self.scale)

    with Counting():  # type: ignore[no-untyped-call]
        model = on_meta(Model)
    assert Counting.written == []
    assert model.norm.running_var is not None
    assert model.norm.running_var.tolist() == [1.0] * 3


def test_building_keeps_ties_classes_and_attributes() -> None:
    """One Parameter registered in two modules is one on meta, too."""

    def make() -> nn.ModuleList:
        shared = LoadedParameter(torch.ones(2, 2), requires_grad=False)
        shared.weight_loader = len
        layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in layers:
            layer.weight = shared
        return layers

    first, second = (layer.weight for layer in on_meta(make))
    assert first is second
    assert type(first) is LoadedParameter
    assert first.weight_loader is len
    assert (first.is_meta, first.requires_grad) == (True, False)


def test_parameters_may_stay_the_objects_they_are() -> None:
    """For code that goes on with one that it has registered; values of others stay theirs."""

    class Careless(nn.Module):
        weight: LoadedParameter

        def __init__(self) -> None:
            super().__init__()
            weight = LoadedParameter(torch.ones(3, 2))
            self.register_parameter("weight", weight)
            weight.weight_loader = len
            seen = LoadedParameter(torch.ones(4))
            self.reference = weakref.ref(seen)  # forbids the exchange
            self.seen = seen

    with parameters_on_meta(same_objects=True):
        module = Careless()
    assert module.weight.is_meta
    assert module.weight.shape == (3, 2)
    assert module.weight.weight_loader is len
    assert module.seen.is_meta
    assert type(module.seen) is LoadedParameter
    with parameters_on_meta():
        assert not hasattr(Careless().weight, "weight_loader")


def test_building_may_be_nested_and_may_fail() -> None:
    """After an inner block, and after an exception, the outer state is back."""
    original = nn.Module.register_parameter
    with parameters_on_meta():
        with pytest.raises(ZeroDivisionError), parameters_on_meta():
            _ = 1 // 0
        assert nn.Linear(1, 1).weight.is_meta
    assert nn.Module.register_parameter is original
    assert not nn.Linear(1, 1).weight.is_meta


def test_building_concerns_the_own_thread_only() -> None:
    """Another thread builds an ordinary module meanwhile."""
    built: list[nn.Linear] = []
    with parameters_on_meta():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
        assert nn.Linear(1, 1).weight.is_meta
    assert not built[0].weight.is_meta


def test_a_parameter_without_elements_after_detaching(make_slab: MakeSlab) -> None:
    """It gets its gradients back like the others, though it lies nowhere."""
    module = nn.ParameterDict({"empty": torch.empty(0, 3), "full": torch.ones(2)})
    tensors = make_slab({"empty": torch.empty(0, 3), "full": torch.ones(2)}).open()
    binding = bind_module(module, tensors)
    assert [held.requires_grad for held in module.parameters()] == [False, False]
    binding.detach()
    assert [held.requires_grad for held in module.parameters()] == [True, True]
