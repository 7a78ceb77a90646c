"""What the broker, a loader and an engine need of a device, and nothing else.

A device is one place weights can live: one GPU, one MIG slice, or the simulated device. The same
class serves all three kinds of process; which methods are called tells them apart:

    broker   create → freeze (at seal) → the descriptors are handed out → os.close
    loader   open_writer → staging buffers → close                  (before seal)
    engine   map(writable=False) → address → Mapping.close

No method here may be called on the broker's loop: each may block in the driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from broker.closing import Closeable

PIECE_BYTES = 1 << 20
"""Capacity of one staging buffer: small enough that the digest reads it from the cache."""


class DeviceError(Exception):
    """A device call failed. The message names the call, the driver's own words and the device."""


class DeviceOutOfMemory(DeviceError):
    """The device has not got the bytes; nothing was allocated."""


class DeviceOutOfDescriptors(DeviceError):
    """This process, or the system, has no descriptor left for it."""


class StillMappedWritable(DeviceError):
    """`freeze` found that somebody can still write; nothing changed, try again later."""


class DeviceProperties(NamedTuple):
    """What `status` and `hello` say about a device. Sizes in bytes."""

    uuid: str
    name: str
    platform: str
    """"cuda", "rocm" or "simulated"."""
    granularity: int
    total_bytes: int


class Canary(NamedTuple):
    """A slab with a known pattern, by which a process finds out whether it reads what others wrote.

    The holder owns the descriptor. `seed` is what the pattern is made of.
    """

    descriptor: int
    nbytes: int
    seed: str


class Segment(NamedTuple):
    """`nbytes` from `start` in a staging buffer belong at `offset` in the slab."""

    start: int
    nbytes: int
    offset: int


class Mapping(ABC):
    """Slab memory mapped into this process.

    Never unmapped by a destructor: whoever hands out the address decides when nobody uses it.
    """

    address: int
    nbytes: int

    @abstractmethod
    def close(self) -> None:
        """Unmap and give the addresses back, suspended or not. Idempotent; waits for the device.

        Raises:
            DeviceError: the device cannot be waited for; still mapped, to be closed again.
        """

    def suspend(self) -> None:
        """Unmap, but keep the addresses: whoever touches them faults. Waits for the device.

        Nothing to do if it is suspended already.

        Raises:
            DeviceError: closed; or another mapping of this process uses the same addresses, or the
                device cannot be waited for: still mapped then.
        """
        raise DeviceError("suspend: this memory cannot be unmapped for a while")

    def resume(self, descriptor: int) -> None:
        """Map a slab of the same size at the same addresses again, read-only.

        The descriptor may be closed afterwards. It need not be of the slab that was there before.

        Raises:
            DeviceError: not suspended; or no slab of this device and size: still suspended then.
        """
        raise DeviceError(f"resume({descriptor}): this memory is not suspended")


class StagingBuffer(ABC):
    """Host memory of `PIECE_BYTES` to read a piece of a file into."""

    view: memoryview
    """Writable, format "B"."""


class SlabWriter(Closeable):
    """Fills a slab through a small ring of staging buffers. Usable from several threads at once.

    Never holds more host memory than its ring, whatever the slab's size.
    """

    @abstractmethod
    def buffer(self) -> StagingBuffer:
        """A free buffer of the ring; blocks until one is free."""

    @abstractmethod
    def submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        """Copy the segments into the slab and give the buffer back to the ring (also on error).

        May return before the bytes have arrived; they have when `close` returns. An empty sequence
        only gives the buffer back.

        Raises:
            DeviceOutOfMemory, DeviceError: the copy failed; the slab's contents are undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait until every byte has arrived and unmap the slab. Idempotent."""


class Device(ABC):
    """One device, named by its UUID.

    Attributes:
        ordinal: this process's own number for it, which is torch's as well. Never travels.
    """

    properties: DeviceProperties
    ordinal: int = 0

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes free at this moment, needing no context on a GPU."""

    @abstractmethod
    def create(self, nbytes: int) -> int:
        """A new slab of `nbytes` (a positive multiple of the granularity): its descriptor.

        The caller owns the descriptor (close-on-exec). The memory lives until the last descriptor,
        in any process, is closed and the last mapping is gone. Contents are undefined.

        Raises:
            DeviceOutOfMemory: not enough memory, also after waiting for a dead process's.
            DeviceError: anything else.
        """

    @abstractmethod
    def freeze(self, descriptor: int) -> int:
        """Make the slab immutable as far as the device can; a new descriptor for readers.

        The caller owns both descriptors afterwards.

        Raises:
            StillMappedWritable: somebody still maps it writable (where the device can tell).
        """

    @abstractmethod
    def map(
        self, descriptor: int, nbytes: int, *, writable: bool, slab: Hashable | None = None
    ) -> Mapping:
        """Map a slab; the descriptor may be closed afterwards. Read-only unless `writable`.

        Args:
            slab: what tells this slab from every other that ever was (the broker's epoch and the
                set's number): mappings of it in one process may then be one address range, which
                is unmapped with the last of them. `None`: a range of its own.

        Raises:
            DeviceError: the descriptor is not a slab of this device or not of at least `nbytes`
                (checked before mapping: a short one must never become SIGBUS).
        """

    @abstractmethod
    def read(self, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        """Copy bytes of a mapped slab to the host. Waits for the device.

        Raises:
            DeviceError: the range is not inside the mapping, or the copy failed.
        """

    @abstractmethod
    def open_writer(self, descriptor: int, nbytes: int, *, buffers: int) -> SlabWriter:
        """A writer with a ring of `buffers` staging buffers. Borrows the descriptor."""


def free_if_known(device: Device) -> int | None:
    """`free_bytes` for an error that is being told already: None if the driver fails as well."""
    try:
        return device.free_bytes()
    except DeviceError:
        return None


def check_range(mapping: Mapping, offset: int, nbytes: int, device: str) -> None:
    """Raise `DeviceError` unless the bytes are inside the mapping."""
    if offset < 0 or nbytes < 0 or offset + nbytes > mapping.nbytes:
        raise DeviceError(
            f"read on {device}: {nbytes} bytes from {offset} are not inside the mapping of "
            f"{mapping.nbytes}"
        )


def check_slab_size(nbytes: int, properties: DeviceProperties) -> None:
    """Raise `DeviceError` unless `nbytes` is a size `create` may be asked for."""
    if nbytes <= 0 or nbytes % properties.granularity:
        raise DeviceError(
            f"create({nbytes}) on {properties.uuid}: a slab is a positive multiple of "
            f"{properties.granularity} bytes"
        )
