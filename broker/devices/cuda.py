"""Slabs in GPU memory: one device of either vendor, over its driver.

Creating, exporting, freezing and asking for free memory open no context on NVIDIA devices, so the
broker costs its devices nothing but the weights. `map` and `open_writer` open one, the one that
torch uses in the process.

A GPU cannot freeze memory: engines get it read-only because they ask for it so, and whoever holds
a descriptor could ask otherwise. The broker hands a slab to readers only when its writer has
unmapped it, on its word.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Callable, Hashable

from broker.devices.base import (
    Device,
    DeviceError,
    DeviceOutOfMemory,
    DeviceProperties,
    Mapping,
    SlabWriter,
    check_range,
    check_slab_size,
)
from broker.devices.cuda_writer import RingWriter
from broker.devices.driver import Capabilities, Context, Driver

PATIENCE_SECONDS = 5.0
"""How long `create` waits for memory that a process has just stopped using: the driver returns it
when it has torn down the process's context, some time after the process has gone."""

RETRY_SECONDS = 0.05

_shared: dict[Hashable, _Mapped] = {}
"""Mappings of this process that may be shared, by device, slab, size and access."""
_shared_lock = threading.RLock()
"""Reentrant: the last tensor over a slab may die, and unmap it, in a garbage collection that starts
while this thread is mapping another."""


class CudaDevice(Device):
    """One GPU or MIG slice, as this process sees it. Asks the driver, opens no context.

    Args:
        driver: initialised.
        ordinal: the device's number in this process; torch calls it "cuda:<ordinal>".
        patience_seconds, clock, wait: how long `create` tries, and what it measures that with.

    Raises:
        DeviceError: the driver cannot describe the device or has no virtual memory management.
    """

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.properties = DeviceProperties(
            uuid=driver.uuid(ordinal),
            name=driver.name(ordinal),
            platform=driver.platform,
            granularity=driver.granularity(ordinal),
            total_bytes=driver.total_bytes(ordinal),
        )
        self.capabilities: Capabilities = driver.capabilities(ordinal)
        self._patience = patience_seconds
        self._clock = clock
        self._wait = wait

    def free_bytes(self) -> int:
        return self.driver.free_bytes(self.ordinal)

    def create(self, nbytes: int) -> int:
        check_slab_size(nbytes, self.properties)
        if nbytes > self.properties.total_bytes:
            raise self._out_of_memory(nbytes, f"create on {self.properties.uuid}")
        deadline = self._clock() + self._patience
        while True:
            try:
                return self.driver.create_slab(self.ordinal, nbytes, rdma=self.capabilities.rdma)
            except DeviceOutOfMemory as error:
                if self._clock() >= deadline:
                    raise self._out_of_memory(nbytes, str(error)) from error
            self._wait(RETRY_SECONDS)

    def _out_of_memory(self, nbytes: int, what: str) -> DeviceOutOfMemory:
        total = self.properties.total_bytes
        try:
            free = f"{self.free_bytes()} of {total} bytes are free"
        except DeviceError as unknown:
            free = f"the device has {total} bytes, how many are free is unknown ({unknown})"
        return DeviceOutOfMemory(f"{what}: {nbytes} bytes were asked for, {free}")

    def freeze(self, descriptor: int) -> int:
        """A second descriptor of the slab; a GPU has no way to take rights from the first."""
        try:
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as error:
            raise DeviceError(f"freeze on {self.properties.uuid}: {error.strerror}") from error

    def map(
        self, descriptor: int, nbytes: int, *, writable: bool, slab: Hashable | None = None
    ) -> Mapping:
        """See `Device.map`; the size must be the slab's own."""
        self._check_size(nbytes)
        key = None if slab is None else (self.properties.uuid, slab, nbytes, writable)
        with _shared_lock:
            while True:
                mapped = _shared.get(key) if key else None
                if mapped is None:
                    mapped = _Mapped(self, descriptor, nbytes, writable=writable, key=key)
                    if key:
                        _shared[key] = mapped
                mapped.users += 1
                if mapped.key == key:  # else a garbage collection has just unmapped it
                    return CudaMapping(mapped)

    def _check_size(self, nbytes: int) -> None:
        granularity, total = self.properties.granularity, self.properties.total_bytes
        if not 0 < nbytes <= total or nbytes % granularity:
            raise DeviceError(
                f"map({nbytes}) on {self.properties.uuid}: a slab of this device is a multiple of "
                f"{granularity} and at most {total} bytes"
            )

    def read(self, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        check_range(mapping, offset, nbytes, self.properties.uuid)
        target = ctypes.create_string_buffer(nbytes)
        opened = contextlib.closing(self.driver.open_context(self.ordinal))
        with opened as context, context.current():
            device = self.properties.uuid
            self.driver.call("synchronise", device=device)
            self.driver.call("copy_out", target, mapping.address + offset, nbytes, device=device)
        return target.raw

    def open_writer(self, descriptor: int, nbytes: int, *, buffers: int) -> SlabWriter:
        mapping = self.map(descriptor, nbytes, writable=True)
        try:
            return RingWriter(self.driver, self.ordinal, mapping, buffers)
        except BaseException:
            mapping.close()
            raise


class CudaMapping(Mapping):
    """A slab mapped for this process's device. See `Mapping`.

    The device cannot be waited for during the capture of a CUDA graph, nor after a fault. In a
    forked child `close` does nothing: no driver works there.
    """

    def __init__(self, mapped: _Mapped) -> None:
        self.address = mapped.address
        self.nbytes = mapped.nbytes
        self._mapped: _Mapped | None = mapped
        self._lock = threading.RLock()  # a garbage collection inside may close this very mapping
        self._pid = os.getpid()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._mapped is not None:
                self._mapped.let_go()
                self._mapped = None

    def suspend(self) -> None:
        with self._lock:
            self._usable("suspend").suspend()

    def resume(self, descriptor: int) -> None:
        with self._lock:
            self._usable("resume").resume(descriptor)

    def _usable(self, call: str) -> _Mapped:
        if self._mapped is None or os.getpid() != self._pid:
            raise DeviceError(f"{call}: the slab is not mapped in this process any more")
        return self._mapped


class _Mapped:
    """One address range, the slab behind it, and the context that keeps the device open."""

    def __init__(
        self,
        device: CudaDevice,
        descriptor: int,
        nbytes: int,
        *,
        writable: bool,
        key: Hashable | None,
    ) -> None:
        self.nbytes = nbytes
        self.users = 0  # under `_shared_lock` while the key is set
        self.key = key
        self._driver = driver = device.driver
        self._label = device.properties.uuid
        self._ordinal = ordinal = device.ordinal
        self._handle: int | None = None
        driver.check_descriptor(ordinal, descriptor, nbytes)
        with contextlib.ExitStack() as undo:
            self._context: Context = driver.open_context(ordinal)
            undo.callback(self._context.close)
            self.address = driver.reserve(ordinal, nbytes, device.properties.granularity)
            undo.callback(driver.free_address, ordinal, self.address, nbytes)
            self._map(descriptor, writable=writable)
            undo.pop_all()

    def _map(self, descriptor: int, *, writable: bool) -> None:
        """Put the slab behind the range."""
        driver, ordinal = self._driver, self._ordinal
        with contextlib.ExitStack() as undo:
            # Held until the range is unmapped: releases of AMD's runtime differ in what a mapping
            # keeps alive by itself.
            handle = driver.import_slab(ordinal, descriptor)
            undo.callback(driver.release, ordinal, handle)
            self._check_home(ordinal, handle)
            driver.map(ordinal, self.address, self.nbytes, handle)
            undo.callback(driver.unmap, ordinal, self.address, self.nbytes)
            driver.allow(ordinal, self.address, self.nbytes, writable=writable)
            undo.pop_all()
        self._handle = handle

    def _check_home(self, ordinal: int, handle: int) -> None:
        home = self._driver.home(ordinal, handle)
        if home != ordinal:
            raise DeviceError(
                f"map on {self._label}: the slab is on another device ({self._driver.label(home)})"
            )

    def suspend(self) -> None:
        """Unmap and keep the range. From now on it is shared with nobody."""
        with _shared_lock:
            if self.users > 1:
                raise DeviceError(
                    f"suspend on {self._label}: {self.users} mappings of this process share the "
                    "addresses of this slab; close the others first"
                )
            self._unlist()
        if self._handle is not None:
            self._wait()
            self._unmap()

    def resume(self, descriptor: int) -> None:
        """Put a slab behind the range again, read-only."""
        if self._handle is not None:
            raise DeviceError(f"resume on {self._label}: the slab is mapped already")
        self._driver.check_descriptor(self._ordinal, descriptor, self.nbytes)
        self._map(descriptor, writable=False)

    def let_go(self) -> None:
        """One user less; the last one waits for the device and unmaps."""
        with _shared_lock:
            self.users -= 1
            if self.users:
                return
            self._unlist()
        if self._handle is not None:
            try:
                self._wait()
            except DeviceError:
                self.users += 1  # still mapped: the device may be using it
                raise
        self._give_back()

    def _unlist(self) -> None:
        if self.key:
            del _shared[self.key]
            self.key = None

    def _wait(self) -> None:
        """Block until the device has done all that this process asked of it."""
        with self._context.current():
            self._driver.call("synchronise", device=self._label)

    def _unmap(self) -> None:
        """Take the slab away; the handle is given back also if that fails."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.ExitStack() as afterwards:
                afterwards.callback(self._driver.release, self._ordinal, handle)
                self._driver.unmap(self._ordinal, self.address, self.nbytes)

    def _give_back(self) -> None:
        """Let go of everything; addresses that cannot be unmapped stay reserved."""
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._context.close)
            self._unmap()
            self._driver.free_address(self._ordinal, self.address, self.nbytes)
