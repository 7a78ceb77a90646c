"""Cutting a checkpoint into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.checkpoints.header import StoredTensor
from broker.checkpoints.identity import CHUNK_BYTES
from broker.checkpoints.pieces import Layout, Piece, chunk_views, cut_pieces, lay_out
from broker.devices.base import PIECE_BYTES
from broker.weights import SLOT_ALIGNMENT


def layout_of(files: list[list[tuple[int, int]]]) -> Layout:
    """`files[i]` are the tensors of file i: bytes left out before each, and its bytes."""
    tensors = []
    for number, sizes in enumerate(files):
        at, of_file = 100, []
        for place, (gap, nbytes) in enumerate(sizes):
            at += gap
            of_file.append(StoredTensor(f"{number}.{place}", "uint8", (nbytes,), at, nbytes))
            at += nbytes
        tensors.append(of_file)
    return lay_out(tensors)


SIZES = st.one_of(
    st.integers(1, 5000),
    st.sampled_from([511, 512, 513, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 << 20]),
)
FILES = st.lists(st.lists(st.tuples(st.sampled_from([0, 0, 0, 8]), SIZES), max_size=8), max_size=3)


@given(FILES)
def test_pieces_cover_every_chunk_once(files: list[list[tuple[int, int]]]) -> None:
    """Each byte of each tensor is in one piece, whose image fits a buffer and its slots."""
    layout = layout_of(files)
    buffer = memoryview(bytearray(PIECE_BYTES))
    chunk = 0
    covered: list[tuple[int, int, int]] = []
    for piece in cut_pieces(layout):
        assert 0 < piece.nbytes <= piece.image <= PIECE_BYTES
        assert piece.chunk == chunk
        chunk += piece.chunks
        views = chunk_views(layout, piece, buffer)
        assert sum(map(len, views)) == piece.nbytes
        assert len(views) == piece.chunks
        covered += places(layout, piece)
    assert chunk == layout.chunks
    assert covered == [
        (file, tensor.offset, slot)
        for file in range(len(files))
        for tensor, slot in list(zip(layout.tensors, layout.slots, strict=True))[
            layout.first[file] : layout.first[file + 1]
        ]
    ]


def places(layout: Layout, piece: Piece) -> list[tuple[int, int, int]]:
    """File, offset and slot of each tensor that begins in a piece, walking the file's bytes."""
    found = []
    number, skip, offset = piece.tensor, piece.skip, piece.offset
    while offset < piece.offset + piece.nbytes:
        tensor = layout.tensors[number]
        assert tensor.offset + skip == offset
        assert skip % CHUNK_BYTES == 0
        if skip == 0:
            found.append((piece.file, offset, layout.slots[number]))
        size = min(tensor.nbytes - skip, piece.offset + piece.nbytes - offset)
        offset += size
        skip += size
        if skip == tensor.nbytes:
            number, skip = number + 1, 0
    return found


def test_tiny_tensors_share_a_piece() -> None:
    """As many tensors as slots fit a buffer are read at once."""
    layout = layout_of([[(0, 4)] * 5000])
    assert len(cut_pieces(layout)) == -(-5000 // (PIECE_BYTES // SLOT_ALIGNMENT))
