"""Tensors over a mapped slab: what they are, what they share, and how long they live."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from broker.errors import UsageError
from broker.weights import ITEM_BYTES
from engine_client import storages, views
from tests.engine_client.conftest import MakeSlab
from tests.engine_client.slabs import Slab, extent_bytes, random_tensor, slab_of

# torch's own remark, once in a process, on making a tensor of complex32.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

PROJECT = Path(__file__).parents[2]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (
        wanted.dtype,
        wanted.shape,
        wanted.stride(),
    )
    assert extent_bytes(found) == extent_bytes(wanted)


# --- what they are ---------------------------------------------------------------------------


@pytest.mark.parametrize("imports_all", [True, False], ids=["this torch", "an older torch"])
def test_every_dtype_arrives_bit_for_bit(
    imports_all: bool, make_slab: MakeSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 22 dtypes of a slab, also where torch's import knows only bytes."""
    if not imports_all:
        monkeypatch.setattr(storages, "_imported", dict.fromkeys(ITEM_BYTES, False))
    wanted = {dtype: random_tensor(dtype, 3, 5, seed=i) for i, dtype in enumerate(ITEM_BYTES)}
    tensors = make_slab(wanted).open()
    for dtype, found in tensors.all().items():
        assert_same(found, wanted[dtype])
        assert found.untyped_storage().nbytes() == 15 * ITEM_BYTES[dtype]
        assert not found.requires_grad
    tensors.close()


def test_scalars_empties_and_strides_arrive_as_they_were(make_slab: MakeSlab) -> None:
    """0-dim, zero-size, transposed, sliced and expanded tensors keep shape and stride."""
    base = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    wanted = {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 7),
        "empty inside": torch.empty(3, 0, 5, dtype=torch.bfloat16),
        "transposed": base.clone().transpose(0, 2),
        "sliced": base.clone()[:, ::2, 1:],
        "expanded": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 4),
    }
    tensors = make_slab(wanted).open()
    for name, found in tensors.all().items():
        assert_same(found, wanted[name])
    tensors.close()


def test_a_slab_without_bytes_has_its_names(make_slab: MakeSlab) -> None:
    """A set of one empty tensor can be opened, used and closed."""
    tensors = make_slab({"nothing": torch.empty(0)}).open()
    assert list(tensors) == ["nothing"]
    assert len(tensors) == 1
    assert tensors.tensor("nothing").numel() == 0
    assert tensors.live_tensors() == []
    tensors.close()


def test_an_unknown_name_is_a_key_error(make_slab: MakeSlab) -> None:
    """As in any mapping."""
    tensors = make_slab({"weight": torch.ones(2)}).open()
    with pytest.raises(KeyError, match="bias"):
        tensors.tensor("bias")
    with pytest.raises(KeyError, match="bias"):
        tensors.take(["weight", "bias"])
    tensors.close()


def test_a_dtype_this_torch_lacks_is_named_with_the_tensor(
    make_slab: MakeSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old torch is told which tensor needs a newer one, and the mapping is closed."""
    slab = make_slab({"scale": random_tensor("float8_e8m0fnu", 4)})
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    released: list[bool] = []
    with pytest.raises(UsageError, match=r"'scale' is float8_e8m0fnu, which torch .* not"):
        slab.open(lambda: released.append(True))
    assert released == [True]


def test_an_unknown_platform_is_refused_and_the_mapping_left_alone(make_slab: MakeSlab) -> None:
    """A broker of a later version may know devices that this client does not."""
    slab = make_slab({"weight": torch.ones(2)})
    mapping = slab.map()
    with pytest.raises(UsageError, match="platform 'abacus'"):
        views.SlabTensors(mapping, slab.manifest, "abacus")
    mapping.close()


def test_a_set_opened_within_contexts_is_an_ordinary_one(
    make_slab: MakeSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default device and inference_mode of the caller reach neither tensors nor bookkeeping."""
    monkeypatch.setattr(storages, "_imported", {})
    base = torch.ones(4)
    slab = make_slab({"a": base, "b": base, "c": torch.ones(2), "d": torch.empty(0)})
    with torch.device("meta"), torch.inference_mode():
        found = slab.open().all()
    assert [tensor.tolist() for tensor in found.values()] == [[1.0] * 4, [1.0] * 4, [1.0] * 2, []]
    assert not any(tensor.is_inference() for tensor in found.values())


def test_tensors_made_in_inference_mode_are_ordinary_ones(make_slab: MakeSlab) -> None:
    """A first access under inference_mode does not spoil a tensor for training beside it."""
    tensors = make_slab({"a": torch.ones(2), "b": torch.ones(2)}).open()
    with torch.inference_mode():
        one, many = tensors.tensor("a"), tensors.take(["b"])
    assert not one.is_inference()
    assert not many[0].is_inference()
    tensors.close()


# --- what they share -------------------------------------------------------------------------


def test_asking_again_gives_the_same_object_while_somebody_keeps_it(make_slab: MakeSlab) -> None:
    """One by one and in bulk, in either order."""
    tensors = make_slab({"a": torch.ones(2), "b": torch.ones(3)}).open()
    a = tensors.tensor("a")
    everything = tensors.all()
    assert everything["a"] is a
    assert tensors.tensor("b") is everything["b"]
    assert tensors.all()["b"] is everything["b"]
    tensors.close()


def test_a_tensor_that_was_turned_into_something_else_is_made_anew(make_slab: MakeSlab) -> None:
    """After `.data = …` or `t_()` on the object, the name still gives the stored tensor."""
    tensors = make_slab({"a": torch.ones(2), "b": torch.ones(2, 3)}).open()
    a, b = tensors.tensor("a"), tensors.tensor("b")
    a.data = torch.zeros(2)
    b.t_()
    assert tensors.tensor("a").tolist() == [1.0, 1.0]
    assert tensors.tensor("b").shape == (2, 3)
    tensors.close()


def test_what_was_taken_and_what_is_asked_for_share_a_storage(make_slab: MakeSlab) -> None:
    """A taken tensor is an object of its own, before and after somebody asked by name."""
    tensors = make_slab({"a": torch.ones(2)}).open()
    [first] = tensors.take(["a"])
    first.__class__ = torch.nn.Parameter
    asked = tensors.tensor("a")
    [second] = tensors.take(["a"])
    assert type(asked) is Tensor
    assert second is not asked
    assert tensors.live_count() == 1
    tensors.close()


def test_ties_and_views_share_one_storage(make_slab: MakeSlab) -> None:
    """Names over one storage come back over one storage, with their offsets; others alone."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    wanted = {
        "embed": base,
        "head": base,
        "rows": base[1:3],
        "flat bytes": base.view(-1).view(torch.uint8)[8:],
        "alone": torch.ones(24),
    }
    tensors = make_slab(wanted).open()
    rows = tensors.tensor("rows")  # the last first, alone
    found = tensors.all()
    for name, tensor in found.items():
        assert_same(tensor, wanted[name])
    addresses = {n: t.untyped_storage().data_ptr() for n, t in found.items()}
    assert len({addresses[n] for n in ("embed", "head", "rows", "flat bytes")}) == 1
    assert addresses["alone"] != addresses["embed"]
    assert found["embed"].untyped_storage().nbytes() == 96
    assert tensors.live_count() == 2
    assert tensors.storage_key("embed") == tensors.storage_key("head")
    assert tensors.storage_key("embed") != tensors.storage_key("rows")
    del found, rows, tensor
    assert tensors.live_count() == 0
    tensors.close()


@st.composite
def _tensor_sets(draw: st.DrawFn) -> dict[str, Tensor]:
    """Sets of tensors of any dtype, some of them views of others."""
    made: dict[str, Tensor] = {}
    names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    for name in draw(st.lists(names, min_size=1, max_size=8, unique=True)):
        is_view = draw(st.booleans())
        if made and is_view:
            base = made[draw(st.sampled_from(sorted(made)))]
        else:
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
            base = random_tensor(dtype, *shape, seed=draw(st.integers(0, 9)))
        if base.dim() and draw(st.booleans()):
            base = base.transpose(0, -1)
        if base.dim() and draw(st.booleans()):
            base = base[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
        made[name] = base.detach()
    return made


@given(wanted=_tensor_sets(), in_bulk=st.booleans())
def test_a_round_trip_loses_nothing(wanted: dict[str, Tensor], in_bulk: bool) -> None:
    """Names, dtypes, shapes, strides, bytes, and who shares a storage with whom."""
    slab = slab_of(wanted, {})
    tensors = slab.open()
    found = tensors.all() if in_bulk else {name: tensors.tensor(name) for name in wanted}
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        assert_same(tensor, wanted[name])
    for one in wanted:
        for other in wanted:
            assert _share(found[one], found[other]) == _share(wanted[one], wanted[other])
    slab.close()
    tensors.close()


def _share(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel():
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# --- saving ----------------------------------------------------------------------------------


def test_saving_one_tensor_writes_one_tensor(make_slab: MakeSlab) -> None:
    """torch.save and safetensors write the small tensor, not the slab around it."""
    tensors = make_slab({"small": torch.ones(8), "large": torch.ones(1 << 18)}).open()
    ordinary, shared = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(8), ordinary)
    torch.save(tensors.tensor("small"), shared)
    assert len(shared.getvalue()) == len(ordinary.getvalue())
    everything = dict(tensors.all())
    data = safetensors.torch.save(everything)
    assert safetensors.torch.load(data)["large"].sum().item() == 1 << 18
    tensors.close()


# --- life ------------------------------------------------------------------------------------


def test_a_view_of_a_tensor_keeps_the_slab_mapped_and_is_named(make_slab: MakeSlab) -> None:
    """The tensor objects are gone, a slice remains: named, readable, and the last to unmap."""
    released: list[bool] = []
    slab = make_slab({"a": torch.ones(4), "b": torch.arange(4.0)})
    tensors = slab.open(lambda: released.append(True))
    kept = tensors.all()["b"][1:3]
    assert tensors.live_tensors() == ["b"]
    tensors.close()
    assert released == []
    assert kept.tolist() == [1.0, 2.0]
    del kept
    assert released == [True]


def test_a_storage_without_a_tensor_is_told_as_a_remark(make_slab: MakeSlab) -> None:
    """Somebody kept the storage alone: it has no name, but release must not overlook it."""
    tensors = make_slab({"a": torch.ones(4), "b": torch.ones(4)}).open()
    storage, kept = tensors.tensor("a").untyped_storage(), tensors.tensor("b")
    assert tensors.live_tensors() == ["b", "(1 more)"]
    del storage, kept
    assert tensors.live_tensors() == []
    tensors.close()


def test_names_of_a_shared_storage_are_all_told(make_slab: MakeSlab) -> None:
    """Whoever holds one tied tensor holds the storage of both."""
    base = torch.ones(4)
    tensors = make_slab({"embed": base, "head": base, "other": torch.ones(1)}).open()
    kept = tensors.tensor("head")
    assert tensors.live_tensors() == ["embed", "head"]
    del kept
    assert tensors.live_tensors() == []
    tensors.close()


def test_a_forgotten_set_is_unmapped_with_its_last_tensor(make_slab: MakeSlab) -> None:
    """Nobody calls close: the object dies, then the tensor, then the mapping."""
    released: list[bool] = []
    tensors = make_slab({"a": torch.ones(4)}).open(lambda: released.append(True))
    kept = tensors.tensor("a")
    del tensors
    gc.collect()
    assert released == []
    assert kept.tolist() == [1.0] * 4
    del kept
    assert released == [True]


def test_a_closed_set_gives_no_more_tensors(make_slab: MakeSlab) -> None:
    """Neither one by one nor in bulk; closing again is harmless."""
    tensors = make_slab({"a": torch.ones(4)}).open()
    kept = tensors.tensor("a")
    tensors.close()
    tensors.close()
    assert kept.tolist() == [1.0] * 4
    with pytest.raises(UsageError, match="acquire them again"):
        tensors.tensor("a")
    with pytest.raises(UsageError, match="acquire them again"):
        tensors.all()


def test_tensors_saved_for_backward_keep_the_slab_mapped(make_slab: MakeSlab) -> None:
    """Training an adapter beside shared weights: autograd's own reference counts."""
    released: list[bool] = []
    tensors = make_slab({"w": torch.ones(3, 3)}).open(lambda: released.append(True))
    adapter = torch.ones(3, requires_grad=True)
    loss = (tensors.tensor("w") @ adapter).sum()
    assert tensors.live_tensors() == ["w"]
    tensors.close()
    loss.backward()  # type: ignore[no-untyped-call]
    assert adapter.grad is not None
    assert adapter.grad.tolist() == [3.0] * 3
    del loss
    assert released == [True]


def test_the_name_behind_an_address_is_the_storage_it_lies_in(make_slab: MakeSlab) -> None:
    """Also for a view in the middle; foreign tensors belong to no name."""
    base = torch.ones(600)
    tensors = make_slab({"a": torch.ones(300), "t1": base, "t2": base, "z": torch.ones(1)}).open()
    assert tensors.name_of(tensors.tensor("a")[299:]) == "a"
    assert tensors.name_of(tensors.tensor("t2")[300:]) == "t1"
    assert tensors.name_of(tensors.tensor("z")) == "z"
    assert tensors.name_of(torch.ones(3)) is None
    assert tensors.name_of(torch.empty(3, device="meta")) is None
    assert not tensors.owns(torch.empty(0))
    tensors.close()


# --- in processes of their own ---------------------------------------------------------------


def _run(scenario: str, slab: Slab) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.engine_client.scenarios", scenario, str(slab.descriptor)],
        pass_fds=[slab.descriptor],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_a_write_kills_the_writer_and_nobody_else(make_slab: MakeSlab) -> None:
    """The writing process dies by SIGSEGV; the slab is what it was for everybody else."""
    slab = make_slab({"weight": torch.arange(4.0)})
    mine = slab.open()
    before = slab.contents()
    writer = _run("write", slab)
    assert writer.stdout == "about to write\n"
    assert writer.returncode == -11
    assert slab.contents() == before
    assert mine.tensor("weight").tolist() == [0.0, 1.0, 2.0, 3.0]
    mine.close()


def test_a_forked_child_is_refused_and_unmaps_nothing(make_slab: MakeSlab) -> None:
    """The child gets a sentence; what dies there leaves the parent's mapping alone. And tensors
    that live until the interpreter is gone do not disturb its end."""
    slab = make_slab({"weight": torch.arange(4.0)})
    done = _run("fork", slab)
    assert done.stderr == ""
    refusal, child, parent = done.stdout.splitlines()
    assert refusal.startswith("child: these weights were mapped before a fork")
    assert child == "child released: []"
    assert parent == "parent reads [0.0, 1.0, 2.0, 3.0]"
    assert done.returncode == 0
