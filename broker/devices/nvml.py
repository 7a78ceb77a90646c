"""Free memory of NVIDIA devices from the management library (NVML), which needs no context.

Called directly: two functions of a stable interface are less than a dependency. Source: nvml.h.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_uint64, c_void_p
from typing import ClassVar

from broker.devices.base import DeviceError
from broker.devices.libraries import NVML_LIBRARIES, NVML_OVERRIDE, load_first


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_: ClassVar = [("total", c_uint64), ("free", c_uint64), ("used", c_uint64)]


class Nvml:
    """The management library, initialised for as long as the process lives.

    Its own device indices ignore CUDA_VISIBLE_DEVICES, so devices are named by UUID, MIG slices
    too.

    Raises:
        DeviceError: it cannot be loaded (in containers it comes with the driver capability
            "utility") or does not initialise.
    """

    def __init__(self) -> None:
        override = os.environ.get(NVML_OVERRIDE)
        library, failures = load_first((override,) if override else NVML_LIBRARIES)
        if library is None:
            raise DeviceError(
                "the free memory of NVIDIA devices cannot be told: "
                f"{'; '.join(failures)}; in a container add the driver capability utility "
                "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
        self._library = library
        library.nvmlErrorString.restype = c_char_p
        library.nvmlDeviceGetHandleByUUID.argtypes = [c_char_p, POINTER(c_void_p)]
        library.nvmlDeviceGetMemoryInfo.argtypes = [c_void_p, POINTER(_Memory)]
        self._check("nvmlInit_v2", library.nvmlInit_v2(), "")

    def free_bytes(self, uuid: str) -> int:
        """Bytes free on the device at this moment, whoever uses the rest.

        Raises:
            DeviceError: NVML does not know the device or cannot tell.
        """
        handle, memory = c_void_p(), _Memory()
        status = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), byref(handle))
        self._check("nvmlDeviceGetHandleByUUID", status, uuid)
        status = self._library.nvmlDeviceGetMemoryInfo(handle, byref(memory))
        self._check("nvmlDeviceGetMemoryInfo", status, uuid)
        return int(memory.free)

    def _check(self, call: str, status: int, uuid: str) -> None:
        if status:
            text = (self._library.nvmlErrorString(c_int(status)) or b"unknown").decode()
            raise DeviceError(f"{call}{f' on {uuid}' if uuid else ''}: {text} ({status})")
