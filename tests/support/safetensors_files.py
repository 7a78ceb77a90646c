"""Safetensors files for tests, well-formed and not, written without the library.

Nothing here checks anything: a header may lie about its tensors, have a key twice or be no header.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 8),
    **dict.fromkeys(["F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 16),
    **dict.fromkeys(["U32", "I32", "F32"], 32),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 64),
}
"""Bits of an element of every dtype of the format."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """A tensor as a file has it: dtype and shape are the format's, not torch's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(name: str, dtype: str = "F32", shape: Sequence[int] = (4,), seed: int = 0) -> Stored:
    """A tensor with bytes that depend on name and seed."""
    bits = BITS[dtype]
    for n in shape:
        bits *= n
    data = random.Random(f"{name} {seed}").randbytes(bits // 8)  # noqa: S311 - filler
    return Stored(
        name, dtype, tuple(shape), bytes(b & 1 for b in data) if dtype == "BOOL" else data
    )


def entry(dtype: str, shape: object, begin: object, end: object, **more: object) -> str:
    """The JSON of one tensor's entry, whatever the values are."""
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more})


def entries(tensors: Iterable[Stored]) -> list[tuple[str, str]]:
    """Name and entry of each tensor, back to back."""
    result, at = [], 0
    for name, dtype, shape, data in tensors:
        result.append((name, entry(dtype, list(shape), at, at + len(data))))
        at += len(data)
    return result


def header_text(pairs: Iterable[tuple[str, str]], metadata: str | None = None) -> bytes:
    """A header from names and entries; names may repeat. `metadata` is JSON."""
    first = [] if metadata is None else [("__metadata__", metadata)]
    parts = [f"{json.dumps(name, ensure_ascii=False)}:{text}" for name, text in [*first, *pairs]]
    return ("{" + ",".join(parts) + "}").encode("utf-8", "surrogatepass")


def write_raw(path: Path, header: bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    """Length word (a lie if `length` is given), header and data, as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    word = (len(header) if length is None else length).to_bytes(8, "little")
    path.write_bytes(word + header + data)
    return path


def write_file(path: Path, tensors: Sequence[Stored], metadata: str | None = None) -> Path:
    """A well-formed file."""
    header = header_text(entries(tensors), metadata)
    return write_raw(path, header, b"".join(tensor.data for tensor in tensors))


def write_index(folder: Path, weight_map: Mapping[str, object], **metadata: object) -> Path:
    path = folder / INDEX
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return path


def shard_name(number: int, total: int) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


def write_shards(folder: Path, shards: Sequence[Sequence[Stored]], *, index: bool = True) -> Path:
    """A sharded checkpoint, with or without its index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = shard_name(number, len(shards))
        write_file(folder / name, tensors)
        weight_map.update(dict.fromkeys((tensor.name for tensor in tensors), name))
    if index:
        write_index(folder, weight_map)
    return folder


def write_config(folder: Path, **config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
