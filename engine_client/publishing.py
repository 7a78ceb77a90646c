"""From a module or a mapping of tensors to a slab: layout, then bytes. Loses nothing.

Storages are copied, not tensors: whatever shared a storage (tied parameters, views, slices of a
fused weight) shares one in the slab, at the same distances and with the same strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from broker.devices.base import Device, DeviceError, DeviceOutOfMemory, free_if_known
from broker.devices.base import Mapping as Mapped
from broker.errors import InternalError, OverBudget, UsageError
from broker.weights import (
    ITEM_BYTES,
    MAX_METADATA_BYTES,
    SLOT_ALIGNMENT,
    AliasGroup,
    Manifest,
    TensorGroup,
    align_up,
    storage_extent,
)
from engine_client.binding import binding_of
from engine_client.deadline import Deadline
from engine_client.matching import walk
from engine_client.shielded import shielded
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
        UsageError: it is neither; tensors that cannot be published as bytes, each with its reason;
            metadata that msgpack cannot hold, or too much of it.
    """
    given = _checked_metadata(metadata or {})
    entries = list(_entries(source))
    _refuse_unpublishable(entries)
    layout = _Layout()
    for shared in _by_storage(entries):
        _place(layout, shared)
    manifest = Manifest(
        nbytes=layout.nbytes,
        groups=list(layout.groups.values()),
        aliases=layout.aliases,
        metadata=given,
    )
    return Publication(manifest, layout.parts, _key_dtype(entries))


def write_publication(
    publication: Publication,
    device: Device,
    descriptor: int,
    nbytes: int,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Copy everything into a slab. Blocks; nothing is mapped any more when it returns.

    Args:
        descriptor: the slab, writable; borrowed.
        report: called now and then with the bytes done and the bytes in all.

    Raises:
        OverBudget, InternalError: the slab cannot be mapped, or not unmapped.
    """
    mapping, storages = shielded(
        lambda _show: _writable(device, descriptor, nbytes), Deadline(None)
    )
    try:
        copy_parts(publication, storages.whole(), report)
    finally:
        storages.close()
    try:
        mapping.close()  # nothing to do, unless closing the storages could not unmap
    except DeviceError as error:
        raise InternalError(f"the slab to publish is still mapped: {error}") from error


def _writable(device: Device, descriptor: int, nbytes: int) -> tuple[Mapped, SlabStorages]:
    """The slab, mapped as long as anybody has its storages."""
    try:
        mapping = device.map(descriptor, nbytes, writable=True)
    except DeviceOutOfMemory as error:
        raise OverBudget(
            f"the slab to publish into cannot be mapped: {error}",
            requested=nbytes,
            free=free_if_known(device),
            device=device.properties.uuid,
        ) from error
    except DeviceError as error:
        raise InternalError(f"the slab to publish into cannot be mapped: {error}") from error
    whole = torch_device(device.properties.platform, device.ordinal)
    return mapping, SlabStorages(mapping, whole)


def rebind(source: Module | Mapping[str, Tensor], weights: WeightSet) -> None:
    """Make the parameters of the module that was published views of what was published.

    Its buffers stay the very objects they are, unless they have to move to the weights' device. A
    module that was bound before stays guarded if it was.
    """
    if not isinstance(source, Module):
        return
    binding = binding_of(source)
    guard = binding is not None and binding.guard is not None
    if binding is not None:
        binding.detach()
    own = [
        (at._buffers, key, buffer)  # noqa: SLF001 - torch offers no way to set one back
        for _path, at in walk(source)
        for key, buffer in at._buffers.items()  # noqa: SLF001
        if buffer is not None
    ]
    weights.bind(source, guard=guard)
    for entries, key, buffer in own:
        moved = entries[key]
        if moved is not None and moved.device == buffer.device:
            entries[key] = buffer


def copy_parts(
    publication: Publication, slab: Tensor, report: Callable[[int, int], None] | None = None
) -> None:
    """Copy every storage into the slab. Blocks until the bytes have arrived.

    Args:
        slab: the whole slab as a writable one-dimensional uint8 tensor.
        report: called after each storage with the bytes done and the bytes in all.
    """
    for device in {source.device for source, _offset in publication.parts if source.is_cuda}:
        torch.cuda.synchronize(device)  # whatever stream the values are made on
    done, total = 0, sum(source.numel() for source, _offset in publication.parts)
    for source, offset in publication.parts:
        slab[offset : offset + source.numel()].copy_(source, non_blocking=True)
        done += source.numel()
        if report is not None:
            report(done, total)
    if slab.is_cuda:
        torch.cuda.synchronize(slab.device)


def _checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as everybody who maps the set will read it."""
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata must be a mapping, not {type(metadata).__name__}")
    try:
        encoded = msgspec.msgpack.encode(dict(metadata))
        read: dict[str, Any] = msgspec.msgpack.decode(encoded, type=dict[str, Any])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"metadata must be what msgpack can hold, with text for keys: {error}"
        ) from error
    if len(encoded) > MAX_METADATA_BYTES:
        raise UsageError(
            f"metadata has {len(encoded)} bytes, {MAX_METADATA_BYTES} are allowed: put what is "
            "large into a file or a tensor, and its name here"
        )
    return read


def _entries(source: Module | Mapping[str, Tensor]) -> Iterator[_Entry]:
    if isinstance(source, Module):
        yield from _module_entries(source)
        return
    if not isinstance(source, Mapping):
        raise UsageError(
            "only a torch module or a mapping of names to tensors can be published, "
            f"not {type(source).__name__}"
        )
    for name, tensor in source.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UsageError(
                f"a mapping to publish holds names and tensors, {name!r} leads to "
                f"{type(tensor).__name__}"
            )
        kind = "parameter" if isinstance(tensor, Parameter) else "tensor"
        yield _entry(str.__str__(name), tensor, kind)  # what travels is text, of no other class


def _module_entries(module: Module) -> Iterator[_Entry]:
    """Parameters and buffers under every path that leads to them."""
    for path, at in walk(module):
        for key, parameter in at._parameters.items():  # noqa: SLF001 - with the others' names
            if parameter is not None:
                yield _entry(path + key, parameter, "parameter")
        for key, buffer in at._buffers.items():  # noqa: SLF001
            if buffer is not None:
                yield _entry(path + key, buffer, _buffer_kind(at, key))


def _buffer_kind(owner: Module, key: str) -> str:
    is_private = key in owner._non_persistent_buffers_set  # noqa: SLF001 - no other way to ask
    return "non-persistent-buffer" if is_private else "buffer"


def _entry(name: str, tensor: Tensor, kind: str) -> _Entry:
    if is_lazy(tensor):
        return _Entry(name, tensor, kind, 0, 0)
    # Of a Parameter's own class only the values are published, not what the class makes of them.
    values = tensor.data if isinstance(tensor, Parameter) else tensor.detach()
    if _fault(values):
        return _Entry(name, values, kind, 0, 0)
    plain = values.resolve_conj().resolve_neg()
    item = plain.element_size()
    begin = int(plain.storage_offset()) * item
    extent = storage_extent(list(plain.shape), list(plain.stride()), item)
    return _Entry(name, plain, kind, begin, begin + extent)


def _refuse_unpublishable(entries: list[_Entry]) -> None:
    faults = [f"{entry.name!r} ({fault})" for entry in entries if (fault := _fault_of(entry))]
    if faults:
        more = f" and {len(faults) - _NAMES_SHOWN} more" if len(faults) > _NAMES_SHOWN else ""
        raise UsageError(
            f"these tensors cannot be published: {', '.join(faults[:_NAMES_SHOWN])}{more}; "
            "publish plain strided tensors that hold values",
            tensors=len(faults),
        )


def _fault_of(entry: _Entry) -> str:
    fault = _fault(entry.tensor)
    has_bytes = not fault and entry.begin < entry.end
    if has_bytes and entry.end > entry.tensor.untyped_storage().nbytes():
        fault = "its storage is smaller than the tensor"
    return fault or ("" if _is_text(entry.name) else "its name is not valid Unicode")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fault(tensor: Tensor) -> str:
    """Why a tensor's storage is not all there is to it, or "" if it is."""
    if is_lazy(tensor):
        return "it has not been initialised"
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
