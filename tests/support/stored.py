"""Checkpoints for tests, written without torch, numpy or the safetensors library."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

BIG_TENSOR_BYTES = 32 << 20
ITEM_BYTES = {"F32": 4, "BF16": 2}


def write_safetensors(path: Path, tensors: Mapping[str, bytes], dtype: str = "F32") -> Path:
    """One file of one-dimensional tensors, by the format's own rules."""
    with path.open("wb") as file:
        file.write(_header({name: len(data) for name, data in tensors.items()}, dtype))
        for data in tensors.values():
            file.write(data)
    return path


def _header(sizes: Mapping[str, int], dtype: str) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for name, nbytes in sizes.items():
        shape = [nbytes // ITEM_BYTES[dtype]]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def small_checkpoint(
    folder: Path, seed: int = 0, *, tensors: int = 4, nbytes: int = 1 << 16, dtype: str = "F32"
) -> Path:
    """A folder with `model.safetensors`: equal headers for equal sizes, bytes by the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed)  # noqa: S311 - filler
    weights = {f"layer.{i}.weight": source.randbytes(nbytes) for i in range(tensors)}
    write_safetensors(folder / "model.safetensors", weights, dtype)
    return folder


def big_checkpoint(folder: Path, shards: int, shard_bytes: int) -> Path:
    """Shards and their index whose files take next to no room: all but the headers are holes.

    What is read of a hole are zeros, and they fill a slab like any other bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = [f"layer.{shard}.{i}.weight" for i in range(shard_bytes // BIG_TENSOR_BYTES)]
        _write_holes(folder / file, names)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": shards * shard_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_holes(path: Path, names: list[str]) -> None:
    sizes = dict.fromkeys(names, BIG_TENSOR_BYTES)
    with path.open("wb") as file:
        file.write(_header(sizes, "BF16"))
        file.truncate(file.tell() + sum(sizes.values()))


def cut_short(checkpoint: Path, nbytes: int = 100) -> Path:
    """Take the last bytes off its file: the header promises more than there is."""
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - nbytes)
    return checkpoint
