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
    """A sealed slab holding copies of these tensors; what shares a storage shares one in there.

    Attributes:
        descriptor: read-only, as an engine gets it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
        self.device = SimulatedDevice()
        by_storage: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            # An empty storage has no address, so it is never shared.
            key = tensor.untyped_storage().data_ptr() or -len(by_storage) - 1
            by_storage.setdefault(key, []).append(name)
        offsets: dict[str, int] = {}
        aliases: list[AliasGroup] = []
        contents: list[tuple[int, bytes]] = []
        end = 0
        for names in by_storage.values():
            storage = tensors[names[0]].untyped_storage()
            tied = len(names) > 1
            for name in names:
                start = int(tensors[name].storage_offset()) * tensors[name].element_size()
                offsets[name] = end + (start if tied else 0)
            data = _bytes_of(storage) if tied else extent_bytes(tensors[names[0]])
            if tied:
                aliases.append(AliasGroup(names=names, offset=end, nbytes=len(data)))
            contents.append((end, data))
            end = align_up(end + len(data), SLOT_ALIGNMENT)
        self.manifest = Manifest(
            nbytes=max(end, 1), groups=_groups(tensors, offsets, kinds), aliases=aliases
        )
        self.nbytes = align_up(max(end, 1), self.device.properties.granularity)
        validate_manifest(self.manifest, self.nbytes)
        writable = self.device.create(self.nbytes)
        for offset, data in contents:
            os.pwrite(writable, data, offset)
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


def is_inside(tensor: Tensor, tensors: SlabTensors) -> bool:
    return tensors.owns(tensor)


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
