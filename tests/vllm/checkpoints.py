"""Small checkpoints that vLLM can run, made on the spot."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

VOCABULARY = 512
PROMPT = [1, 17, 230, 5, 96]


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # so that greedy decoding does not stand still
}


def make_llama(folder: Path) -> Path:
    """A Llama with random weights, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _make(LlamaForCausalLM, LlamaConfig(**SIZES), folder)


def make_mixtral(folder: Path) -> Path:
    """One with experts, whose weights vLLM writes to while it processes them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return _make(MixtralForCausalLM, config, folder)


def _make(kind: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(1)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def copy_of(checkpoint: Path, folder: Path) -> Path:
    """The same bytes in another folder: other inodes, other times."""
    shutil.copytree(checkpoint, folder)
    return folder


def twin_of(checkpoint: Path, folder: Path) -> Path:
    """The same headers, other bytes: a megabyte of weights with their signs the other way."""
    copy_of(checkpoint, folder)
    shard = min(folder.glob("*.safetensors"))
    with shard.open("r+b") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + header)
        weights = bytearray(file.read(1 << 20))
        weights[1::2] = bytes(byte ^ 0x80 for byte in weights[1::2])  # of each bfloat16 the sign
        file.seek(8 + header)
        file.write(weights)
    return folder


def prompt_of(checkpoint: Path) -> list[int]:
    """ "The capital of France is" in the checkpoint's own tokens if it has a tokenizer."""
    if not (checkpoint / "tokenizer.json").exists():
        return PROMPT
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("The capital of France is").ids
    return ids


def text_of(checkpoint: Path, tokens: list[int]) -> str:
    """What the tokens say, if there is a tokenizer."""
    if not (checkpoint / "tokenizer.json").exists():
        return " ".join(str(token) for token in tokens[:6]) + " …"
    from tokenizers import Tokenizer

    return repr(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(tokens))
