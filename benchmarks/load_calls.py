"""Which system calls bring a file's bytes into a fresh slab fastest, with and without a digest.

Usage: python -m benchmarks.load_calls [GIGABYTES] [ROUNDS]

Simulated device, page cache warm, runs interleaved. Columns: median rate and its spread in GB/s,
and median processor seconds a GB, which say more on a machine that is busy with other things. Used
for docs/decisions/0001-how-bytes-reach-the-slab.md.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.plan import plan_checkpoint
from broker.checkpoints.reading import hash_pieces, load_pieces
from broker.devices.simulated import SimulatedDevice

PIECE = 1 << 20
SMALL_PIECE = 1 << 18
LARGE_PAGE = 1 << 21
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # linux/mman.h
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
Work = Callable[[int, int, range], None]
"""(file, slab, piece starts): one thread's share."""


def bounce(digest: bool, piece: int = PIECE) -> Work:
    def work(file: int, slab: int, starts: range) -> None:
        staging = memoryview(mmap.mmap(-1, piece))
        for start in starts:
            for at in range(start, start + PIECE, piece):
                got = os.preadv(file, [staging], at)
                if digest:
                    blake3(staging[:got]).digest()
                os.pwrite(slab, staging[:got], at)

    return work


def bounce_to_large_pages(digest: bool) -> Work:
    """Each 2 MiB of the slab are made one page before they are written. For one thread.

    That works whatever /sys/kernel/mm/transparent_hugepage/shmem_enabled says but "deny", and costs
    what the 2 MiB cost of which the kernel has them: little if they were in use a moment ago.
    """

    def work(file: int, slab: int, starts: range) -> None:
        write = bounce(digest)
        nbytes = os.fstat(slab).st_size // LARGE_PAGE * LARGE_PAGE
        reserved, aligned = _map_aligned(slab, nbytes)
        for at in starts:
            if at % LARGE_PAGE == 0 and at < nbytes:
                os.pwrite(slab, b"\0", at)  # what is a hole all through is refused
                if _libc.madvise(aligned + at, LARGE_PAGE, _MADV_COLLAPSE):
                    code = ctypes.get_errno()
                    raise OSError(code, f"no large page: {os.strerror(code)}")
            write(file, slab, range(at, at + 1))
        _libc.munmap(reserved, nbytes + LARGE_PAGE)

    return work


def _map_aligned(slab: int, nbytes: int) -> tuple[int, int]:
    """What was reserved, and where in it the slab is mapped: at a multiple of a large page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _libc.mmap(None, nbytes + LARGE_PAGE, 0, flags, -1, 0)
    aligned = -(-reserved // LARGE_PAGE) * LARGE_PAGE
    _libc.mmap(aligned, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_FIXED, slab, 0)
    return reserved, aligned


def mapped_source(digest: bool) -> Work:
    """No staging; a source that is truncated meanwhile is SIGBUS, so never used."""

    def work(file: int, slab: int, starts: range) -> None:
        source = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
        for at in starts:
            if digest:
                blake3(source[at : at + PIECE]).digest()
            os.pwrite(slab, source[at : at + PIECE], at)

    return work


def into_mapping(digest: bool, *, populated: bool = False) -> Work:
    def work(file: int, slab: int, starts: range) -> None:
        mapping = mmap.mmap(slab, 0)
        target = memoryview(mapping)
        for at in starts:
            if populated:
                mapping.madvise(_MADV_POPULATE_WRITE, at, PIECE)
            got = os.preadv(file, [target[at : at + PIECE]], at)
            if digest:
                blake3(target[at : at + got]).digest()

    return work


def memcpy(file: int, slab: int, starts: range) -> None:
    source = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    target = memoryview(mmap.mmap(slab, 0))
    for at in starts:
        piece = source[at : at + PIECE]
        target[at : at + len(piece)] = piece


def in_threads(work: Work, threads: int, path: Path, slab: int) -> None:
    size = path.stat().st_size
    file = os.open(path, os.O_RDONLY)
    shares = [range(number * PIECE, size, threads * PIECE) for number in range(threads)]
    workers = [threading.Thread(target=work, args=(file, slab, share)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(file)


def loader(folder: Path, threads: int, slab: int) -> None:
    with open_checkpoint(folder) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, None, checkpoint.path)
        device = SimulatedDevice()
        with device.open_writer(slab, plan.manifest.nbytes, buffers=2 * threads) as writer:
            load_pieces(plan, checkpoint.folder, writer, threads, lambda _done, _total: None)


def hasher(folder: Path, threads: int) -> None:
    with open_checkpoint(folder) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, None, checkpoint.path)
        hash_pieces(plan, checkpoint.folder, threads, lambda _done, _total: None)


def make_checkpoint(folder: Path, nbytes: int) -> Path:
    tensor = 32 << 20
    entries = {
        f"layers.{number}.weight": {
            "dtype": "BF16",
            "shape": [tensor // 8192, 4096],
            "data_offsets": [number * tensor, (number + 1) * tensor],
        }
        for number in range(nbytes // tensor)
    }
    header = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    block = os.urandom(tensor)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in entries:
            file.write(block)
    return path


def cases(folder: Path, path: Path, *, fresh: bool) -> dict[str, Callable[[int], None]]:
    table: dict[str, Callable[[int], None]] = {}

    def add(name: str, work: Work, threads: int) -> None:
        table[f"{name}, {threads}"] = lambda slab: in_threads(work, threads, path, slab)

    def add_loader(threads: int) -> None:
        table[f"load_pieces and its plan, {threads}"] = lambda slab: loader(folder, threads, slab)
        table[f"hash_pieces and its plan, {threads}"] = lambda _: hasher(folder, threads)

    add("memcpy from mapping to mapping", memcpy, 1)  # Python's own holds the GIL
    for threads in (1, 2):
        for digest in (False, True):
            words = " + blake3" if digest else ""
            add(f"preadv into the mapped slab{words}", into_mapping(digest), threads)
            add(f"pwrite from the mapped file{words}", mapped_source(digest), threads)
            add(f"preadv to 256 KiB{words} + pwrite", bounce(digest, SMALL_PIECE), threads)
            add(f"preadv to 1 MiB{words} + pwrite", bounce(digest), threads)
            if threads == 1 and fresh:
                populated = into_mapping(digest, populated=True)
                add(f"populate, preadv into the mapped slab{words}", populated, 1)
                large = bounce_to_large_pages(digest)
                add(f"preadv to 1 MiB{words} + pwrite to large pages", large, 1)
        add_loader(threads)
    add("preadv to 1 MiB + blake3 + pwrite", bounce(True), 4)
    add_loader(4)
    return table


def measure(table: dict[str, Callable[[int], None]], nbytes: int, rounds: int, fresh: bool) -> None:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in table}
    device = SimulatedDevice()
    kept = device.create(nbytes + (1 << 20))
    for _ in range(rounds + 1):  # the first round warms up
        for name, run in table.items():
            slab = device.create(nbytes + (1 << 20)) if fresh else kept
            start, start_cpu = time.perf_counter(), time.process_time()
            run(slab)
            seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
            times[name].append((nbytes / seconds / 1e9, cpu / nbytes * 1e9))
            if fresh:
                os.close(slab)
    os.close(kept)
    print(f"\n{'fresh slab' if fresh else 'slab with its pages there'}; threads last")
    for name, runs in times.items():
        rates = sorted(rate for rate, _ in runs[1:])
        cpu = statistics.median(seconds for _, seconds in runs[1:])
        spread = f"{rates[0]:.2f} to {rates[-1]:.2f}"
        print(f"{statistics.median(rates):6.2f} GB/s ({spread})  {cpu:.2f} s/GB  {name}")


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    nbytes = int(gigabytes * 1e9) >> 25 << 25
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = make_checkpoint(folder, nbytes)
        for fresh in (True, False):
            measure(cases(folder, path, fresh=fresh), nbytes, rounds, fresh)


if __name__ == "__main__":
    main()
