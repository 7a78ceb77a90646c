"""AMD's runtime: where it differs from the interface it is modelled on.

Its releases disagree with each other; what is known of that, and how this module lives with all of
them, stands at each method. No release knows contexts that cost anything to do without: a process
that has initialised the runtime has what it needs on every device.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from contextlib import AbstractContextManager
from ctypes import byref, c_char_p, c_int, c_size_t
from pathlib import Path
from typing import Any, ClassVar

from broker.devices.base import DeviceError
from broker.devices.driver import Context, Driver, restored
from broker.devices.driver_abi import Uuid
from broker.devices.libraries import SYSFS_OVERRIDE, Vendor

IMPORT_BY_VALUE_VERSION = 70_100_000
"""From HIP 7.1 on (major * 10^7 + minor * 10^5 + patch) the import call takes the descriptor's
value; before that a pointer to it. The headers do not show it and the wrong one crashes (RCCL
branches on the same version)."""


class HipDriver(Driver):
    """libamdhip64.so."""

    vendor: ClassVar[Vendor] = "amd"
    platform: ClassVar[str] = "rocm"
    symbols: ClassVar[dict[str, str]] = {
        "initialise": "hipInit",
        "version": "hipRuntimeGetVersion",
        "count": "hipGetDeviceCount",
        "name": "hipDeviceGetName",
        "uuid": "hipDeviceGetUuid",
        "pci": "hipDeviceGetPCIBusId",
        "total": "hipDeviceTotalMem",
        "attribute": "hipDeviceGetAttribute",
        "granularity": "hipMemGetAllocationGranularity",
        "create": "hipMemCreate",
        "export": "hipMemExportToShareableHandle",
        "import": "hipMemImportFromShareableHandle",
        "properties": "hipMemGetAllocationPropertiesFromHandle",
        "release": "hipMemRelease",
        "reserve": "hipMemAddressReserve",
        "free_address": "hipMemAddressFree",
        "map": "hipMemMap",
        "access": "hipMemSetAccess",
        "unmap": "hipMemUnmap",
        "memory": "hipMemGetInfo",
        "get_device": "hipGetDevice",
        "set_device": "hipSetDevice",
        "synchronise": "hipDeviceSynchronize",
        "create_stream": "hipStreamCreateWithFlags",
        "synchronise_stream": "hipStreamSynchronize",
        "destroy_stream": "hipStreamDestroy",
        "create_event": "hipEventCreateWithFlags",
        "record_event": "hipEventRecord",
        "synchronise_event": "hipEventSynchronize",
        "destroy_event": "hipEventDestroy",
        "pin": "hipHostMalloc",
        "unpin": "hipHostFree",
        "copy_in": "hipMemcpyHtoDAsync",
        "copy_out": "hipMemcpyDtoH",
    }
    # hipDeviceAttribute…: ComputeMode, Integrated, VirtualMemoryManagementSupported
    attributes: ClassVar[dict[str, int]] = {
        "compute_mode": 6,
        "integrated": 16,
        "virtual_memory": 89,
    }

    _import_by_value: bool | None = None

    def _error_text(self, status: int) -> str:
        # A failed call is also remembered for the thread, where torch would find it after its
        # next kernel launch and blame that: fetching it forgets it.
        self.library["hipGetLastError"]()
        words = []
        for symbol in ("hipGetErrorString", "hipGetErrorName"):
            function = self.library[symbol]
            function.restype = c_char_p
            words.append((function(status) or b"unknown").decode("ascii", "replace"))
        return f"{words[0]} ({words[1]}, {status})"

    def _read_uuid(self, ordinal: int) -> str:
        """ "GPU-" and the board's 16 hexadecimal digits, as rocminfo prints them.

        The runtime gives the digits themselves as the UUID's 16 bytes. Some boards have none:
        then the bus address stands in.
        """
        found = Uuid()
        self.call("uuid", byref(found), ordinal, device=self.label(ordinal))
        digits = bytes(found)
        if not any(digits) or digits.startswith(b"XX"):
            return f"GPU-{self.pci_address(ordinal)}"
        if all(digit in b"0123456789abcdefABCDEF" for digit in digits):
            return f"GPU-{digits.decode('ascii').lower()}"
        return f"GPU-{uuid.UUID(bytes=digits)}"

    def selected(self, ordinal: int) -> AbstractContextManager[None]:
        """Creating, importing and asking for the granularity act on the thread's device.

        The location in the properties is checked by the runtime and then not used (ROCm/clr,
        hip_vm.cpp).
        """
        return restored(self, ordinal)

    def _close_exported(self, exported: int, owned: int) -> None:
        """Some releases close the descriptor with the handle, others leave that to the caller.

        The memory's file tells which: a DMA buffer has an inode of its own, so a number that is
        free again or names another file was closed by the runtime.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(exported), os.fstat(owned)):
                os.close(exported)

    def _os_handle(self, descriptor: int) -> Any:
        if self._import_by_value is None:
            self._import_by_value = self.version() >= IMPORT_BY_VALUE_VERSION
        return descriptor if self._import_by_value else byref(c_int(descriptor))

    def check_descriptor(self, ordinal: int, descriptor: int, nbytes: int) -> None:
        """A DMA buffer says its size when it is sought to its end (the kernel's dma-buf.rst).

        The runtime does not compare sizes itself when it maps.
        """
        super().check_descriptor(ordinal, descriptor, nbytes)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            os.lseek(descriptor, 0, os.SEEK_SET)
        except OSError:  # a kernel that cannot tell
            return
        if size < nbytes:
            device = self.label(ordinal)
            raise DeviceError(
                f"map on {device}: the slab has {size} bytes, {nbytes} were announced"
            )

    def free_bytes(self, ordinal: int) -> int:
        """The kernel's figure for the board or the runtime's for the device, whichever is less.

        The kernel does not know partitions of a board; old runtimes count their own process only.
        """
        free, total = c_size_t(), c_size_t()
        with self.selected(ordinal):
            self.call("memory", byref(free), byref(total), device=self.label(ordinal))
        board = _board_free_bytes(self.pci_address(ordinal))
        return free.value if board is None else min(board, free.value)

    def open_context(self, ordinal: int) -> Context:
        return _SelectedDevice(self, ordinal)


class _SelectedDevice(Context):
    def __init__(self, driver: HipDriver, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = driver

    def current(self) -> AbstractContextManager[None]:
        return restored(self._driver, self.ordinal)

    def close(self) -> None:
        """Nothing was opened."""


def _board_free_bytes(pci_address: str) -> int | None:
    """Free video memory by the kernel's books; `None` where it keeps none.

    Source: the kernel's documentation of amdgpu, "mem_info_vram_total" and "mem_info_vram_used".
    """
    root = Path(os.environ.get(SYSFS_OVERRIDE) or "/sys")
    folder = root / "bus" / "pci" / "devices" / pci_address
    try:
        total = int((folder / "mem_info_vram_total").read_text())
        used = int((folder / "mem_info_vram_used").read_text())
    except (OSError, ValueError):
        return None
    return total - used
