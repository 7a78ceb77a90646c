"""What makes two checkpoints the same weights: stamps where nothing changed, else contents.

Stamps are cheap and err on one side only: equal stamps mean equal bytes (stability.py), different
stamps mean that nobody knows. Then contents decide. The content identity is a BLAKE3 over names,
dtypes, shapes and digests of the bytes, so it does not depend on file names, sharding, the order of
tensors or how a header is formatted, and it can be computed again from a slab and its manifest.

    chunk     up to CHUNK_BYTES of one tensor, counted from the tensor's start
    tensor    one chunk (or none): its digest; else the digest of its chunks' digests, keyed so that
              64 bytes of weights can never pass for the digests of two chunks
    identity  the digest of [version, rows sorted by name, ties], encoded as msgpack

Part of the client's torch-free core: imports neither zmq nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import msgspec
from blake3 import blake3

from broker.checkpoints.faults import load_failed, system_refused, told_of
from broker.checkpoints.files import INDEX_SUFFIX, WeightFiles, open_regular, require_shards
from broker.checkpoints.header import header_digest, read_header_bytes
from broker.checkpoints.index import read_index_bytes
from broker.checkpoints.stability import stamp
from broker.weights import ITEM_BYTES, AliasGroup, Manifest, contiguous_stride, storage_extent
from broker.wire import MAX_FILES, FileStamp

CHUNK_BYTES = 1 << 20
"""Small enough to stay in a core's cache between being read and being digested."""

DIGEST_BYTES = 32

_IDENTITY_VERSION = 1
_TREE_CONTEXT = "weight-broker v1: tensor of several chunks"
_encode = msgspec.msgpack.Encoder().encode


Row = tuple[Any, ...]
"""(name, dtype, shape, digest), and the stride as a fifth where it is not row-major."""

ReadSlab = Callable[[int, int], bytes | memoryview]
"""Gives so many bytes from an offset of a slab on."""


def chunk_digest(chunk: bytes | memoryview) -> bytes:
    return blake3(chunk).digest()


def tensor_digest(chunk_digests: bytes | memoryview) -> bytes:
    """From the digests of a tensor's chunks, one after the other; none for an empty tensor."""
    if not chunk_digests:
        return chunk_digest(b"")
    if len(chunk_digests) == DIGEST_BYTES:
        return bytes(chunk_digests)
    return blake3(chunk_digests, derive_key_context=_TREE_CONTEXT).digest()


def content_identity(rows: Iterable[Row], ties: Iterable[Iterable[tuple[str, int]]]) -> str:
    """The identity of a set of tensors: "blake3:" and 64 hex digits.

    `ties` are the groups of names that share a storage, each name with its offset in it.
    """
    ordered = sorted(rows, key=itemgetter(0))
    groups = sorted(sorted(group) for group in ties)
    digest = blake3(_encode((_IDENTITY_VERSION, ordered, groups)))
    return f"blake3:{digest.hexdigest()}"


def slab_identity(manifest: Manifest, memory: memoryview | ReadSlab) -> str:
    """The content identity of a slab that is mapped or was copied out. Blocks: digests every byte.

    For a checkpoint's set it equals the identity its loader found, as long as nothing changed a
    byte. The manifest must have been validated against the slab.

    Args:
        memory: of format "B"; or, where the host cannot look at it, what copies bytes out of it.
    """
    read: ReadSlab = memory if callable(memory) else _reader_of(memory)
    rows: list[Row] = []
    offsets: dict[str, int] = {}
    tied = {name for alias in manifest.aliases for name in alias.names}
    for group in manifest.groups:
        row_major = group.stride == contiguous_stride(group.shape)
        extent = storage_extent(group.shape, group.stride, ITEM_BYTES[group.dtype])
        for name, offset in zip(group.names, group.offsets, strict=True):
            digest = _digest_of(read, offset, extent)
            row: Row = (name, group.dtype, group.shape, digest)
            rows.append(row if row_major else (*row, group.stride))
            if name in tied:
                offsets[name] = offset
    return content_identity(rows, (_tie(alias, offsets) for alias in manifest.aliases))


def _tie(alias: AliasGroup, offsets: dict[str, int]) -> list[tuple[str, int]]:
    return [(name, offsets[name] - alias.offset) for name in alias.names]


def _digest_of(read: ReadSlab, offset: int, nbytes: int) -> bytes:
    starts = range(0, nbytes, CHUNK_BYTES)
    chunks = (read(offset + at, min(CHUNK_BYTES, nbytes - at)) for at in starts)
    return tensor_digest(b"".join(map(chunk_digest, chunks)))


def _reader_of(memory: memoryview) -> ReadSlab:
    return lambda offset, nbytes: memory[offset : offset + nbytes]


def stamp_files(folder: int, files: WeightFiles, path: str) -> list[FileStamp]:
    """A stamp for every file of a checkpoint, the index included. Reads headers, no weights.

    Raises:
        LoadFailed: a file is missing, unreadable or does not begin like a safetensors file, or
            there are too many.
    """
    with told_of(path):
        if len(files.names) > MAX_FILES:
            raise load_failed(
                "too_many_files",
                f"it has {len(files.names)} files of weights, {MAX_FILES} are possible; save it "
                "again in larger shards",
                file=files.names[0],
            )
        require_shards(folder, files, path)
        return [_stamp_file(folder, name, is_index=name == files.index) for name in files.names]


def _stamp_file(folder: int, name: str, *, is_index: bool) -> FileStamp:
    descriptor = open_regular(folder, name)
    try:
        status = os.fstat(descriptor)
        raw = (
            read_index_bytes(descriptor, name)
            if is_index
            else read_header_bytes(descriptor, name)[0]
        )
    except OSError as error:
        raise system_refused(error, name, "reading") from error
    finally:
        os.close(descriptor)
    return stamp(name, status, header_digest(raw))


def fingerprint(stamps: Iterable[FileStamp]) -> str:
    """A digest over sizes and headers of the shards: what differs here cannot be a copy.

    Equal fingerprints say only "may have equal bytes"; a copy sharded otherwise has another one.
    """
    shards = sorted(
        (stamp.size, stamp.header_digest)
        for stamp in stamps
        if not stamp.name.endswith(INDEX_SUFFIX)
    )
    return blake3(_encode(shards)).hexdigest()
