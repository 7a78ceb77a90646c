"""A device whose memory is the host's: sealed memfds instead of driver allocations.

For trying the product out and for tests; it must be asked for by name and is never chosen
automatically. Descriptors, read-only mappings and life cycle are those of a GPU; `F_SEAL_WRITE` at
`freeze` even proves that the writer has let go (the kernel answers EBUSY while it has not), which a
GPU driver cannot.

Slabs are not preallocated: pages that are written through the descriptor need no zeroing and no
fault, which makes a load 1.5 to 3 times faster, and running out of memory is a clean ENOSPC there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path

from broker.device_names import SIMULATED_UUID as UUID
from broker.devices.base import (
    PIECE_BYTES,
    Device,
    DeviceError,
    DeviceOutOfDescriptors,
    DeviceOutOfMemory,
    DeviceProperties,
    Mapping,
    Segment,
    SlabWriter,
    StagingBuffer,
    StillMappedWritable,
    check_range,
    check_slab_size,
)
from broker.forking import no_fork

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_DONTFORK = 10  # linux/mman.h
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000  # asm-generic/mman.h; the same on x86-64 and arm64
_PROT_NONE = 0
_MAPPED, _SUSPENDED, _CLOSED = "mapped", "suspended", "closed"
_LARGEST_FILE = (1 << 63) - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class SimulatedDevice(Device):
    """The one simulated device of a node. Needs Linux and no GPU."""

    def __init__(self) -> None:
        self.properties = DeviceProperties(
            uuid=UUID,
            name="simulated device (host memory)",
            platform="simulated",
            granularity=mmap.PAGESIZE,
            total_bytes=_meminfo("MemTotal"),
        )

    def free_bytes(self) -> int:
        return _meminfo("MemAvailable")

    def create(self, nbytes: int) -> int:
        check_slab_size(nbytes, self.properties)
        if nbytes > _LARGEST_FILE:
            raise DeviceOutOfMemory(f"create on {UUID}: {nbytes} bytes are more than any file has")
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            descriptor = os.memfd_create("weight-broker-slab", flags)
        except OSError as error:
            raise _translated("create", error) from error
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError as error:
            os.close(descriptor)
            raise _translated("create", error) from error
        return descriptor

    def freeze(self, descriptor: int) -> int:
        try:
            # Sealed already if the reopening failed the first time.
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
            # A descriptor opened for writing cannot be mapped shared any more, not even read-only.
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise StillMappedWritable("freeze: the slab is still mapped writable") from error
            raise _translated("freeze", error) from error

    def map(
        self, descriptor: int, nbytes: int, *, writable: bool, slab: Hashable | None = None
    ) -> Mapping:
        del slab  # a second mapping of the same pages costs nothing on the host
        _check_slab(descriptor, nbytes)
        return HostMapping(descriptor, nbytes, writable=writable)

    def read(self, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        check_range(mapping, offset, nbytes, UUID)
        return ctypes.string_at(mapping.address + offset, nbytes)

    def open_writer(self, descriptor: int, nbytes: int, *, buffers: int) -> SlabWriter:
        _check_slab(descriptor, nbytes)
        return _DescriptorWriter(descriptor, buffers)


class HostMapping(Mapping):
    """A shared mapping that forked children do not inherit, nor unmap.

    In a child something else may lie at the address by the time this object is used there.
    """

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _map_at(None, nbytes, protection, mmap.MAP_SHARED, descriptor)
        self.nbytes = nbytes
        self._lock = threading.RLock()  # a garbage collection inside may close this very mapping
        self._state = _MAPPED
        self._pid = os.getpid()

    def close(self) -> None:
        with self._lock:
            is_here = os.getpid() == self._pid
            if self._state != _CLOSED:
                self._state = _CLOSED
                if is_here:  # looked at before: between the two a signal's handler could raise
                    _libc.munmap(self.address, self.nbytes)

    def suspend(self) -> None:
        with self._lock:
            self._check_usable("suspend")
            if self._state == _MAPPED:
                self._reserve()
                self._state = _SUSPENDED

    def resume(self, descriptor: int) -> None:
        with self._lock:
            self._check_usable("resume")
            if self._state != _SUSPENDED:
                raise DeviceError(f"resume on {UUID}: the slab is mapped already")
            _check_slab(descriptor, self.nbytes)
            flags = mmap.MAP_SHARED | _MAP_FIXED
            try:
                _map_at(self.address, self.nbytes, mmap.PROT_READ, flags, descriptor)
            except DeviceError:
                self._reserve()  # the kernel may have taken the reservation away first
                raise
            self._state = _MAPPED

    def _reserve(self) -> None:
        """Put nothing in the place of whatever is mapped, in one step."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map_at(self.address, self.nbytes, _PROT_NONE, flags, -1)

    def _check_usable(self, call: str) -> None:
        if self._state == _CLOSED or os.getpid() != self._pid:
            raise DeviceError(f"{call} on {UUID}: the slab is not mapped in this process any more")


def _map_at(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    with no_fork:
        found: int = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
        if found == _MAP_FAILED:
            code = ctypes.get_errno()
            raise _translated("map", OSError(code, os.strerror(code)))
        _libc.madvise(found, nbytes, _MADV_DONTFORK)
    return found


class _HostBuffer(StagingBuffer):
    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, PIECE_BYTES))


class _DescriptorWriter(SlabWriter):
    """Writes through the descriptor, so that nothing is ever mapped writable."""

    def __init__(self, descriptor: int, buffers: int) -> None:
        self._descriptor = descriptor
        self._free: queue.SimpleQueue[_HostBuffer] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(_HostBuffer())

    def buffer(self) -> StagingBuffer:
        return self._free.get()

    def submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        assert isinstance(buffer, _HostBuffer)  # noqa: S101 - our own ring
        try:
            for segment in segments:
                self._write(buffer.view, segment)
        finally:
            self._free.put(buffer)

    def _write(self, piece: memoryview, segment: Segment) -> None:
        offset, end = segment.offset, segment.start + segment.nbytes
        if min(segment.start, segment.nbytes, offset) < 0 or end > PIECE_BYTES:
            raise DeviceError(f"write on {UUID}: {segment} is not inside a buffer of {PIECE_BYTES}")
        data = piece[segment.start : end]
        while data:
            try:
                written = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                raise _translated("write", error) from error
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Nothing is mapped and every write has arrived when it returned."""


def _check_slab(descriptor: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except (OSError, ValueError) as error:  # ValueError: negative
        raise DeviceError(f"map on {UUID}: the descriptor is not a slab ({error})") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise DeviceError(f"map on {UUID}: the slab's size is not sealed, so it could be cut short")
    if not 0 < nbytes <= size:
        raise DeviceError(f"map on {UUID}: the slab has {size} bytes, {nbytes} were announced")


def _translated(call: str, error: OSError) -> DeviceError:
    sentence = f"{call} on {UUID}: {error.strerror}"
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT):
        return DeviceOutOfMemory(sentence)
    if error.errno == errno.EFBIG:
        return DeviceOutOfMemory(f"{sentence}; raise the limit of a file's size, ulimit -f")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DeviceOutOfDescriptors(sentence)
    return DeviceError(sentence)


def _meminfo(field: str) -> int:
    """Bytes of a /proc/meminfo line (proc(5): the file's unit "kB" is 1024 bytes)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise DeviceError(f"/proc/meminfo has no line {field}")
