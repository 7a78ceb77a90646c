"""The plan of a load: everything about a checkpoint that can be known and refused beforehand.

A plan is made and validated before any weight byte is copied, so a checkpoint with a fault in its
last shard leaves no half-filled slab behind. Planning reads indices, headers and config.json, and
weights only where a tie has to be proven (ties.py).

Imports neither zmq nor torch; the safetensors library validates too (second_opinion.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from broker.checkpoints.choice import choose_tensors
from broker.checkpoints.dtypes import plan_conversion
from broker.checkpoints.faults import load_failed, quoted, told_of
from broker.checkpoints.files import WeightFiles, open_regular, require_shards, weight_files
from broker.checkpoints.header import StoredTensor, header_digest, read_header
from broker.checkpoints.index import read_index_bytes
from broker.checkpoints.model_config import quantization_of, read_config, says_tied
from broker.checkpoints.pieces import Layout, Piece, cut_pieces, in_file, lay_out
from broker.checkpoints.second_opinion import require_library_agrees
from broker.checkpoints.stability import changed, settled_status, stamp
from broker.checkpoints.ties import find_ties
from broker.weights import (
    ITEM_BYTES,
    AliasGroup,
    Manifest,
    TensorGroup,
    contiguous_stride,
    is_countable,
)
from broker.wire import Conversion, FileStamp

LARGEST_SECOND_OPINION = 4 << 20
"""The library takes as long and twice the memory for a header as the rest of the plan together, so
it is asked up to this length: some 35,000 tensors in one file."""

_FLOATING = ("float", "bfloat", "complex")


@dataclass(frozen=True)
class CheckpointPlan:
    """What will be loaded, and from where. Holds no descriptor.

    Attributes:
        path: for messages.
        shards: the weight files' stamps, in the order of `Piece.file`.
        index: the index's stamp, if an index decided.
        manifest: for `reserve`; `nbytes` is where the last tensor ends, not yet rounded up to the
            device's granularity.
        dtype: for the key: torch names of the floating and complex tensors, joined with "+"; of
            all tensors if none is floating; "" without tensors.
        quantization: the configuration's quantisation settings, None for plain weights.
        config: config.json, None if there is none.
        layout: the tensors that are copied, and their slots.
        pieces: every chunk of them once.
        empty: tensors without bytes; they have offset 0 and no slot.
        shared: tensors that use the slot of another one with equal bytes (ties): to its name.
    """

    path: str
    shards: list[FileStamp]
    index: FileStamp | None
    manifest: Manifest
    dtype: str
    quantization: dict[str, Any] | None
    config: dict[str, Any] | None
    layout: Layout = field(repr=False)
    pieces: list[Piece] = field(repr=False)
    empty: list[StoredTensor] = field(repr=False)
    shared: list[tuple[StoredTensor, str]] = field(repr=False)

    @property
    def stamps(self) -> list[FileStamp]:
        """As `stamp_files` gives them: the index first."""
        return ([] if self.index is None else [self.index]) + self.shards

    @property
    def tensors(self) -> list[StoredTensor]:
        """All of them: those with a slot of their own first, as they lie in the files."""
        return [*self.layout.tensors, *self.empty, *(tensor for tensor, _ in self.shared)]

    @property
    def total_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(in_file(tensor, tensor.nbytes) for tensor in self.layout.tensors)

    @property
    def converts(self) -> bool:
        """Whether any tensor gets another dtype than it is stored in."""
        return any(tensor.stored for tensor in self.layout.tensors)


def plan_checkpoint(
    folder: int, only: str | None, path: str, conversion: Conversion | None = None
) -> CheckpointPlan:
    """Read and check everything but the weights. Blocks on the files.

    Arguments as `OpenCheckpoint` has them; `path` is for messages. The folder is borrowed.

    Raises:
        LoadFailed: the checkpoint is not one, is incomplete, contradicts itself or is being
            written, or cannot be converted; `reason`, `file` and `tensor` say what and where.
    """
    with told_of(path):
        files = weight_files(folder, only, path)
        require_shards(folder, files, path)
        index = _stamp_index(folder, files)
        stamps, stored = _read_shards(folder, files)
        chosen = choose_tensors(files, stored, path)
        return _plan(folder, path, stamps, index, chosen, conversion)


def _stamp_index(folder: int, files: WeightFiles) -> FileStamp | None:
    """The index's stamp, taken when it had settled; refused if it is not what was decoded."""
    name = files.index
    if name is None:
        return None
    descriptor = open_regular(folder, name)
    try:
        status = settled_status(descriptor, name)
        digest = header_digest(read_index_bytes(descriptor, name))
    finally:
        os.close(descriptor)
    if digest != files.index_digest:
        raise changed(name)
    return stamp(name, status, digest)


def _read_shards(
    folder: int, files: WeightFiles
) -> tuple[list[FileStamp], list[list[StoredTensor]]]:
    stamps, stored = [], []
    for name in files.shards:
        descriptor = open_regular(folder, name)
        try:
            status = settled_status(descriptor, name)
            header = read_header(descriptor, name)
            if header.nbytes <= LARGEST_SECOND_OPINION:
                require_library_agrees(descriptor, name)
        finally:
            os.close(descriptor)
        stamps.append(stamp(name, status, header.digest))
        stored.append(header.tensors)
    return stamps, stored


def _plan(
    folder: int,
    path: str,
    shards: list[FileStamp],
    index: FileStamp | None,
    stored: list[list[StoredTensor]],
    conversion: Conversion | None,
) -> CheckpointPlan:
    config = read_config(folder)
    quantization = quantization_of(config)
    ties = find_ties(folder, shards, stored) if says_tied(config) else {}
    chosen = stored
    if conversion is not None:
        chosen, ties = plan_conversion(shards, stored, ties, conversion, quantization)
    copied = [[t for t in tensors if t.nbytes and t.name not in ties] for tensors in chosen]
    empty = [t for tensors in chosen for t in tensors if not t.nbytes]
    shared = [(t, ties[t.name]) for tensors in chosen for t in tensors if t.name in ties]
    _require_possible(shards, chosen)
    layout = lay_out(copied)
    return CheckpointPlan(
        path=path,
        shards=shards,
        index=index,
        manifest=_manifest(layout, empty, shared),
        dtype=_dtypes(t.dtype for tensors in chosen for t in tensors),
        quantization=quantization,
        config=config,
        layout=layout,
        pieces=cut_pieces(layout),
        empty=empty,
        shared=shared,
    )


def _require_possible(shards: list[FileStamp], chosen: list[list[StoredTensor]]) -> None:
    """Refuse an empty tensor whose other dimensions, which no file's size bounds, are more bytes
    than torch can count, be it only in the dtype that it is converted to."""
    for shard, tensors in zip(shards, chosen, strict=True):
        for tensor in tensors:
            if not tensor.nbytes and not is_countable(tensor.shape, ITEM_BYTES[tensor.dtype]):
                what = f"tensor {quoted(tensor.name)} in {quoted(shard.name)}"
                raise load_failed(
                    "bad_shape",
                    f"{what} is empty, but its other dimensions exceed 2**63 - 1 bytes as "
                    f"{tensor.dtype}; write the file again with smaller ones",
                    file=shard.name,
                    tensor=tensor.name,
                )


def _manifest(
    layout: Layout, empty: list[StoredTensor], shared: list[tuple[StoredTensor, str]]
) -> Manifest:
    groups: dict[tuple[str, tuple[int, ...]], TensorGroup] = {}
    for tensor, slot in zip(layout.tensors, layout.slots, strict=True):
        _place(groups, tensor, slot)
    for tensor in empty:
        _place(groups, tensor, 0)
    return Manifest(layout.nbytes, list(groups.values()), _aliases(groups, layout, shared))


def _place(
    groups: dict[tuple[str, tuple[int, ...]], TensorGroup], tensor: StoredTensor, offset: int
) -> None:
    kind = (tensor.dtype, tensor.shape)
    group = groups.get(kind)
    if group is None:
        shape = list(tensor.shape)
        group = TensorGroup(tensor.dtype, shape, contiguous_stride(shape), "tensor", [], [])
        groups[kind] = group
    group.names.append(tensor.name)
    group.offsets.append(offset)


def _aliases(
    groups: dict[tuple[str, tuple[int, ...]], TensorGroup],
    layout: Layout,
    shared: list[tuple[StoredTensor, str]],
) -> list[AliasGroup]:
    """Place each tied tensor where its twin lies."""
    if not shared:
        return []
    wanted = {name for _, name in shared}
    slots = {
        t.name: at for t, at in zip(layout.tensors, layout.slots, strict=True) if t.name in wanted
    }
    aliases: dict[str, AliasGroup] = {}
    for tensor, twin in shared:
        _place(groups, tensor, slots[twin])
        alias = aliases.setdefault(twin, AliasGroup([twin], slots[twin], tensor.nbytes))
        alias.names.append(tensor.name)
    return list(aliases.values())


def _dtypes(names: Iterable[str]) -> str:
    present = set(names)
    floating = {name for name in present if name.startswith(_FLOATING)}
    return "+".join(sorted(floating or present))
