"""Weights that say what they are: every byte follows from a tag that is a tensor itself.

So whoever maps them can tell whether each byte is right, and whether they are what was asked for.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from broker.weights import SLOT_ALIGNMENT, Manifest, TensorGroup, align_up
from engine_client import WeightSet
from tests.support.stored import write_safetensors

TAG = "tag"
TAG_BYTES = 64
TENSORS = 3


def contents(tag: str, nbytes: int) -> dict[str, bytes]:
    """Tensors of a set of this tag, some `nbytes` together."""
    each = max(nbytes // TENSORS // 4 * 4, 4)
    tensors = {f"w{i}": blake3(f"{tag} w{i}".encode()).digest(each) for i in range(TENSORS)}
    return {TAG: tag.encode().ljust(TAG_BYTES), **tensors}


def write_checkpoint(folder: Path, tag: str, nbytes: int) -> Path:
    """A checkpoint of this tag; put in place at once, whatever was there before."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"unfinished-{random.getrandbits(32):x}"
    write_safetensors(unfinished, contents(tag, nbytes))
    os.replace(unfinished, folder / "model.safetensors")  # noqa: PTH105
    return folder


def tag_of(weights: WeightSet) -> str:
    """What the weights say they are.

    Raises:
        AssertionError: a byte of them is not what it must be.
    """
    tag = bytes(weights.memory(TAG)).decode("ascii", "replace").rstrip()
    sizes = {name: len(weights.memory(name)) for name in weights}
    for name, nbytes in sizes.items():
        if name != TAG:
            expected = blake3(f"{tag} {name}".encode()).digest(nbytes)
            # As bytes: a view is compared item by item.
            assert bytes(weights.memory(name)) == expected, (
                f"{weights!r}: {name} of {tag!r} is damaged"
            )
    return tag


def manifest_of(tensors: Mapping[str, bytes]) -> Manifest:
    """Where these tensors lie in a slab, one after the other."""
    offsets, at = {}, 0
    for name, data in tensors.items():
        offsets[name] = at
        at = align_up(at + len(data), SLOT_ALIGNMENT)
    groups = [
        TensorGroup("uint8", [len(data)], [1], "parameter", [name], [offsets[name]])
        for name, data in tensors.items()
    ]
    return Manifest(nbytes=at, groups=groups)


def write_into(slab: int, manifest: Manifest, tensors: Mapping[str, bytes]) -> None:
    """Fill a slab through its descriptor."""
    for group in manifest.groups:
        for name, offset in zip(group.names, group.offsets, strict=True):
            os.pwrite(slab, tensors[name], offset)
