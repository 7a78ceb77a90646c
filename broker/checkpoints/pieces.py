"""How a checkpoint's bytes are cut for reading: small pieces of a file with one destination each.

Slots follow each other in the slab as the tensors do in the files, so a piece is a range of a file
and a range of the slab at once, however many tensors lie in it. The staging buffer takes the slab's
shape: a piece of a thousand tiny tensors is read with one call, each tensor straight to its place,
and copied to the slab as one segment. One segment a tensor would cost more than the bytes.

Pure: imports neither zmq nor torch.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from broker.checkpoints.header import StoredTensor
from broker.checkpoints.identity import CHUNK_BYTES
from broker.devices.base import PIECE_BYTES
from broker.weights import ITEM_BYTES, SLOT_ALIGNMENT, align_up


class Piece(msgspec.Struct, gc=False):
    """Whole chunks that lie one after the other in a file, to be read by one call.

    A chunk that is converted is a piece of its own; it has more or fewer bytes in the file than in
    the slab, by whose bytes chunks are counted.

    Attributes:
        file: number of the file.
        offset, nbytes: the range of the file.
        slab: where in the slab the piece begins.
        image: bytes it takes there; more than `nbytes` if tensors are padded to their slots, and
            another number if it is converted.
        tensor: number of the tensor its first chunk is of.
        skip: bytes of that tensor that come before the piece; whole chunks.
        chunk: number of its first chunk, counted over all tensors.
        chunks: how many it has.
    """

    file: int
    offset: int
    nbytes: int
    slab: int
    image: int
    tensor: int
    skip: int
    chunk: int
    chunks: int


@dataclass(frozen=True)
class Layout:
    """Tensors that are copied, in the order of files and places, and their slots.

    Attributes:
        tensors: none is empty.
        slots: offset in the slab of each.
        first: `tensors[first[i]:first[i + 1]]` come from file i.
        nbytes: where the last tensor ends in the slab.
        chunks: of all tensors together.
    """

    tensors: list[StoredTensor]
    slots: array[int]
    first: list[int]
    nbytes: int
    chunks: int


def lay_out(files: list[list[StoredTensor]]) -> Layout:
    """Give each tensor a slot. `files[i]` are the tensors to copy from file i, by place."""
    tensors: list[StoredTensor] = []
    slots = array("q")
    first = [0]
    end = chunks = 0
    for of_file in files:
        for tensor in of_file:
            slot = align_up(end, SLOT_ALIGNMENT)
            slots.append(slot)
            end = slot + tensor.nbytes
            chunks += count_chunks(tensor.nbytes)
        tensors += of_file
        first.append(len(tensors))
    return Layout(tensors, slots, first, end, chunks)


def count_chunks(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


def cut_pieces(layout: Layout) -> list[Piece]:
    """Every chunk once, in pieces whose image fits a staging buffer."""
    pieces: list[Piece] = []
    chunk = 0
    for file in range(len(layout.first) - 1):
        piece = None
        for number in range(layout.first[file], layout.first[file + 1]):
            tensor, slot = layout.tensors[number], layout.slots[number]
            for skip in range(0, tensor.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, tensor.nbytes - skip)
                offset, nbytes = tensor.offset + in_file(tensor, skip), in_file(tensor, size)
                if tensor.stored or piece is None or not _extend(piece, offset, slot + skip, size):
                    piece = Piece(file, offset, nbytes, slot + skip, size, number, skip, chunk, 1)
                    pieces.append(piece)
                if tensor.stored:
                    piece = None
                chunk += 1
    return pieces


def in_file(tensor: StoredTensor, nbytes: int) -> int:
    """How many bytes of the file so many bytes of the tensor in the slab are made of."""
    if not tensor.stored:
        return nbytes
    return nbytes // ITEM_BYTES[tensor.dtype] * ITEM_BYTES[tensor.stored]


def _extend(piece: Piece, offset: int, slab: int, size: int) -> bool:
    """Add a chunk to the piece, or say that it must begin another."""
    image = slab + size - piece.slab
    if offset != piece.offset + piece.nbytes or image > PIECE_BYTES:
        return False
    piece.nbytes += size
    piece.image = image
    piece.chunks += 1
    return True


def chunk_views(layout: Layout, piece: Piece, buffer: memoryview) -> list[memoryview]:
    """Where in a staging buffer each chunk of the piece belongs, in the order of the file."""
    views = []
    number, skip = piece.tensor, piece.skip
    for _ in range(piece.chunks):
        nbytes = layout.tensors[number].nbytes
        start = layout.slots[number] + skip - piece.slab
        size = min(CHUNK_BYTES, nbytes - skip)
        views.append(buffer[start : start + size])
        skip += size
        if skip == nbytes:
            number, skip = number + 1, 0
    return views
