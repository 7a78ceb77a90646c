"""NVIDIA's driver: contexts, MIG, and free memory from the management library."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import byref, c_char_p, c_void_p
from typing import ClassVar

from broker.devices.driver import Context, Driver
from broker.devices.driver_abi import Uuid
from broker.devices.libraries import Vendor
from broker.devices.nvml import Nvml


class CudaDriver(Driver):
    """libcuda.so.1. Creating and exporting memory needs no context here, only `initialise`."""

    vendor: ClassVar[Vendor] = "nvidia"
    platform: ClassVar[str] = "cuda"
    symbols: ClassVar[dict[str, str]] = {
        "initialise": "cuInit",
        "version": "cuDriverGetVersion",
        "count": "cuDeviceGetCount",
        "name": "cuDeviceGetName",
        "uuid": "cuDeviceGetUuid_v2",
        "plain_uuid": "cuDeviceGetUuid",
        "pci": "cuDeviceGetPCIBusId",
        "total": "cuDeviceTotalMem_v2",
        "attribute": "cuDeviceGetAttribute",
        "granularity": "cuMemGetAllocationGranularity",
        "create": "cuMemCreate",
        "export": "cuMemExportToShareableHandle",
        "import": "cuMemImportFromShareableHandle",
        "properties": "cuMemGetAllocationPropertiesFromHandle",
        "release": "cuMemRelease",
        "reserve": "cuMemAddressReserve",
        "free_address": "cuMemAddressFree",
        "map": "cuMemMap",
        "access": "cuMemSetAccess",
        "unmap": "cuMemUnmap",
        "retain": "cuDevicePrimaryCtxRetain",
        "release_context": "cuDevicePrimaryCtxRelease_v2",
        "push": "cuCtxPushCurrent_v2",
        "pop": "cuCtxPopCurrent_v2",
        "synchronise": "cuCtxSynchronize",
        "create_stream": "cuStreamCreate",
        "synchronise_stream": "cuStreamSynchronize",
        "destroy_stream": "cuStreamDestroy_v2",
        "create_event": "cuEventCreate",
        "record_event": "cuEventRecord",
        "synchronise_event": "cuEventSynchronize",
        "destroy_event": "cuEventDestroy_v2",
        "pin": "cuMemHostAlloc",
        "unpin": "cuMemFreeHost",
        "copy_in": "cuMemcpyHtoDAsync_v2",
        "copy_out": "cuMemcpyDtoH_v2",
    }
    # CU_DEVICE_ATTRIBUTE_…: INTEGRATED, COMPUTE_MODE, VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    # HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    attributes: ClassVar[dict[str, int]] = {
        "integrated": 18,
        "compute_mode": 20,
        "virtual_memory": 102,
        "posix_descriptors": 103,
        "rdma": 110,
    }

    _nvml: Nvml | None = None
    _nvml_lock = threading.Lock()

    def _error_text(self, status: int) -> str:
        name, text = c_char_p(), c_char_p()
        self.library["cuGetErrorName"](status, byref(name))
        self.library["cuGetErrorString"](status, byref(text))
        if name.value is None or text.value is None:
            return f"status {status}, which the driver does not know"
        return f"{text.value.decode('ascii', 'replace')} ({name.value.decode()}, {status})"

    def _read_uuid(self, ordinal: int) -> str:
        found = Uuid()
        self.call("uuid", byref(found), ordinal, device=self.label(ordinal))
        kind = "MIG" if self._is_mig_slice(ordinal, bytes(found)) else "GPU"
        return f"{kind}-{uuid.UUID(bytes=bytes(found))}"

    def _is_mig_slice(self, ordinal: int, found: bytes) -> bool:
        """Whether the UUID is a MIG slice's: the first version of the call gives the GPU's."""
        if not self.has("plain_uuid"):
            return " MIG " in self.name(ordinal)
        plain = Uuid()
        self.call("plain_uuid", byref(plain), ordinal, device=self.label(ordinal))
        return bytes(plain) != found

    def free_bytes(self, ordinal: int) -> int:
        with self._nvml_lock:
            if self._nvml is None:
                self._nvml = Nvml()
        return self._nvml.free_bytes(self.uuid(ordinal))

    def _close_exported(self, exported: int, owned: int) -> None:
        del owned  # the exported descriptor is the caller's in every release
        os.close(exported)

    def open_context(self, ordinal: int) -> Context:
        return _PrimaryContext(self, ordinal)


class _PrimaryContext(Context):
    """One reference to the device's primary context, which torch's CUDA runtime uses as well.

    The context is made with the first reference in the process and destroyed with the last.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = driver
        self._device = driver.label(ordinal)
        self._handle = c_void_p()
        driver.call("retain", byref(self._handle), ordinal, device=self._device)

    def current(self) -> AbstractContextManager[None]:
        return self._pushed()

    @contextlib.contextmanager
    def _pushed(self) -> Iterator[None]:
        self._driver.call("push", self._handle, device=self._device)
        try:
            yield
        finally:
            self._driver.call("pop", byref(c_void_p()), device=self._device)

    def close(self) -> None:
        self._driver.call("release_context", self.ordinal, device=self._device)
