"""Storages over a slab, one a tensor, made through DLPack; and the moment the last one has died.

DLPack (dmlc/dlpack, `dlpack.h`) is the protocol by which array libraries hand each other memory: a
struct with address, device, dtype, shape and strides, and a `deleter` that the consumer calls when
its storage dies. That call is what keeps the slab mapped exactly as long as anything can reach it,
also through a view whose tensor object is long gone. A hundred thousand structs differ only in the
address, so they are written a group at a time; torch then makes a tensor from each in 1.2 us, shape
and strides included (`frombuffer` and `as_strided_`: 2.5 us). The same path serves host and GPU.

Imports no torch: the consumer's import function is an argument.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar, TypeVar

from broker.devices.base import Mapping
from broker.errors import UsageError

T = TypeVar("T")

DEVICE_TYPES = {"simulated": 1, "cuda": 2, "rocm": 10}
"""Our platforms as DLDeviceType: kDLCPU, kDLCUDA, kDLROCM."""

DTYPES: dict[str, tuple[int, int, int]] = {
    "bool": (6, 8, 1),
    "uint8": (1, 8, 1),
    "int8": (0, 8, 1),
    "uint16": (1, 16, 1),
    "int16": (0, 16, 1),
    "uint32": (1, 32, 1),
    "int32": (0, 32, 1),
    "uint64": (1, 64, 1),
    "int64": (0, 64, 1),
    "float16": (2, 16, 1),
    "bfloat16": (4, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "complex32": (5, 32, 1),
    "complex64": (5, 64, 1),
    "complex128": (5, 128, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}
"""DLDataType (code, bits, lanes) of each dtype of a slab. Which ones a consumer takes is its own
matter (older torch knows no 8-bit floats): ask with `accepts`."""

# DLManagedTensor: data, device type, device id, ndim, dtype code, bits, lanes, shape, strides,
# byte_offset, manager_ctx, deleter.
_LAYOUT = struct.Struct("@QiiiBBHQQQQQ")
_WORDS = _LAYOUT.size // 8
_DELETER_WORD = 7
_NAME = b"dltensor"  # the capsule keeps this pointer, so the bytes live as long as the module

_capsule: Callable[..., object] = ctypes.pythonapi.PyCapsule_New
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class SlabStorages:
    """Every storage made over one mapped slab. Owns the mapping: unmaps it after the last has died.

    Usable from several threads. A forked child can make none (the mapping is not inherited), and
    what dies there unmaps nothing.

    Attributes:
        address, nbytes: where the slab is mapped.
    """

    def __init__(
        self,
        mapping: Mapping,
        capacity: int,
        device: tuple[int, int],
        on_last_release: Callable[[], None] | None = None,
    ) -> None:
        """Take the mapping over.

        Args:
            mapping: closed by this object, and by nobody else.
            capacity: how many storages will be described.
            device: DLDeviceType and device index.
            on_last_release: called once, after `close` was called, every storage has died and the
                mapping is closed. Runs in whatever thread let go last, possibly inside a garbage
                collection: it must be short and must not wait for another thread.
        """
        self.address = mapping.address
        self.nbytes = mapping.nbytes
        self._mapping = mapping
        self._device = device
        self._on_last_release = on_last_release
        self._capacity = capacity
        self._described = 0
        # From malloc, never from Python: torch reads `deleter` here when a storage dies, which may
        # be after the interpreter has taken its own objects apart.
        self._block: int = _libc.malloc(max(capacity, 1) * _LAYOUT.size)
        self._words = _words_at(self._block, max(capacity, 1) * _WORDS)
        self._arrays: list[Any] = []
        # Births and deaths as struct addresses. Deaths are appended by the deleter, which may run
        # in the middle of anything, so it takes no lock: appending to a list is atomic.
        self._born: list[int] = []
        self._dead: list[int] = []
        self._closed = False
        self._finished = threading.Lock()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._deleter = _Deleter.for_slab(self)
        _alive.add(self)

    def describe(
        self,
        dtype: tuple[int, int, int],
        shape: Sequence[int],
        stride: Sequence[int],
        offsets: Sequence[int],
    ) -> range:
        """Describe storages of equal dtype, shape and stride at these byte offsets; their numbers.

        Args:
            dtype: as in `DTYPES`.
            shape, stride: in elements. A storage is as large as its tensor's extent.
        """
        first, count = self._described, len(offsets)
        if first + count > self._capacity:
            raise ValueError(f"{first + count} storages described, room for {self._capacity}")
        self._described += count
        # One array for both: their addresses are in every struct of the group.
        dims = array.array("q", [*shape, *stride, 0])
        self._arrays.append(dims)
        at = dims.buffer_info()[0]
        deleter = 0 if _exiting else self._deleter.address
        template = _LAYOUT.pack(
            0, *self._device, len(shape), *dtype, at, at + 8 * len(shape), 0, 0, deleter
        )
        rows = self._words[first * _WORDS : (first + count) * _WORDS]
        rows[:] = memoryview(template * count).cast("Q")
        base = self.address
        rows[::_WORDS] = memoryview(array.array("Q", [base + offset for offset in offsets]))
        return range(first, first + count)

    def make(self, numbers: Iterable[int], import_capsule: Callable[[Any], T]) -> list[T]:
        """A new storage for each number, as whatever the consumer's import function makes of it.

        Two storages made from the same number are different storages of the same bytes.

        Raises:
            UsageError: closed, or in a forked child.
        """
        pointers = [self._block + number * _LAYOUT.size for number in numbers]
        made: list[T] = []
        with self._lock:
            self._check_usable()
            self._born += pointers
            try:
                made.extend(map(import_capsule, map(_capsule, pointers, repeat(_NAME), repeat(0))))
            except BaseException:
                # A capsule that was not consumed has no deleter to tell of its death.
                self._dead += pointers[len(made) :]
                raise
        return made

    def make_one(self, number: int, import_capsule: Callable[[Any], T]) -> T:
        """As `make`, for one storage at half its cost."""
        pointer = self._block + number * _LAYOUT.size
        with self._lock:
            self._check_usable()
            self._born.append(pointer)
            try:
                return import_capsule(_capsule(pointer, _NAME, None))
            except BaseException:
                self._dead.append(pointer)
                raise

    def live_count(self) -> int:
        """Storages that have not died. Exact unless another thread makes or drops some now."""
        return len(self._born) - len(self._dead)

    def live_numbers(self) -> list[int]:
        """The numbers of the storages that have not died, in order, each once."""
        alive = Counter(self._born) - Counter(self._dead)
        return sorted((pointer - self._block) // _LAYOUT.size for pointer in alive)

    def close(self) -> None:
        """Make no more storages; unmap when the last has died, which may be now. Idempotent."""
        with self._lock:
            self._closed = True
        self._finish_if_dead()

    def _check_usable(self) -> None:
        if len(self._dead) > 2 * self._capacity + 4096:
            self._forget_the_dead()
        if self._closed:
            raise UsageError("these weights have been released: acquire them again")
        if os.getpid() != self._pid:
            raise UsageError(
                "these weights were mapped before a fork and are not mapped in this child process: "
                "acquire them in the child"
            )

    def _forget_the_dead(self) -> None:
        gone = len(self._dead)
        alive = Counter(self._born) - Counter(self._dead[:gone])
        self._born = list(alive.elements())
        del self._dead[:gone]

    def count_death(self, pointer: int) -> None:
        """For the deleter alone: the storage made from the struct at this address has died."""
        self._dead.append(pointer)
        if self._closed:
            self._finish_if_dead()

    def _finish_if_dead(self) -> None:
        # Whoever comes last sees both: `close` sets the flag before it counts, a death is counted
        # before the flag is read. The lock is a flag that only one of them can raise.
        if len(self._dead) == len(self._born) and self._finished.acquire(blocking=False):
            self._finish()

    def _finish(self) -> None:
        _alive.discard(self)
        self._deleter.slab = None
        _Deleter.spare.append(self._deleter)
        self._words.release()
        _libc.free(self._block)
        if os.getpid() != self._pid:
            return  # never mapped here: the address range may be somebody else's by now
        self._mapping.close()
        if self._on_last_release is not None:
            self._on_last_release()

    def _silence(self) -> None:
        """Let the storages outlive the interpreter: their deaths call nothing any more."""
        used = self._words[: self._described * _WORDS]
        used[_DELETER_WORD::_WORDS] = memoryview(array.array("Q", [0]) * self._described)


def is_shared_address(address: int) -> bool:
    """Whether a slab that is still mapped (or released, with storages alive) lies there."""
    return any(slab.address <= address < slab.address + slab.nbytes for slab in _slabs())


def any_shared() -> bool:
    """Whether this process has any slab mapped."""
    return bool(_alive)


def accepts(import_capsule: Callable[[Any], T], dtype: str, is_right: Callable[[T], bool]) -> bool:
    """Whether the consumer takes a dtype, and what it makes of one element of it is right."""
    memory = (ctypes.c_char * (16 + _LAYOUT.size))()
    dims = array.array("q", [1, 1])
    at, data = dims.buffer_info()[0], ctypes.addressof(memory)
    _LAYOUT.pack_into(memory, 16, data, 1, 0, 1, *DTYPES[dtype], at, at + 8, 0, 0, 0)
    try:
        return is_right(import_capsule(_capsule(data + 16, _NAME, None)))
    except (BufferError, RuntimeError, ValueError):
        return False


def _words_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint64 * count).from_address(address)).cast("B").cast("Q")


def _slabs() -> list[SlabStorages]:
    return list(_alive)


class _Deleter:
    """A C function for the structs of one slab.

    Never freed but used again by a later slab: the last storage's death ends its slab from within
    the call.
    """

    spare: ClassVar[list[_Deleter]] = []

    def __init__(self) -> None:
        self.slab: SlabStorages | None = None
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._call)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _call(self, pointer: int) -> None:
        if self.slab is not None:
            self.slab.count_death(pointer)

    @classmethod
    def for_slab(cls, slab: SlabStorages) -> _Deleter:
        try:
            deleter = cls.spare.pop()
        except IndexError:
            deleter = cls()
        deleter.slab = slab
        return deleter


_alive: set[SlabStorages] = set()
_exiting = False


def _silence_all() -> None:
    # A storage held by a module or by C++ dies after the interpreter has dropped the deleters; the
    # process is about to give the mapping back in any case.
    global _exiting
    _exiting = True
    for slab in _slabs():
        slab._silence()  # noqa: SLF001 - part of this module


atexit.register(_silence_all)
