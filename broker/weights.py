"""What a weight set is: its key, its manifest, and how tensors are laid out in a slab.

Pure: imports neither zmq nor torch. Dtypes go by torch's own names ("bfloat16"); offsets and sizes
are bytes; shapes and strides count elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import gt, or_
from typing import Any

import msgspec

from broker.errors import BadRequest

SLOT_ALIGNMENT = 512
"""Every storage starts at a multiple of this (torch's own CUDA allocator gives 512; kernels assume
at least 16)."""

MANIFEST_VERSION = 1
MAX_METADATA_BYTES = 64 * 1024
"""What a publisher may give along with a set: every engine that maps it reads all of it."""

INT64_MAX = (1 << 63) - 1

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes of one element of each torch dtype a slab may hold (`torch.dtype.itemsize`)."""

CONVERTIBLE = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that a loader converts from and to, each into each (checkpoints/conversion.py)."""

KINDS = ("tensor", "parameter", "buffer", "non-persistent-buffer")
"""What a tensor was where it came from. A checkpoint does not tell: its tensors are "tensor"."""


class WeightKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a weight set. Two sets with equal keys hold equal bytes.

    Attributes:
        name: the line the set belongs to, or "" for a checkpoint that was asked for without one.
        checkpoint: content identity ("blake3:…"); "" for what an engine published, and while a
            loader is still finding out.
        dtype: torch name, several joined with "+" in sorted order where a checkpoint mixes them.
        layout: parallel layout, e.g. {"tp_rank": 0, "tp_size": 2}; empty for the whole model.
        format: who laid the tensors out: "hf", "vllm-0.32.0", …
        quantization: the quantisation method's name, or "".
        device: the device's UUID, never an index; "" in an engine's request: that engine's.
    """

    device: str = ""
    name: str = ""
    checkpoint: str = ""
    dtype: str = ""
    layout: dict[str, int] = {}
    format: str = "hf"
    quantization: str = ""


class TensorGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors of equal dtype, shape, stride and kind; `names[i]` starts at `offsets[i]`.

    Grouped because one row a tensor costs nine times as much to decode.
    """

    dtype: str
    """A name of the table of dtypes."""
    shape: list[int]
    """Elements of each dimension."""
    stride: list[int]
    """Elements from one index of a dimension to the next."""
    kind: str
    """What the tensor was; see below."""
    names: list[str]
    """One for each tensor."""
    offsets: list[int]
    """Bytes from the slab's beginning to each tensor's first element."""


class AliasGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Names whose tensors share one storage: tied weights, or views of one tensor.

    A name in no alias group has a storage of its own, exactly as large as the tensor.
    """

    names: list[str]
    """Tensors of the groups."""
    offset: int
    """Bytes from the slab's beginning to the storage's."""
    nbytes: int
    """Bytes of the storage."""


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """All tensors of a set and where they lie in its slab. Travels as a sealed memfd."""

    nbytes: int
    """Bytes of the slab, padding included."""
    groups: list[TensorGroup]
    """All tensors; each name is there once."""
    aliases: list[AliasGroup] = []
    """Storages that several tensors share."""
    metadata: dict[str, Any] = {}
    """What the publisher gave along."""
    version: int = MANIFEST_VERSION
    """Of this format."""

    @property
    def tensor_count(self) -> int:
        return sum(len(group.names) for group in self.groups)


_encoder = msgspec.msgpack.Encoder()
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def decode_manifest(data: bytes | memoryview, slab_nbytes: int) -> Manifest:
    """Decode and validate against the slab it describes.

    Raises:
        BadRequest: not a manifest, or one that would read outside its slab or let two storages
            overlap.
    """
    try:
        manifest = _manifest_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the manifest cannot be decoded: {error}") from error
    validate_manifest(manifest, slab_nbytes)
    return manifest


def validate_manifest(manifest: Manifest, slab_nbytes: int) -> None:
    """Raise `BadRequest` unless a client can map what the manifest describes.

    Every storage begins at a multiple of `SLOT_ALIGNMENT`, lies inside the slab and overlaps no
    other; every tensor of an alias group lies inside the group's storage, a whole number of
    elements from its start; every name is there once.
    """
    if manifest.version != MANIFEST_VERSION:
        raise BadRequest(
            f"the manifest is of version {manifest.version}, this client reads {MANIFEST_VERSION}"
        )
    if not 0 <= manifest.nbytes <= slab_nbytes:
        raise BadRequest(
            f"the manifest describes {manifest.nbytes} bytes, its slab has {slab_nbytes}"
        )
    aliased = _validate_aliases(manifest)
    starts: list[int] = [alias.offset for alias in manifest.aliases if alias.nbytes]
    ends: list[int] = [alias.offset + alias.nbytes for alias in manifest.aliases if alias.nbytes]
    seen: set[str] = set()
    for group in manifest.groups:
        extent = _validate_group(group, manifest.nbytes)
        seen.update(group.names)
        offsets = group.offsets
        if aliased and not aliased.keys().isdisjoint(group.names):
            offsets = _validate_aliased(group, extent, aliased)
        if extent:
            starts += offsets
            ends += [offset + extent for offset in offsets]
    if len(seen) != manifest.tensor_count:
        raise BadRequest("the manifest names a tensor twice")
    if not aliased.keys() <= seen:
        raise BadRequest("the manifest ties a name it does not describe")
    # All in C, as what follows: a generator costs more for each tensor than decoding it.
    if reduce(or_, starts, 0) % SLOT_ALIGNMENT:
        raise BadRequest(f"a storage of the manifest is not aligned to {SLOT_ALIGNMENT} bytes")
    _validate_disjoint(starts, ends)


def _validate_aliases(manifest: Manifest) -> dict[str, AliasGroup]:
    aliased: dict[str, AliasGroup] = {}
    for alias in manifest.aliases:
        if alias.offset < 0 or alias.nbytes < 0 or alias.offset + alias.nbytes > manifest.nbytes:
            raise BadRequest(f"the storage of {alias.names[:1]} lies outside the slab")
        if not alias.names:
            raise BadRequest("an alias group of the manifest has no names")
        for name in alias.names:
            if name in aliased:
                raise BadRequest(f"the manifest puts {name!r} into two alias groups")
            aliased[name] = alias
    return aliased


def _validate_group(group: TensorGroup, nbytes: int) -> int:
    """Bytes from a tensor's first to past its last element; 0 for an empty tensor."""
    item = ITEM_BYTES.get(group.dtype)
    first = group.names[0] if group.names else "?"
    if item is None:
        raise BadRequest(f"tensor {first!r} has the unknown dtype {group.dtype!r}")
    if group.kind not in KINDS:
        raise BadRequest(f"tensor {first!r} has the unknown kind {group.kind!r}")
    if not group.names or len(group.names) != len(group.offsets):
        raise BadRequest(f"the group of {first!r} has not one offset for each name")
    extent = storage_extent(group.shape, group.stride, item)
    if min(group.offsets) < 0 or max(group.offsets) + extent > nbytes:
        raise BadRequest(f"a tensor of the group of {first!r} lies outside the slab")
    return extent


def _validate_aliased(group: TensorGroup, extent: int, aliased: dict[str, AliasGroup]) -> list[int]:
    """The offsets of the tensors with a storage of their own; the others lie inside their group."""
    item = ITEM_BYTES[group.dtype]
    own = []
    for name, offset in zip(group.names, group.offsets, strict=True):
        alias = aliased.get(name)
        if alias is None:
            own.append(offset)
        elif offset < alias.offset or offset + extent > alias.offset + alias.nbytes:
            raise BadRequest(f"tensor {name!r} lies outside the storage it is said to share")
        elif (offset - alias.offset) % item:
            raise BadRequest(f"tensor {name!r} lies between the elements of the storage it shares")
    return own


def _validate_disjoint(starts: list[int], ends: list[int]) -> None:
    # Disjoint intervals have the same order by start as by end, so sorting both apart is enough.
    starts.sort()
    ends.sort()
    if any(map(gt, ends, starts[1:])):
        raise BadRequest("two tensors of the manifest overlap without being tied")


def storage_extent(shape: list[int], stride: list[int], item_bytes: int) -> int:
    """Bytes from the first element of a strided tensor to past its last; 0 if it has none.

    Raises:
        BadRequest: shape and stride of different length, a negative entry, or more elements than
            torch can count (a stride of 0 costs no memory, so the slab's size is no limit).
    """
    if len(shape) != len(stride) or any(n < 0 for n in shape) or any(n < 0 for n in stride):
        raise BadRequest(f"shape {shape} and stride {stride} do not describe a tensor")
    if not is_countable(shape, item_bytes) or max(stride, default=0) > INT64_MAX:
        raise BadRequest(f"a tensor of shape {shape} and stride {stride} is too large for torch")
    if 0 in shape:
        return 0
    return item_bytes * (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)))


def is_countable(shape: Sequence[int], item_bytes: int) -> bool:
    """Whether torch can count the bytes of such a tensor; no dimension is negative.

    Dimensions of 0 count as 1: torch multiplies the others all the same (TensorImpl.h).
    """
    return prod(n or 1 for n in shape) * item_bytes <= INT64_MAX


def contiguous_stride(shape: list[int]) -> list[int]:
    """Row-major strides in elements, as `torch.empty(shape).stride()` gives them.

    An empty dimension counts as one, as torch does (c10/core/TensorImpl.h, set_sizes_contiguous).
    """
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return stride


def tensor_nbytes(dtype: str, shape: list[int]) -> int:
    return ITEM_BYTES[dtype] * prod(shape)


def align_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
