"""A GPU driver's virtual memory management, as far as this project needs it, by ctypes.

NVIDIA's `cuMem…` and AMD's `hipMem…` calls have the same shapes, structures and constants, so one
class drives both; `driver_cuda` and `driver_hip` add what differs.

Calls may block as long as the driver likes. Methods may be called from any thread. Every status is
checked: a failure becomes a `DriverError` that names the call, the driver's words and the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from broker.devices import driver_abi as abi
from broker.devices.base import DeviceError, DeviceOutOfMemory
from broker.devices.driver_abi import AccessDescriptor, AllocationProperties
from broker.devices.libraries import Vendor

_ABSENT = ": cannot open shared object file: No such file or directory"  # ld.so's words


class DriverMissing(DeviceError):
    """No vendor's driver library can be loaded. `tried`: the loader's words on each."""

    def __init__(self, tried: list[str]) -> None:
        absent = [words.partition(":")[0] for words in tried if words.endswith(_ABSENT)]
        others = [words for words in tried if not words.endswith(_ABSENT)]
        found = [f"there is no {', '.join(absent)}"] if absent else []
        super().__init__("no GPU driver can be loaded: " + "; ".join(found + others))
        self.tried = tried


class DriverError(DeviceError):
    """A driver call failed.

    Attributes:
        call: the driver's function.
        code: the driver's status; -1 if the function does not exist in this driver.
    """

    def __init__(self, call: str, code: int, text: str, device: str) -> None:
        super().__init__(f"{call}{f' on {device}' if device else ''}: {text}")
        self.call = call
        self.code = code
        self.text = text
        self.device = device


class DriverOutOfMemory(DriverError, DeviceOutOfMemory):
    """A driver call failed for want of device memory, address space or pinned host memory."""


@dataclass(frozen=True)
class Capabilities:
    """What decides whether a device can share its memory (DESIGN: the platform check).

    Attributes:
        virtual_memory: the driver's virtual memory management works on it.
        posix_descriptors: allocations can be exported as descriptors. AMD's runtime has no such
            attribute; it counts as true there and the round trip decides.
        compute_mode: one of the `COMPUTE_MODE_…` constants of `driver_abi`.
        integrated: it shares the host's memory (Tegra, APUs).
        rdma: allocations can be made fit for GPUDirect RDMA, which cannot be added later.
    """

    virtual_memory: bool
    posix_descriptors: bool
    compute_mode: int
    integrated: bool
    rdma: bool


class Context(ABC):
    """A device opened for work by this process, until `close`. Made by `Driver.open_context`."""

    ordinal: int

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Make it the calling thread's current device; the previous one comes back afterwards."""

    @abstractmethod
    def close(self) -> None: ...


class Driver(ABC):
    """One vendor's driver library, loaded into this process.

    Nothing is asked of the driver before `initialise`. Devices are given by this process's own
    ordinals, which count visible devices as torch does.
    """

    vendor: ClassVar[Vendor]
    platform: ClassVar[str]
    symbols: ClassVar[dict[str, str]]
    attributes: ClassVar[dict[str, int]]

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.path: str = library._name  # noqa: SLF001 - ctypes has no other word for it
        self._functions: dict[str, Any] = {}
        self._uuids: dict[int, str] = {}

    # --- calling ----------------------------------------------------------------------------

    def call(self, operation: str, *arguments: Any, device: str = "") -> None:
        """Call the driver's function for an operation of `PROTOTYPES`.

        Raises:
            DriverOutOfMemory, DriverError: it failed; nothing else was done.
        """
        status = self._function(operation)(*arguments)
        if status != abi.SUCCESS:
            raise self._failure(operation, status, device)

    def _function(self, operation: str) -> Any:
        function = self._functions.get(operation)
        if function is None:
            symbol = self.symbols[operation]
            try:
                function = self.library[symbol]
            except AttributeError:
                text = f"{self.path} has no such function; the driver is too old"
                raise DriverError(symbol, -1, text, "") from None
            function.argtypes = abi.PROTOTYPES[operation]
            function.restype = c_int
            self._functions[operation] = function
        return function

    def has(self, operation: str) -> bool:
        """Whether this driver has the function at all."""
        return hasattr(self.library, self.symbols[operation])

    def _failure(self, operation: str, status: int, device: str) -> DriverError:
        kind = DriverOutOfMemory if status == abi.OUT_OF_MEMORY else DriverError
        return kind(self.symbols[operation], status, self._error_text(status), device)

    @abstractmethod
    def _error_text(self, status: int) -> str:
        """The driver's own words and name for a status."""

    # --- devices ----------------------------------------------------------------------------

    def initialise(self) -> None:
        """Initialise the driver for this process; opens no context. May take seconds.

        Raises:
            DriverError: with code `NO_DEVICE` also where the environment hides every device.
        """
        self.call("initialise", 0)

    def version(self) -> int:
        """The driver's version as it encodes it itself (CUDA 12.8: 12080; HIP 7.1: 70100000…)."""
        value = c_int()
        self.call("version", byref(value))
        return value.value

    def device_count(self) -> int:
        """How many devices this process can see; 0 where the driver says that there is none."""
        value = c_int()
        try:
            self.call("count", byref(value))
        except DriverError as error:
            if error.code == abi.NO_DEVICE:
                return 0
            raise
        return value.value

    def uuid(self, ordinal: int) -> str:
        """The device's UUID, e.g. "GPU-…" or "MIG-…", the same in every process."""
        if ordinal not in self._uuids:
            self._uuids[ordinal] = self._read_uuid(ordinal)
        return self._uuids[ordinal]

    @abstractmethod
    def _read_uuid(self, ordinal: int) -> str: ...

    def label(self, ordinal: int) -> str:
        """How errors call the device."""
        return self._uuids.get(ordinal, f"device {ordinal}")

    def name(self, ordinal: int) -> str:
        """The device's product name."""
        text = ctypes.create_string_buffer(256)
        self.call("name", text, len(text), ordinal, device=self.label(ordinal))
        return text.value.decode("utf-8", "replace")

    def pci_address(self, ordinal: int) -> str:
        """Where the device sits on the bus, e.g. "0000:03:00.0"."""
        text = ctypes.create_string_buffer(32)
        self.call("pci", text, len(text), ordinal, device=self.label(ordinal))
        return text.value.decode("ascii", "replace").lower()

    def total_bytes(self, ordinal: int) -> int:
        value = c_size_t()
        self.call("total", byref(value), ordinal, device=self.label(ordinal))
        return value.value

    def capabilities(self, ordinal: int) -> Capabilities:
        """What the driver says that the device can do; it is known to promise too much."""
        return Capabilities(
            virtual_memory=bool(self._attribute(ordinal, "virtual_memory", default=0)),
            posix_descriptors=bool(self._attribute(ordinal, "posix_descriptors", default=1)),
            compute_mode=self._attribute(ordinal, "compute_mode", default=abi.COMPUTE_MODE_DEFAULT),
            integrated=bool(self._attribute(ordinal, "integrated", default=0)),
            rdma=bool(self._attribute(ordinal, "rdma", default=0)),
        )

    def _attribute(self, ordinal: int, name: str, default: int) -> int:
        """An attribute's value; `default` where the vendor has none of that name.

        A driver that is older than the attribute calls it an invalid value: then it is 0.
        """
        number = self.attributes.get(name)
        if number is None:
            return default
        value = c_int()
        try:
            self.call("attribute", byref(value), number, ordinal, device=self.label(ordinal))
        except DriverError as error:
            if error.code == abi.INVALID_VALUE:
                return 0
            raise
        return value.value

    @abstractmethod
    def free_bytes(self, ordinal: int) -> int:
        """Bytes free on the device at this moment, whoever uses the rest. Opens no context."""

    # --- physical memory --------------------------------------------------------------------

    def granularity(self, ordinal: int) -> int:
        """Slabs are multiples of this many bytes (the size the driver maps best, often 2 MiB)."""
        value = c_size_t()
        properties = _allocation(ordinal, rdma=False)
        with self.selected(ordinal):
            self.call(
                "granularity",
                byref(value),
                byref(properties),
                abi.GRANULARITY_RECOMMENDED,
                device=self.label(ordinal),
            )
        return value.value

    def selected(self, ordinal: int) -> AbstractContextManager[None]:
        """Make it the thread's device where the vendor's memory calls act on the current one."""
        del ordinal
        return contextlib.nullcontext()

    def create_slab(self, ordinal: int, nbytes: int, *, rdma: bool) -> int:
        """Allocate device memory and export it: a descriptor that alone keeps it alive.

        The caller owns the descriptor (close-on-exec). No context is opened where the vendor knows
        such a thing.

        Raises:
            DriverOutOfMemory, DriverError: nothing was allocated.
        """
        device = self.label(ordinal)
        handle, exported = c_uint64(), c_int(-1)
        properties = _allocation(ordinal, rdma=rdma)
        with self.selected(ordinal):
            self.call("create", byref(handle), nbytes, byref(properties), 0, device=device)
            with contextlib.ExitStack() as afterwards, contextlib.ExitStack() as first:
                # The kernel keeps the memory for the descriptor; the handle has then served.
                first.callback(self.release, ordinal, handle.value)
                kind = abi.HANDLE_POSIX_DESCRIPTOR
                self.call("export", byref(exported), handle, kind, 0, device=device)
                owned = afterwards.enter_context(_kept(_duplicated(exported.value, device)))
                afterwards.callback(self._close_exported, exported.value, owned)
        return owned

    @abstractmethod
    def _close_exported(self, exported: int, owned: int) -> None:
        """Close the driver's descriptor, of which `owned` is a duplicate, if it is ours to close.

        Called when the allocation's handle has been released.
        """

    def import_slab(self, ordinal: int, descriptor: int) -> int:
        """A handle for a slab's memory; the descriptor stays the caller's."""
        handle = c_uint64()
        with self.selected(ordinal):
            self.call(
                "import",
                byref(handle),
                self._os_handle(descriptor),
                abi.HANDLE_POSIX_DESCRIPTOR,
                device=self.label(ordinal),
            )
        return handle.value

    def _os_handle(self, descriptor: int) -> Any:
        """The descriptor in the form that the import call takes."""
        return descriptor

    def check_descriptor(self, ordinal: int, descriptor: int, nbytes: int) -> None:
        """Raise `DeviceError` if the descriptor itself shows that it is no slab of `nbytes`."""
        try:
            fcntl.fcntl(descriptor, fcntl.F_GETFD)
        except (OSError, ValueError) as error:  # ValueError: negative
            sentence = f"map on {self.label(ordinal)}: the descriptor is not a slab ({error})"
            raise DeviceError(sentence) from error
        del nbytes

    def home(self, ordinal: int, handle: int) -> int:
        """The ordinal of the device that holds the memory of a slab imported for `ordinal`."""
        properties = AllocationProperties()
        self.call("properties", byref(properties), handle, device=self.label(ordinal))
        return int(properties.location_id)

    def release(self, ordinal: int, handle: int) -> None:
        self.call("release", handle, device=self.label(ordinal))

    # --- addresses --------------------------------------------------------------------------

    def reserve(self, ordinal: int, nbytes: int, alignment: int) -> int:
        """A range of device addresses with nothing behind it."""
        address = c_uint64()
        self.call("reserve", byref(address), nbytes, alignment, 0, 0, device=self.label(ordinal))
        return address.value

    def free_address(self, ordinal: int, address: int, nbytes: int) -> None:
        self.call("free_address", address, nbytes, device=self.label(ordinal))

    def map(self, ordinal: int, address: int, nbytes: int, handle: int) -> None:
        """Put a slab's memory behind a reserved range; not accessible yet."""
        self.call("map", address, nbytes, 0, handle, 0, device=self.label(ordinal))

    def allow(self, ordinal: int, address: int, nbytes: int, *, writable: bool) -> None:
        """Let the device read, or read and write, a mapped range."""
        flags = abi.ACCESS_READ_WRITE if writable else abi.ACCESS_READ
        access = AccessDescriptor(abi.LOCATION_DEVICE, ordinal, flags)
        self.call("access", address, nbytes, byref(access), 1, device=self.label(ordinal))

    def unmap(self, ordinal: int, address: int, nbytes: int) -> None:
        self.call("unmap", address, nbytes, device=self.label(ordinal))

    # --- contexts ---------------------------------------------------------------------------

    @abstractmethod
    def open_context(self, ordinal: int) -> Context:
        """Open the device for work, sharing the context that torch uses in this process."""


def _allocation(ordinal: int, *, rdma: bool) -> AllocationProperties:
    return AllocationProperties(
        type=abi.ALLOCATION_PINNED,
        handle_types=abi.HANDLE_POSIX_DESCRIPTOR,
        location_type=abi.LOCATION_DEVICE,
        location_id=ordinal,
        rdma_capable=int(rdma),
    )


def _duplicated(exported: int, device: str) -> int:
    """A close-on-exec duplicate above the standard streams (AMD's runtime refuses descriptor 0)."""
    try:
        return fcntl.fcntl(exported, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(exported)
        raise DeviceError(f"create on {device}: the descriptor cannot be kept ({error})") from error


@contextlib.contextmanager
def _kept(descriptor: int) -> Iterator[int]:
    """The descriptor, which stays open unless the block fails."""
    try:
        yield descriptor
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def restored(driver: Driver, ordinal: int) -> Iterator[None]:
    """Make `ordinal` the thread's device and put the previous one back (AMD's way)."""
    previous = c_int()
    driver.call("get_device", byref(previous))
    driver.call("set_device", ordinal, device=driver.label(ordinal))
    try:
        yield
    finally:
        driver.call("set_device", previous)
