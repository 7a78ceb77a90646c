"""Checkpoints to measure with, made in a moment: their bytes are a hole in the file, or random."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from broker.weights import tensor_nbytes

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"}
Described = tuple[str, str, Sequence[int]]
"""A tensor's name, torch dtype and shape."""


def write_checkpoint(folder: Path, tensors: Sequence[Described], *, random: bool = False) -> Path:
    """A safetensors file of these tensors in a folder of its own; the folder.

    Args:
        random: random bytes instead of zeros that take no room on the disk. In the page cache, in
            a slab and in private memory both are whole pages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, entries = 0, {}
    for name, dtype, shape in tensors:
        begin, end = end, end + tensor_nbytes(dtype, list(shape))
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        if random:
            _write_random(file.fileno(), len(header) + 8, end)
        else:
            file.truncate(len(header) + 8 + end)
    return folder


def _write_random(file: int, offset: int, nbytes: int) -> None:
    block = os.urandom(min(nbytes, 16 << 20))
    for at in range(0, nbytes, len(block)):
        part = block[: nbytes - at]
        if os.pwrite(file, part, offset + at) != len(part):
            raise OSError("the disk is full")


def equal_tensors(count: int, nbytes: int) -> list[Described]:
    """As many tensors of `nbytes` in all, in blocks of ten as a transformer has layers."""
    elements = max(1, nbytes // count // 2)
    columns = 32 if elements % 32 == 0 else 1
    shape = (elements // columns, columns)
    return [(f"layers.{at // 10}.part{at % 10}", "float16", shape) for at in range(count)]


def llama(
    *, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int
) -> list[Described]:
    """A Llama's tensors in bfloat16, its head tied to its embedding as small ones have it."""
    head = hidden // heads
    parts = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, mlp),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
    }
    tensors: list[Described] = [("model.embed_tokens.weight", "bfloat16", (vocabulary, hidden))]
    for layer in range(layers):
        tensors += [
            (f"model.layers.{layer}.{part}.weight", "bfloat16", shape)
            for part, shape in parts.items()
        ]
    return [*tensors, ("model.norm.weight", "bfloat16", (hidden,))]
