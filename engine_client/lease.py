"""One lease: slab memory mapped into this process, and its giving back. No torch."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

from broker import wire
from broker.devices.base import Device, DeviceError, Mapping
from broker.errors import InternalError
from broker.weights import Manifest, decode_manifest
from engine_client.deadline import Deadline
from engine_client.session import Session


class Lease:
    """A granted lease with its slab mapped read-only.

    Attributes:
        granted: what the broker said of the set.
        manifest: validated against the slab.
        mapping: valid until `end`.
        platform: "cuda", "rocm" or "simulated".
    """

    def __init__(
        self,
        session: Session,
        granted: wire.Granted,
        mapping: Mapping,
        manifest: Manifest,
        platform: str,
    ) -> None:
        self.granted = granted
        self.manifest = manifest
        self.mapping = mapping
        self.platform = platform
        self._session = session
        self._lock = threading.Lock()
        self._ended = False
        self._views: list[weakref.ref[ctypes.Array[ctypes.c_char]]] = []

    @property
    def ended(self) -> bool:
        return self._ended

    def end(self) -> None:
        """Unmap, then give the lease back. Idempotent; any address in the slab is invalid then."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.mapping.close()
        self._session.notify("release", wire.Release(self.granted.lease))

    def whole_slab(self) -> memoryview:
        """All bytes of the slab, read-only, as `memory`."""
        return self.memory(0, self.mapping.nbytes)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes of the slab, on devices whose memory the host can read."""
        array = (ctypes.c_char * nbytes).from_address(self.mapping.address + offset)
        self._views = [view for view in self._views if view() is not None]
        self._views.append(weakref.ref(array))
        return memoryview(array).cast("B").toreadonly()

    @property
    def has_views(self) -> bool:
        """Whether a memory view handed out is still alive."""
        return any(view() is not None for view in self._views)


def attach(session: Session, device: Device, granted: wire.Granted, deadline: Deadline) -> Lease:
    """Fetch a granted lease's descriptors, validate and map. Blocks.

    Raises:
        RequestTimeout, BrokerLost, InternalError: the broker delivered something else than the set
            it granted; nothing stays mapped.
    """
    nbytes, descriptors = session.attach(granted.lease, deadline)
    try:
        if len(descriptors) != 2 or nbytes != granted.nbytes:
            raise InternalError(
                f"the broker granted {granted.nbytes} bytes and delivered {nbytes} bytes in "
                f"{len(descriptors)} descriptors; nothing was mapped"
            )
        slab, manifest_fd = descriptors
        manifest = _read_manifest(manifest_fd, nbytes)
        try:
            mapping = device.map(slab, nbytes, writable=False)
        except DeviceError as error:
            raise InternalError(f"the weights cannot be mapped: {error}") from error
        return Lease(session, granted, mapping, manifest, device.properties.platform)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read_manifest(descriptor: int, slab_nbytes: int) -> Manifest:
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise InternalError("the broker delivered an empty manifest; nothing was mapped")
    return decode_manifest(os.pread(descriptor, size, 0), slab_nbytes)
