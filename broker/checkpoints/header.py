"""The header of a safetensors file: read whole, checked whole, before any weight is read.

The format (safetensors 0.8, `safetensors/src/tensor.rs`): eight bytes little-endian length N, then
N bytes of JSON, then the tensors back to back without a gap. We are stricter than the library where
it accepts what two readers would read differently; tests/checkpoints/test_against_library.py lists
those headers.

Pure of torch and zmq. Never allocates by a number from the file before that number was compared
with the file's own size. Decoding takes some 8 times the header's length in memory; a header that
was made to take the most takes 32 times (measured), so 3.2 GB at the format's limit, in the loader.
The client reads headers only to digest them and decodes none.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from math import prod
from operator import attrgetter

import msgspec
from blake3 import blake3

from broker.checkpoints.faults import load_failed, quoted, system_refused
from broker.checkpoints.header_json import Entry, decode_header
from broker.errors import LoadFailed
from broker.weights import INT64_MAX, is_countable

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""safetensors `MAX_HEADER_SIZE`: longer headers are refused by every reader."""

MAX_DIMENSIONS = 64
"""Most of torch's operators take no more (`at::dim_bitset_size`)."""


DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
}
"""The format's dtype names that torch has too: torch's name, and bits of one element.

F6_E2M3 and F6_E3M2 are missing because torch has no such dtype. F4 counts single 4-bit elements,
torch counts pairs, so the last dimension is halved.
"""

_PICKLES = "pickled weights are never loaded; convert them to safetensors"
_FOREIGN_FILES: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "lfs_pointer",
        "is a Git LFS pointer, not the weights; run `git lfs pull` or download the file again",
    ),
    (b"GGUF", "not_safetensors", "is a GGUF file; give a checkpoint in safetensors format"),
    (b"PK\x03\x04", "unsafe_pickle", f"is a zip archive as torch.save writes it; {_PICKLES}"),
    (b"\x80\x02", "unsafe_pickle", f"is a pickle; {_PICKLES}"),
    (b"\x80\x04", "unsafe_pickle", f"is a pickle; {_PICKLES}"),
)
"""How other files begin, and what to say; looked at only where the length word is impossible."""


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a file: torch's dtype and shape; `offset` counts from the file's start.

    `stored`: its dtype in the file if it is converted on its way; dtype and nbytes are then the
    slab's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stored: str = ""


@dataclass(frozen=True)
class Header:
    """What a file's header says. `tensors` are in the order of their bytes.

    Attributes:
        nbytes: of length word and header together; the first tensor starts there.
        digest: BLAKE3 of those bytes, in hex.
    """

    file: str
    nbytes: int
    digest: str
    tensors: list[StoredTensor]


def read_header(descriptor: int, file_name: str) -> Header:
    """Read and check the header of an open regular file. Blocks on the file; moves no offset.

    Raises:
        LoadFailed: the file is not a valid safetensors file of exactly its size; `reason`, `file`
            and (where there is one) `tensor` say what is wrong.
    """
    raw, size = read_header_bytes(descriptor, file_name)
    entries = decode_header(raw[LENGTH_BYTES:], file_name)
    tensors = _placed(entries, len(raw), size, file_name)
    return Header(file_name, len(raw), header_digest(raw), tensors)


def header_digest(raw: bytes) -> str:
    return blake3(raw).hexdigest()


def read_header_bytes(descriptor: int, file_name: str) -> tuple[bytes, int]:
    """Length word and header as they are, not decoded, and the file's size.

    Raises:
        LoadFailed: the file cannot be read, or does not begin like a safetensors file.
    """
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise load_failed(
                "not_a_file", f"{quoted(file_name)} is not a regular file", file=file_name
            )
        start = os.pread(descriptor, 64, 0)
        length = _header_length(start, status.st_size, file_name)
        raw = _pread(descriptor, LENGTH_BYTES + length)
    except OSError as error:
        raise system_refused(error, file_name, "reading") from error
    if len(raw) != LENGTH_BYTES + length:
        raise _ends_in_header(file_name, status.st_size)
    _check_first_character(raw[LENGTH_BYTES : LENGTH_BYTES + 1], file_name)
    return raw, status.st_size


def _pread(descriptor: int, nbytes: int) -> bytes:
    """The file's first bytes; fewer than asked for only if the file ends there."""
    raw = os.pread(descriptor, nbytes, 0)
    while 0 < len(raw) < nbytes:
        more = os.pread(descriptor, nbytes - len(raw), len(raw))
        if not more:
            break
        raw += more
    return raw


def _header_length(start: bytes, size: int, file: str) -> int:
    """The length word, once it is known to be possible in a file of `size` bytes."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if len(start) < LENGTH_BYTES:
        raise _foreign(start, file) or _ends_in_header(file, size)
    if length > MAX_HEADER_BYTES:
        raise _foreign(start, file) or load_failed(
            "header_too_large",
            f"{quoted(file)} is not a safetensors file, or damaged: it announces a header of "
            f"{length} bytes, the format allows {MAX_HEADER_BYTES}; download it again",
            file=file,
        )
    if length > size - LENGTH_BYTES:
        raise _ends_in_header(file, size)
    return length


def _foreign(start: bytes, file: str) -> LoadFailed | None:
    """The error for a file that is recognisably something else, or None."""
    for magic, reason, what in _FOREIGN_FILES:
        if start.startswith(magic):
            return load_failed(reason, f"{quoted(file)} {what}", file=file)
    if start.lstrip().startswith(b"<"):
        return load_failed(
            "not_safetensors",
            f"{quoted(file)} is a web page (HTML or XML), not weights; download the file itself, "
            "not the page that shows it",
            file=file,
        )
    return None


def _ends_in_header(file: str, size: int) -> LoadFailed:
    return load_failed(
        "header_truncated",
        f"{quoted(file)} ends inside its header (it has {size} bytes); download it again",
        file=file,
    )


def _check_first_character(first: bytes, file: str) -> None:
    """The format: the header must begin with "{". A list is JSON too, so it is told apart."""
    if first not in (b"{", b"["):
        raise load_failed(
            "header_start",
            f'the header of {quoted(file)} does not begin with "{{" as the format demands; '
            "download the file again, or write it with the safetensors library",
            file=file,
        )


def _placed(entries: dict[str, Entry], start: int, size: int, file: str) -> list[StoredTensor]:
    """The tensors in the order of their bytes, which they cover without gap or overlap."""
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    tensors = []
    for name, entry in entries.items():
        shape = entry.shape
        kind = (entry.dtype, shape)
        layout = known.get(kind)
        if layout is None:
            layout = known[kind] = _layout(name, entry, file)
        begin, end = entry.data_offsets
        if end - begin != layout[2] or begin < 0:
            raise _wrong_size(name, entry, layout[2], file)
        tensors.append(StoredTensor(name, layout[0], layout[1], start + begin, layout[2]))
    _check_tiling(tensors, start, size, file)
    return tensors


def _layout(name: str, entry: Entry, file: str) -> tuple[str, tuple[int, ...], int]:
    """torch's dtype and shape, and the bytes they need."""
    dtype, bits = DTYPES.get(entry.dtype, ("", 0))
    shape = entry.shape
    fault = _shape_fault(shape, bits) if bits else _dtype_fault(entry.dtype)
    if fault is not None:
        reason, what = fault
        sentence = f"tensor {quoted(name)} in {quoted(file)} {what}"
        raise load_failed(reason, sentence, file=file, tensor=name)
    nbytes = prod(shape) * bits // 8
    if bits < 8:
        shape = (*shape[:-1], shape[-1] * bits // 8)
    return dtype, shape, nbytes


def _dtype_fault(dtype: str) -> tuple[str, str]:
    what = f"has the dtype {quoted(dtype)}, which safetensors and torch do not both know"
    return "unknown_dtype", f"{what}; convert it to one they do"


def _shape_fault(shape: tuple[int, ...], bits: int) -> tuple[str, str] | None:
    """Reason and words for a shape no tensor can have.

    The product of the dimensions that are not zero has to fit int64 too where one is zero: torch
    computes strides from it, and the reference's answer depends on the order of the dimensions.
    Without a zero it has to fit the file, which is checked later.
    """
    cure = "write the file again with the safetensors library"
    if len(shape) > MAX_DIMENSIONS:
        return "bad_shape", f"has {len(shape)} dimensions, torch takes {MAX_DIMENSIONS}; {cure}"
    if any(n < 0 or n > INT64_MAX for n in shape):
        return "bad_shape", f"has a dimension that is negative or above 2**63 - 1; {cure}"
    if 0 in shape and not is_countable(shape, 1):
        return "bad_shape", f"is empty, but its other dimensions exceed 2**63 - 1; {cure}"
    if bits < 8 and (not shape or shape[-1] * bits % 8):
        return "subbyte_shape", f"packs {bits}-bit elements into rows of no whole bytes; {cure}"
    return None


def _wrong_size(name: str, entry: Entry, nbytes: int, file: str) -> LoadFailed:
    begin, end = entry.data_offsets
    where = f"tensor {quoted(name)} in {quoted(file)}"
    if begin < 0 or end < begin:
        what = "has data_offsets that are negative or run backwards"
    else:
        given = _number(end - begin)
        what = f"needs {_number(nbytes)} bytes by dtype and shape, its data_offsets give {given}"
    return load_failed(
        "bad_entry" if begin < 0 else "size_mismatch",
        f"{where} {what}; download the file again, or write it with the safetensors library",
        file=file,
        tensor=name,
    )


def _number(nbytes: int) -> str:
    return str(nbytes) if nbytes < 1 << 64 else "over 2**64"


def _check_tiling(tensors: list[StoredTensor], start: int, size: int, file: str) -> None:
    """Sort by place; refuse unless they fill the file from its header to its end."""
    # An empty tensor shares its offset with its neighbour and comes first.
    tensors.sort(key=attrgetter("offset", "nbytes"))
    expected = start
    for tensor in tensors:
        if tensor.offset != expected:
            raise _gap(tensor, expected, file)
        expected += tensor.nbytes
    if expected > size:
        raise _cut_short(tensors, expected, size, file)
    if expected < size:
        raise load_failed(
            "trailing_bytes",
            f"{quoted(file)} goes on for {size - expected} bytes after its last tensor; "
            "download it again, or write it with the safetensors library",
            file=file,
        )


def _cut_short(tensors: list[StoredTensor], expected: int, size: int, file: str) -> LoadFailed:
    first = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > size)
    return load_failed(
        "truncated",
        f"{quoted(file)} is cut short: it has {size} bytes of {_number(expected)}, so tensor "
        f"{quoted(first.name)} is incomplete; download it again",
        file=file,
        tensor=first.name,
    )


def _gap(tensor: StoredTensor, expected: int, file: str) -> LoadFailed:
    where = f"tensor {quoted(tensor.name)} in {quoted(file)}"
    cure = "write the file again with the safetensors library"
    if tensor.offset < expected:
        what = f"shares bytes with the tensor before it; {cure}"
        return load_failed("overlap", f"{where} {what}", file=file, tensor=tensor.name)
    what = f"is preceded by {_number(tensor.offset - expected)} bytes that no tensor names; {cure}"
    return load_failed("hole", f"{where} {what}", file=file, tensor=tensor.name)
