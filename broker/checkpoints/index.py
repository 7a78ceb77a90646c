"""The index of a sharded checkpoint: which tensor lies in which file.

Nothing falls back to taking whatever files are there: an index that is present decides or the
checkpoint is refused. Imports neither zmq nor torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from blake3 import blake3

from broker.checkpoints.faults import load_failed, quoted, system_refused
from broker.checkpoints.header_json import decode_object
from broker.errors import LoadFailed

SHARD_SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

MAX_INDEX_BYTES = 200_000_000
"""An index of 1.3 million tensors, the most seen anywhere, has about 150 MB."""


@dataclass(frozen=True)
class Index:
    """What an index says. `total_size` is None unless it is a number; `digest` is of its bytes."""

    weight_map: dict[str, str]
    digest: str
    total_size: float | None = None


def read_index(descriptor: int, name: str) -> Index:
    """Read an open index file. Blocks on the file.

    Raises:
        LoadFailed: `reason` "bad_index": not an index, or one that names files elsewhere;
            "unsafe_pickle": an index of pickles.
    """
    data = read_index_bytes(descriptor, name)
    document = decode_object(data, name, "bad_index")
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(name, 'has no "weight_map" with tensors in it')
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise _bad(name, f"maps tensor {quoted(tensor)} to something that is no file", tensor)
    for shard in sorted(set(weight_map.values())):
        _check_shard_name(shard, name)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(
        weight_map, blake3(data).hexdigest(), total if type(total) in (int, float) else None
    )


def read_index_bytes(descriptor: int, name: str) -> bytes:
    """The whole index, as it is.

    Raises:
        LoadFailed: unreadable, or larger than any index.
    """
    return read_small_file(descriptor, name, MAX_INDEX_BYTES, "bad_index")


def read_small_file(descriptor: int, name: str, limit: int, reason: str) -> bytes:
    """A file's bytes, which must be fewer than `limit` and not a Git LFS pointer's.

    Raises:
        LoadFailed: with `reason`, or "unreadable".
    """
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, size, 0) if size <= limit else b""
    except OSError as error:
        raise system_refused(error, name, "reading") from error
    if size > limit:
        raise load_failed(
            reason, f"{quoted(name)} has {size} bytes, too many for such a file", file=name
        )
    if data.startswith(b"version https://git-lfs"):
        raise load_failed(
            reason,
            f"{quoted(name)} is a Git LFS pointer, not the file itself; run `git lfs pull` or "
            "download it again",
            file=name,
        )
    return data


def check_plain_name(name: str, file: str, reason: str = "bad_index") -> None:
    """Refuse a file name that leads out of the folder or that no message could carry.

    `file` is where the name was found. Raises `LoadFailed` with `reason`.
    """
    printable = not any("\ud800" <= letter <= "\udfff" for letter in name)
    if "/" in name or "\0" in name or name in ("", ".", "..") or not printable:
        raise load_failed(
            reason,
            f"{quoted(file)} names {quoted(name)}, which is not a plain file name; the weights of "
            "a checkpoint lie beside each other in one folder",
            file=file,
        )


def _check_shard_name(shard: str, index: str) -> None:
    check_plain_name(shard, index)
    if shard.endswith(PICKLE_SUFFIXES):
        raise load_failed(
            "unsafe_pickle",
            f"{quoted(index)} names {quoted(shard)}: loading a pickle would run code from it, so "
            "it is refused; convert the checkpoint to safetensors",
            file=index,
        )
    if not shard.endswith(SHARD_SUFFIX):
        raise _bad(index, f"names {quoted(shard)}, which is not a safetensors file")


def _bad(name: str, what: str, tensor: str | None = None) -> LoadFailed:
    return load_failed(
        "bad_index",
        f"{quoted(name)} {what}; download it again, or write the checkpoint again",
        file=name,
        tensor=tensor,
    )
