"""The plan of a load: complete, laid out, and refused before a weight is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from broker.checkpoints import plan as plan_module
from broker.errors import LoadFailed
from broker.weights import SLOT_ALIGNMENT, validate_manifest
from tests.checkpoints.loading import load, plan_of
from tests.support.safetensors_files import (
    INDEX,
    SINGLE,
    shard_name,
    stored,
    write_config,
    write_file,
    write_index,
    write_shards,
)

A, B = stored("a.weight"), stored("b.weight", "BF16", (6,))
ONE, TWO = shard_name(1, 2), shard_name(2, 2)


def refusal(path: Path) -> LoadFailed:
    with pytest.raises(LoadFailed) as caught:
        plan_of(path)
    assert str(path) in caught.value.sentence
    return caught.value


def test_manifest_groups_tensors_of_one_kind(tmp_path: Path) -> None:
    """Tensors of equal dtype and shape are one group; every slot is aligned."""
    tensors = [A, B, stored("c.weight"), stored("d", shape=(2, 2)), stored("e", shape=(0, 4))]
    manifest = plan_of(write_file(tmp_path / SINGLE, tensors)).manifest
    groups = {(g.dtype, tuple(g.shape)): g for g in manifest.groups}
    assert groups["float32", (4,)].names == ["a.weight", "c.weight"]
    assert groups["float32", (2, 2)].stride == [2, 1]
    assert groups["float32", (0, 4)].offsets == [0]
    assert {group.kind for group in manifest.groups} == {"tensor"}
    offsets = [at for group in manifest.groups for at in group.offsets]
    assert not any(at % SLOT_ALIGNMENT for at in offsets)
    assert manifest.nbytes == 3 * SLOT_ALIGNMENT + 16
    validate_manifest(manifest, manifest.nbytes)


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    """No tensors are a manifest of no bytes."""
    plan = plan_of(write_file(tmp_path / SINGLE, []))
    assert (plan.manifest.nbytes, plan.manifest.groups, plan.pieces) == (0, [], [])
    assert plan.dtype == ""


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["F32"], "float32"),
        (["F32", "BF16", "I64"], "bfloat16+float32"),
        (["I8", "BOOL"], "bool+int8"),
        (["C64", "F8_E4M3", "F4"], "complex64+float4_e2m1fn_x2+float8_e4m3fn"),
    ],
)
def test_dtype_names_the_floating_ones(dtypes: list[str], expected: str, tmp_path: Path) -> None:
    """Floating and complex dtypes in sorted order; all dtypes where none is floating."""
    tensors = [stored(dtype, dtype, (2,)) for dtype in dtypes]
    assert plan_of(write_file(tmp_path / SINGLE, tensors)).dtype == expected


# --- shards and index ---------------------------------------------------------------------------


def test_missing_shards_are_named_before_any_is_read(tmp_path: Path) -> None:
    """All absent shards are named although a present one is damaged."""
    names = [shard_name(number, 4) for number in range(1, 5)]
    write_shards(tmp_path, [[A], [B], [stored("c")], [stored("d")]])
    for name in names[1:3]:
        (tmp_path / name).unlink()
    (tmp_path / names[0]).write_bytes(b"damaged")
    error = refusal(tmp_path)
    assert error.reason == "missing_shard"
    assert error.missing == names[1:3]


def test_index_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    """An index that promises more than the shards have is refused by tensor and shard."""
    write_shards(tmp_path, [[A], [B]])
    write_index(tmp_path, {"a.weight": ONE, "b.weight": ONE, "c.weight": TWO})
    error = refusal(tmp_path)
    assert error.reason == "missing_tensor"
    assert (error.file, error.tensor) == (ONE, "b.weight")
    assert "c.weight" in error.sentence


def test_index_decides_between_two_shards(tmp_path: Path) -> None:
    """Of two tensors of one name the one is taken that the index names."""
    write_shards(tmp_path, [[A, B], [stored("b.weight", "BF16", (6,), seed=7)]])
    write_index(tmp_path, {"a.weight": ONE, "b.weight": TWO})
    tensors = load(tmp_path).tensors()
    assert tensors["b.weight"][2] == stored("b.weight", "BF16", (6,), seed=7).data
    assert tensors["a.weight"][2] == A.data


def test_unlisted_tensor_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor the index does not mention is loaded, and the log says so."""
    write_shards(tmp_path, [[A], [B]])
    write_index(tmp_path, {"a.weight": ONE, "b.weight": TWO})
    write_file(tmp_path / TWO, [B, stored("extra")])
    with caplog.at_level(logging.WARNING):
        assert set(load(tmp_path).tensors()) == {"a.weight", "b.weight", "extra"}
    assert "'extra'" in caplog.text


@pytest.mark.parametrize("index", [True, False])
def test_nothing_settles_which_is_meant(index: bool, tmp_path: Path) -> None:
    """A tensor in two shards that no index settles is refused, equal bytes or not."""
    write_shards(tmp_path, [[A, stored("x")], [B, stored("x")]], index=False)
    if index:
        write_index(tmp_path, {"a.weight": ONE, "b.weight": TWO})
    error = refusal(tmp_path)
    assert error.reason == "ambiguous_tensor"
    assert (error.file, error.tensor) == (TWO, "x")
    assert ONE in error.sentence


def test_total_size_is_only_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stale total size stops nothing."""
    write_shards(tmp_path, [[A], [B]])
    write_index(tmp_path, {"a.weight": ONE, "b.weight": TWO}, total_size=1e12)
    with caplog.at_level(logging.WARNING):
        assert plan_of(tmp_path).total_bytes == 28
    assert "the shards decide" in caplog.text


def test_every_shard_is_checked_before_any_is_copied(tmp_path: Path) -> None:
    """A fault in the last shard is found while planning."""
    write_shards(tmp_path, [[A], [B]])
    path = tmp_path / TWO
    path.write_bytes(path.read_bytes()[:-1])
    error = refusal(tmp_path)
    assert error.reason == "truncated"
    assert (error.file, error.tensor) == (TWO, "b.weight")


def test_index_replaced_while_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index that was decoded is the one that is stamped, or the plan is refused."""
    write_shards(tmp_path, [[A], [B]])

    def replacing(*arguments: Any) -> None:
        write_index(tmp_path, {"a.weight": ONE, "b.weight": TWO}, replaced=True)

    monkeypatch.setattr(plan_module, "require_shards", replacing)
    error = refusal(tmp_path)
    assert (error.reason, error.file) == ("changed", INDEX)


# --- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, {"quant_method": "fp8"}),
        ({"compression_config": {"quant_method": "x"}}, {"quant_method": "x"}),
        (
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            {"quant_method": "awq"},
        ),
        ({"quantization_config": "odd"}, {"quant_method": "odd"}),
        ({"quantization_config": None, "text_config": 7}, None),
    ],
)
def test_quantization_settings(
    config: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Quantisation settings are found wherever configurations have them."""
    write_file(tmp_path / SINGLE, [A])
    write_config(tmp_path, **config)
    plan = plan_of(tmp_path)
    assert plan.quantization == expected
    assert plan.config == config


def test_no_configuration(tmp_path: Path) -> None:
    """A checkpoint needs no config.json."""
    plan = plan_of(write_file(tmp_path / SINGLE, [A]))
    assert plan.config is None
    assert plan.quantization is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "version https://git-lfs.github.com/spec/v1\n", "[" * 9999]
)
def test_a_configuration_that_is_none(text: str, tmp_path: Path) -> None:
    """A config.json that cannot be read is refused, not guessed at."""
    write_file(tmp_path / SINGLE, [A])
    (tmp_path / "config.json").write_text(text)
    error = refusal(tmp_path)
    assert (error.reason, error.file) == ("bad_config", "config.json")
