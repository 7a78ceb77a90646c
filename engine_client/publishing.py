"""From a module or a mapping of tensors to a slab: layout, then bytes. Loses nothing.

Storages are copied, not tensors: whatever shared a storage (tied parameters, views, slices of a
fused weight) shares one in the slab, at the same distances and with the same strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from broker.devices.base import Device
from broker.errors import UsageError
from broker.weights import (
    ITEM_BYTES,
    SLOT_ALIGNMENT,
    AliasGroup,
    Manifest,
    TensorGroup,
    align_up,
    storage_extent,
)
from engine_client.binding import binding_of
from engine_client.storages import SlabStorages, torch_device
from engine_client.weight_set import WeightSet

_NAMES_SHOWN = 5


class _Entry(NamedTuple):
    """A tensor to publish, and where in its storage its bytes lie."""

    name: str
    tensor: Tensor
    kind: str
    begin: int
    end: int


class Part(NamedTuple):
    """`source` (one-dimensional, uint8) belongs at `offset` in the slab."""

    source: Tensor
    offset: int


@dataclass
class Publication:
    """What is to be written. Holds views of the published storages until it is dropped."""

    manifest: Manifest
    parts: list[Part]
    dtype: str
    """`WeightKey.dtype`: of the floating tensors, or of all if there is none."""


@dataclass
class _Layout:
    """Grows slot by slot."""

    nbytes: int = 0
    groups: dict[tuple[Any, ...], TensorGroup] = field(default_factory=dict)
    aliases: list[AliasGroup] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def plan_publication(
    source: Module | Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None
) -> Publication:
    """Lay out everything there is to publish. Copies nothing and changes nothing.

    Args:
        source: a module (parameters and buffers of both kinds) or named tensors; on any device.
        metadata: small, msgpack-able; delivered with the set.

    Raises:
        UsageError: tensors that cannot be published as bytes, each with its reason.
    """
    entries = list(_entries(source))
    _refuse_unpublishable(entries)
    layout = _Layout()
    for shared in _by_storage(entries):
        _place(layout, shared)
    manifest = Manifest(
        nbytes=layout.nbytes,
        groups=list(layout.groups.values()),
        aliases=layout.aliases,
        metadata=dict(metadata or {}),
    )
    return Publication(manifest, layout.parts, _key_dtype(entries))


def write_publication(
    publication: Publication, device: Device, descriptor: int, nbytes: int, device_index: int = 0
) -> None:
    """Copy everything into a slab. Blocks; nothing is mapped any more when it returns.

    Args:
        descriptor: the slab, writable; borrowed.
        device_index: which GPU of this process the device is.
    """
    mapping = device.map(descriptor, nbytes, writable=True)
    storages = SlabStorages(mapping, torch_device(device.properties.platform, device_index))
    try:
        copy_parts(publication, storages.whole())
    finally:
        storages.close()


def rebind(source: Module | Mapping[str, Tensor], weights: WeightSet) -> None:
    """Make the parameters of the module that was published views of what was published."""
    if isinstance(source, Module):
        binding = binding_of(source)
        if binding is not None:
            binding.detach()
        weights.bind(source)


def copy_parts(publication: Publication, slab: Tensor) -> None:
    """Copy every storage into the slab. Blocks until the bytes have arrived.

    Args:
        slab: the whole slab as a writable one-dimensional uint8 tensor.
    """
    for source, offset in publication.parts:
        slab[offset : offset + source.numel()].copy_(source, non_blocking=True)
    if slab.is_cuda:
        torch.cuda.synchronize(slab.device)


def _entries(source: Module | Mapping[str, Tensor]) -> Iterator[_Entry]:
    if isinstance(source, Module):
        for name, parameter in source.named_parameters(remove_duplicate=False):
            yield _entry(name, parameter.data, "parameter")
        for name, buffer in source.named_buffers(remove_duplicate=False):
            yield _entry(name, buffer, _buffer_kind(source, name))
        return
    for name, tensor in source.items():
        kind = "parameter" if isinstance(tensor, Parameter) else "tensor"
        yield _entry(name, tensor.detach(), kind)


def _buffer_kind(module: Module, name: str) -> str:
    path, _, leaf = name.rpartition(".")
    is_private = leaf in module.get_submodule(path)._non_persistent_buffers_set  # noqa: SLF001 - torch offers no other way to ask
    return "non-persistent-buffer" if is_private else "buffer"


def _entry(name: str, tensor: Tensor, kind: str) -> _Entry:
    if _fault(tensor):
        return _Entry(name, tensor, kind, 0, 0)
    plain = tensor.resolve_conj().resolve_neg()
    item = plain.element_size()
    begin = int(plain.storage_offset()) * item
    extent = storage_extent(list(plain.shape), list(plain.stride()), item)
    return _Entry(name, plain, kind, begin, begin + extent)


def _refuse_unpublishable(entries: list[_Entry]) -> None:
    faults = [f"{entry.name} ({fault})" for entry in entries if (fault := _fault(entry.tensor))]
    if faults:
        more = f" and {len(faults) - _NAMES_SHOWN} more" if len(faults) > _NAMES_SHOWN else ""
        raise UsageError(
            f"these tensors cannot be published: {', '.join(faults[:_NAMES_SHOWN])}{more}; "
            "publish plain strided tensors that hold values",
            tensors=len(faults),
        )


def _fault(tensor: Tensor) -> str:
    """Why a tensor's storage is not all there is to it, or "" if it is."""
    if tensor.is_meta:
        return "it is on meta and has no values"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return "it is quantised with scales that live outside its storage"
    if type(tensor) not in (Tensor, Parameter):
        return f"it is a {type(tensor).__name__}, whose values may live elsewhere"
    if dtype_name(tensor) not in ITEM_BYTES:
        return f"its dtype {tensor.dtype} is not one a slab can hold"
    return ""


def dtype_name(tensor: Tensor) -> str:
    """torch's own word for a dtype, without the module: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def _by_storage(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Entries that share a storage together; in the order in which the storages appear."""
    shared: dict[tuple[Any, ...], list[_Entry]] = {}
    for number, entry in enumerate(entries):
        storage = entry.tensor.untyped_storage()
        is_empty = entry.begin == entry.end
        key = (number,) if is_empty else (entry.tensor.device, storage.data_ptr())
        shared.setdefault(key, []).append(entry)
    yield from shared.values()


def _place(layout: _Layout, shared: list[_Entry]) -> None:
    begin = min(entry.begin for entry in shared)
    end = max(entry.end for entry in shared)
    if begin == end:
        _describe(layout, shared[0], 0)
        return
    # A lone tensor starts its slot, wherever in its storage it lay. Among several the distances
    # stay, and with them each one's alignment.
    base = begin if len(shared) == 1 else begin - begin % SLOT_ALIGNMENT
    slot = align_up(layout.nbytes, SLOT_ALIGNMENT)
    for entry in shared:
        _describe(layout, entry, slot + entry.begin - base)
    if len(shared) > 1:
        names = [entry.name for entry in shared]
        layout.aliases.append(AliasGroup(names, slot, end - base))
    layout.parts.append(Part(_bytes_of(shared[0].tensor, begin, end), slot + begin - base))
    layout.nbytes = slot + end - base


def _describe(layout: _Layout, entry: _Entry, offset: int) -> None:
    tensor = entry.tensor
    key = (tensor.dtype, tensor.shape, tensor.stride(), entry.kind)
    group = layout.groups.get(key)
    if group is None:
        group = layout.groups[key] = TensorGroup(
            dtype_name(tensor), list(tensor.shape), list(tensor.stride()), entry.kind, [], []
        )
    group.names.append(entry.name)
    group.offsets.append(offset)


def _bytes_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """The bytes `begin` to `end` of a tensor's storage, without a copy."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def _key_dtype(entries: list[_Entry]) -> str:
    floating = {
        dtype_name(entry.tensor)
        for entry in entries
        if entry.tensor.is_floating_point() or entry.tensor.is_complex()
    }
    return "+".join(sorted(floating or {dtype_name(entry.tensor) for entry in entries}))
