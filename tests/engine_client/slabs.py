"""Slabs with known contents, made straight on the simulated device: no broker, no loader."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from broker.devices.base import Mapping as SlabMapping
from broker.devices.simulated import SimulatedDevice
from broker.weights import (
    SLOT_ALIGNMENT,
    AliasGroup,
    Manifest,
    TensorGroup,
    align_up,
    storage_extent,
    validate_manifest,
)
from engine_client.views import SlabTensors


class Slab:
    """A sealed slab with these bytes, described by this manifest.

    Attributes:
        descriptor: read-only, as an engine gets it.
    """

    def __init__(self, manifest: Manifest, contents: bytes) -> None:
        self.device = SimulatedDevice()
        self.manifest = manifest
        self.nbytes = align_up(max(manifest.nbytes, 1), self.device.properties.granularity)
        validate_manifest(manifest, self.nbytes)
        writable = self.device.create(self.nbytes)
        os.pwrite(writable, contents[: self.nbytes], 0)
        self.descriptor = self.device.freeze(writable)
        os.close(writable)

    def map(self) -> SlabMapping:
        return self.device.map(self.descriptor, self.nbytes, writable=False)

    def open(self, on_last_release: Callable[[], None] | None = None) -> SlabTensors:
        return SlabTensors(self.map(), self.manifest, "simulated", on_last_release=on_last_release)

    def contents(self) -> bytes:
        return os.pread(self.descriptor, self.nbytes, 0)

    def close(self) -> None:
        os.close(self.descriptor)


def slab_of(tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> Slab:
    """Copies of these tensors; what shares a storage shares one in there, unless it is empty."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        key = address if tensor.numel() else -len(by_storage) - 1
        by_storage.setdefault(key, []).append(name)
    offsets: dict[str, int] = {}
    aliases: list[AliasGroup] = []
    contents = bytearray()
    for names in by_storage.values():
        contents += bytes(-len(contents) % SLOT_ALIGNMENT)
        start, first = len(contents), tensors[names[0]]
        if len(names) == 1:
            offsets[names[0]] = start
            contents += extent_bytes(first)
            continue
        for name in names:
            offset = int(tensors[name].storage_offset())
            offsets[name] = start + offset * tensors[name].element_size()
        contents += _bytes_of(first.untyped_storage())
        aliases.append(AliasGroup(names=names, offset=start, nbytes=len(contents) - start))
    groups = _groups(tensors, offsets, kinds)
    manifest = Manifest(nbytes=max(len(contents), 1), groups=groups, aliases=aliases)
    return Slab(manifest, bytes(contents))


def extent_bytes(tensor: Tensor) -> bytes:
    """The bytes from a tensor's first element to past its last."""
    extent = storage_extent(list(tensor.shape), list(tensor.stride()), tensor.element_size())
    return ctypes.string_at(tensor.data_ptr(), extent) if extent else b""


def random_tensor(dtype: str, *shape: int, seed: int = 0) -> Tensor:
    """A contiguous tensor of any dtype with reproducible bytes (any bits, NaN included)."""
    wanted: torch.dtype = getattr(torch, dtype)
    count = wanted.itemsize
    for n in shape:
        count *= n
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(wanted).view(shape)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def _groups(
    tensors: Mapping[str, Tensor], offsets: Mapping[str, int], kinds: Mapping[str, str]
) -> list[TensorGroup]:
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], TensorGroup] = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, stride = tuple(tensor.shape), tensor.stride()
        kind = kinds.get(name, "tensor")
        group = groups.setdefault(
            (dtype, shape, stride, kind), TensorGroup(dtype, [*shape], [*stride], kind, [], [])
        )
        group.names.append(name)
        group.offsets.append(offsets[name])
    return list(groups.values())
