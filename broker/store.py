"""Custody of descriptors: each set's slab and manifest. The one place that keeps memory alive.

Kept behind this small interface so that it can live in a process of its own one day.
"""

from __future__ import annotations

import fcntl
import os
import threading

from broker.amounts import human
from broker.devices.base import (
    Device,
    DeviceError,
    DeviceOutOfDescriptors,
    DeviceOutOfMemory,
    StillMappedWritable,
    free_if_known,
)
from broker.errors import BadRequest, BrokerError, Busy, InternalError, OverBudget
from broker.limits import DEFAULTS, Limits, descriptor_limit

_SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Store:
    """Descriptors by set id. Each method may block; calls for one set must come one at a time."""

    def __init__(self, devices: dict[str, Device]) -> None:
        self._devices = devices
        self._slabs: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._manifests: dict[int, int] = {}
        self._lock = threading.Lock()

    def create(self, set_id: int, device: str, nbytes: int, manifest: int) -> None:
        """Create the set's slab; takes the manifest's descriptor over, also on error.

        Raises:
            OverBudget: the device has not got the memory.
            Busy: no descriptor is left.
            InternalError: the device failed.
        """
        with self._lock:
            self._manifests[set_id] = manifest
        try:
            slab = self._devices[device].create(nbytes)
        except DeviceOutOfMemory as error:
            raise OverBudget(
                f"the broker's limit allows {human(nbytes)} more on device {device}, which has not "
                f"got them: {error}",
                requested=nbytes,
                free=free_if_known(self._devices[device]),
                device=device,
            ) from error
        except DeviceOutOfDescriptors as error:
            raise _no_descriptor(error) from error
        except DeviceError as error:
            raise InternalError(f"no memory for the weights: {error}") from error
        with self._lock:
            self._slabs[set_id] = slab

    def freeze(self, set_id: int, device: str) -> None:
        """Make the slab immutable.

        Raises:
            StillMappedWritable: its writer has not let go yet; nothing has changed.
            Busy: no descriptor is left.
            InternalError: the device failed, or the set was freed meanwhile.
        """
        with self._lock:
            slab = self._slabs.get(set_id)
        if slab is None:
            raise InternalError(f"set {set_id} has no slab to be sealed")
        try:
            reader = self._devices[device].freeze(slab)
        except StillMappedWritable:
            raise
        except DeviceOutOfDescriptors as error:
            raise _no_descriptor(error) from error
        except DeviceError as error:
            raise InternalError(f"the slab cannot be sealed: {error}") from error
        with self._lock:
            self._readers[set_id] = reader
            del self._slabs[set_id]
        os.close(slab)

    def adopt(self, set_id: int, reader: int, manifest: int) -> None:
        """Take over a sealed set's descriptors."""
        self._readers[set_id], self._manifests[set_id] = reader, manifest

    def free(self, set_id: int) -> None:
        """Close everything of this set. The memory goes with the last mapping. Idempotent."""
        for table in (self._slabs, self._readers, self._manifests):
            with self._lock:
                descriptor = table.pop(set_id, None)
            if descriptor is not None:
                os.close(descriptor)

    def for_writer(self, set_id: int) -> list[int]:
        """Borrowed: the slab, to be sent at once."""
        return [self._slabs[set_id]]

    def for_reader(self, set_id: int) -> list[int]:
        """Borrowed: slab and manifest, to be sent at once."""
        return [self._readers[set_id], self._manifests[set_id]]

    def close(self) -> None:
        for set_id in {*self._slabs, *self._readers, *self._manifests}:
            self.free(set_id)


def _no_descriptor(error: DeviceError) -> Busy:
    most = descriptor_limit()
    return Busy(
        f"the broker has no descriptor left for the weights: it may have {most} open ({error}); "
        "start it with a higher ulimit -n",
        limit="RLIMIT_NOFILE",
        value=most,
    )


def check_manifest(descriptor: int, limits: Limits = DEFAULTS) -> None:
    """Raise `BadRequest` unless the descriptor is a memfd that nobody can change any more."""
    problem: BrokerError | None = None
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise BadRequest(f"reserve: the manifest is not a sealed memfd ({error})") from error
    if seals & _SEALED != _SEALED:
        problem = BadRequest("reserve: the manifest is not a sealed memfd (seals are missing)")
    elif not 0 < size <= limits.manifest_bytes:
        problem = BadRequest(
            f"reserve: the manifest has {size} bytes {limits.reached('manifest_bytes')}",
            limit="manifest_bytes",
        )
    if problem is not None:
        raise problem
