"""Checkpoints that are loaded in another dtype than they are stored in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from broker.checkpoints.dtypes import plan_conversion
from broker.checkpoints.identity import CHUNK_BYTES, slab_identity
from broker.errors import LoadFailed
from broker.wire import Conversion
from tests.checkpoints.loading import load, plan_of
from tests.support.safetensors_files import stored, write_config, write_file

HALF = Conversion("float16")


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def weights() -> dict[str, torch.Tensor]:
    """More than a chunk in either dtype, an odd number of elements, and what is no float."""
    torch.manual_seed(0)
    return {
        "big": torch.randn(700, 1001),
        "bias": torch.randn(33),
        "empty": torch.zeros(0, 5),
        "ids": torch.arange(7),
        "norm": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(1.5),
        "there already": torch.randn(9).half(),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_float_is_converted(tmp_path: Path, dtype: str, threads: int) -> None:
    """Each tensor is what torch's own `.to` gives, whole numbers as they were."""
    tensors = weights()
    loaded = load(write(tmp_path, tensors), threads=threads, conversion=Conversion(dtype))
    target = getattr(torch, dtype)
    expected = {n: t.to(target) if t.is_floating_point() else t for n, t in tensors.items()}
    assert loaded.tensors() == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw(tensor))
        for name, tensor in expected.items()
    }
    assert loaded.plan.dtype == dtype
    assert loaded.result.nbytes == sum(len(raw(tensor)) for tensor in tensors.values())


def test_the_identity_is_that_of_what_is_loaded(tmp_path: Path) -> None:
    """Converted weights, the same stored in that dtype, and the slab all have one identity."""
    tensors = weights()
    halves = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    converted = load(write(tmp_path / "a", tensors), conversion=HALF)
    as_stored = load(write(tmp_path / "b", halves))
    plain = load(tmp_path / "a")
    assert converted.result.checkpoint == as_stored.result.checkpoint
    assert converted.result.checkpoint != plain.result.checkpoint
    manifest, memory = converted.plan.manifest, memoryview(converted.memory)
    assert slab_identity(manifest, memory) == converted.result.checkpoint


def test_exceptions(tmp_path: Path) -> None:
    """A tensor that is named gets its own dtype, also none but the stored one."""
    tensors = weights()
    kept = Conversion("float16", (("bias", "float32"), ("norm", "float32")))
    loaded = load(write(tmp_path, tensors), conversion=kept)
    found = loaded.tensors()
    assert found["bias"] == ("float32", (33,), raw(tensors["bias"]))
    assert found["norm"] == ("float32", (5,), raw(tensors["norm"].float()))
    assert found["big"][0] == "float16"
    assert loaded.plan.dtype == "float16+float32"


def test_ties(tmp_path: Path) -> None:
    """Tied tensors share a slot if both get the same dtype, and have one each if not."""
    head = torch.randn(8, 4)
    tensors = {"lm_head.weight": head, "model.embed_tokens.weight": head.clone()}
    write(tmp_path, tensors)
    write_config(tmp_path, tie_word_embeddings=True)
    assert len(plan_of(tmp_path, HALF).manifest.aliases) == 1
    apart = Conversion("float16", (("lm_head.weight", "float32"),))
    assert plan_of(tmp_path, apart).manifest.aliases == []


def test_nothing_to_convert(tmp_path: Path) -> None:
    """Weights that are of the dtype already are loaded as they are stored."""
    write(tmp_path, {"w": torch.randn(4).half()})
    plan = plan_of(tmp_path, HALF)
    assert not plan.converts
    assert plan.manifest == plan_of(tmp_path).manifest


def test_a_piece_for_each_converted_chunk(tmp_path: Path) -> None:
    """Chunks are counted in the slab's bytes, so that they are digested as `verify` does."""
    write(tmp_path, {"w": torch.zeros(3 * CHUNK_BYTES // 4)})
    plan = plan_of(tmp_path, HALF)
    assert [piece.image for piece in plan.pieces] == [CHUNK_BYTES, CHUNK_BYTES // 2]
    assert [piece.nbytes for piece in plan.pieces] == [2 * CHUNK_BYTES, CHUNK_BYTES]
    assert plan.total_bytes == 3 * CHUNK_BYTES


# --- refused -------------------------------------------------------------------------------------


def refusal(path: Path, conversion: Conversion) -> LoadFailed:
    with pytest.raises(LoadFailed) as raised:
        plan_of(path, conversion)
    assert raised.value.fields["reason"] == "conversion"
    return raised.value


@pytest.mark.parametrize(("dtype", "others"), [("float64", 1 << 60), ("float16", 1 << 62)])
def test_an_empty_tensor_too_large_for_torch(tmp_path: Path, dtype: str, others: int) -> None:
    """Its other dimensions are counted in bytes of the dtype that it gets."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [others, 0], "data_offsets": [0, 0]}})
    header += " " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    said = f"its other dimensions exceed 2\\*\\*63 - 1 bytes as {dtype}"
    with pytest.raises(LoadFailed, match=said) as raised:
        plan_of(path, Conversion(dtype))
    error = raised.value
    assert (error.reason, error.tensor, error.file) == ("bad_shape", "w", "model.safetensors")


def test_eight_bits_are_not_converted(tmp_path: Path) -> None:
    """They mean nothing without their scales: refused by name, before any byte is read."""
    write_file(tmp_path / "model.safetensors", [stored("w", "F8_E4M3", (4,))])
    sentence = refusal(tmp_path, HALF).sentence
    assert "tensor 'w' in 'model.safetensors' is float8_e4m3fn, which is not converted" in sentence


def test_quantised_weights_are_not_converted(tmp_path: Path) -> None:
    """Their numbers are not the weights."""
    write(tmp_path, {"w": torch.zeros(4)})
    write_config(tmp_path, quantization_config={"quant_method": "gptq"})
    assert "the weights are quantised" in refusal(tmp_path, HALF).sentence


def test_an_exception_that_is_not_there(tmp_path: Path) -> None:
    """A misspelt name would have been converted silently: refused."""
    write(tmp_path, {"w": torch.zeros(4)})
    misspelt = Conversion("float16", (("v", "float32"),))
    assert "'v' was to get a dtype of its own" in refusal(tmp_path, misspelt).sentence


def test_a_checkpoint_without_a_tensor() -> None:
    """There is nothing to convert and nothing to complain about."""
    assert plan_conversion([], [], {}, HALF, None) == ([], {})
