"""Ways to bring a checkpoint's file into a slab, the broker's and others', for load.py.

Parts of the loader's work stand beside the whole: only digest, only write.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy
from blake3 import blake3

from benchmarks.common import MIB
from broker.checkpoints import reading
from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.identity import DIGEST_BYTES
from broker.checkpoints.plan import plan_checkpoint
from broker.checkpoints.reading import hash_pieces, load_pieces
from broker.devices.simulated import SimulatedDevice
from broker.loader.checkpoint import RING_BUFFERS_PER_THREAD

PIECE = MIB
THREADS = (1, 2)
BOTH_WAYS = mmap.PROT_READ | mmap.PROT_WRITE
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
Load = Callable[[int], None]
"""Fills the slab of this descriptor."""


def load(checkpoint: Path, threads: int, slab: int, *, digest: bool = True) -> None:
    """A loader process's own work, planning included; without a digest, as none ever does it."""
    undigested = mock.patch.object(reading, "chunk_digest", _no_digest)
    with contextlib.nullcontext() if digest else undigested, open_checkpoint(checkpoint) as opened:
        plan = plan_checkpoint(opened.folder, None, opened.path)
        buffers = RING_BUFFERS_PER_THREAD * threads
        device = SimulatedDevice()
        with device.open_writer(slab, plan.manifest.nbytes, buffers=buffers) as writer:
            load_pieces(plan, opened.folder, writer, threads, lambda _done, _total: None)


def _no_digest(_chunk: bytes | memoryview) -> bytes:
    return bytes(DIGEST_BYTES)


def digest_only(checkpoint: Path, threads: int, _slab: int) -> None:
    """What a loader does to find out whether the bytes are resident already."""
    with open_checkpoint(checkpoint) as opened:
        plan = plan_checkpoint(opened.folder, None, opened.path)
        hash_pieces(plan, opened.folder, threads, lambda _done, _total: None)


def write_only(nbytes: int, threads: int, slab: int) -> None:
    """The loader's last step alone: one piece, which stays in the core's cache, over and over."""

    def work(starts: range) -> None:
        piece = mmap.mmap(-1, PIECE)
        for start in starts:
            if os.pwrite(slab, piece, start) != PIECE:
                raise OSError("memory is full")

    _in_threads(work, threads, nbytes)


class Mapped:
    """A file or slab mapped into this process.

    Not closed: what is read through it may not be gone before the process is.

    Args:
        filled: fill in its page tables now, so that using it meets no page fault.
    """

    def __init__(self, descriptor: int, nbytes: int, protection: int, *, filled: bool) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if filled else 0)
        self.view = memoryview(mmap.mmap(descriptor, nbytes, flags, protection))
        self.address = int(numpy.frombuffer(self.view, dtype=numpy.uint8).ctypes.data)


def copy_mapped(
    source: Mapped, target: Mapped | None, threads: int, slab: int, *, digest: bool
) -> None:
    """memcpy from mapped file to mapped slab, in pieces, each digested before.

    Args:
        target: None: mapped and unmapped here, and its page tables are filled in as it is written.
    """
    size = len(source.view)
    there = target or Mapped(slab, size, BOTH_WAYS, filled=False)

    def work(starts: range) -> None:
        for start in starts:
            piece = source.view[start : start + PIECE]
            if digest:
                blake3(piece).digest()
            _memmove(there.address + start, source.address + start, len(piece))

    _in_threads(work, threads, size)


def read_into(path: Path, target: Mapped, threads: int, _slab: int) -> None:
    """`preadv` into mapped pages: what a loader could do that held the slab mapped writable."""
    size = path.stat().st_size

    def work(starts: range) -> None:
        for start in starts:
            os.preadv(file.fileno(), [target.view[start : min(start + PIECE, size)]], start)

    with path.open("rb") as file:
        _in_threads(work, threads, size)


def _in_threads(work: Callable[[range], None], threads: int, nbytes: int) -> None:
    """Each thread takes every so manieth piece; `work` gets where its pieces start."""
    shares = [range(number * PIECE, nbytes, threads * PIECE) for number in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, shares):
            pass


def load_file_and_copy(path: Path, threads: int, slab: int) -> None:
    """What an engine would do to fill shared memory: `load_file`, then each tensor's `copy_`."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(threads)
    target = torch.frombuffer(mmap.mmap(slab, os.fstat(slab).st_size), dtype=torch.uint8)
    at = 0
    for tensor in load_file(path).values():
        target[at : at + tensor.nbytes].copy_(tensor.view(torch.uint8).view(-1))
        at += tensor.nbytes


def cases(path: Path, source: Mapped, target: Mapped | None) -> dict[str, Load]:
    """Ways into a fresh slab, or into one whose pages are there and mapped as `target`."""
    table: dict[str, Load] = {}
    checkpoint, nbytes = path.parent, path.stat().st_size // PIECE * PIECE
    for threads in THREADS:
        for digest in (False, True):
            words = ", digest" if digest else ""
            table[f"loader{words}, {threads}"] = partial(load, checkpoint, threads, digest=digest)
            table[f"memcpy{words}, {threads}"] = partial(
                copy_mapped, source, target, threads, digest=digest
            )
        table[f"load_file and copy, {threads}"] = partial(load_file_and_copy, path, threads)
        table[f"only digest, {threads}"] = partial(digest_only, checkpoint, threads)
        table[f"only write, {threads}"] = partial(write_only, nbytes, threads)
        if target is not None:
            table[f"memcpy, page tables filled meanwhile, {threads}"] = partial(
                copy_mapped, source, None, threads, digest=False
            )
            table[f"preadv into the mapped pages, {threads}"] = partial(
                read_into, path, target, threads
            )
    return table
