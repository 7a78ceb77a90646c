"""Storages over a slab, one a tensor, and the moment the last one has died.

One tensor spans the slab; what it holds on to is an object whose finaliser unmaps. Every further
storage is made through DLPack (dmlc/dlpack, `dlpack.h`), by which array libraries hand each other
memory: export the spanning tensor, put another address, dtype, shape and stride into the exported
struct, import it again. torch then has a storage of exactly that size, which it releases by
releasing the spanning tensor. So the slab stays mapped as long as anything can reach it, also
through a view whose tensor object is long gone, and no code of ours runs when a storage dies: a
deleter written in Python would run in the middle of an exception's unwinding and lose it.

Ten thousand structs differ only in their addresses, so they are written a group at a time. Makes a
tensor with shape and strides in 60 % of the time of `frombuffer` and `as_strided_`, and works for
memory of a GPU, for which there is nothing like `frombuffer`.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from broker.devices.base import Mapping
from broker.errors import InternalError, UsageError

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
"""DLDataType (code, bits, lanes) of each dtype of a slab; `imports` says which ones torch takes."""

# DLTensor: data, device (two words of 32 bits), ndim, dtype code, bits, lanes, shape, strides,
# byte_offset. What follows it in a DLManagedTensor is torch's own and stays untouched.
_DL_TENSOR = struct.Struct("@QQiBBHQQQ")
_WORDS = _DL_TENSOR.size // 8
_DEVICE_OFFSET = 8
_NAME = b"dltensor"

_export = torch._C._to_dlpack  # noqa: SLF001 - this is utils.dlpack.to_dlpack
_import = torch._C._from_dlpack  # noqa: SLF001 - utils.dlpack.from_dlpack adds a third to its cost

# PyDLL: these take a few nanoseconds each and need not let go of the GIL.
_library = ctypes.PyDLL(None)
_pointer: Callable[..., int] = _library.PyCapsule_GetPointer
_library.PyCapsule_GetPointer.restype = ctypes.c_void_p
_library.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_copy: Callable[..., None] = _library.memmove
_library.memmove.restype = None
_library.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_ROW = ctypes.c_size_t(_DL_TENSOR.size)


class SlabStorages:
    """Every storage made over one mapped slab. Owns the mapping: unmaps it after the last has died.

    Usable from several threads. A forked child can make none (the mapping is not inherited), and
    what dies there unmaps nothing.

    Attributes:
        address, nbytes: where the slab is mapped.
        device: as torch names it.
    """

    def __init__(
        self,
        mapping: Mapping,
        device: torch.device,
        on_last_release: Callable[[], None] | None = None,
    ) -> None:
        """Take the mapping over.

        Args:
            mapping: closed by this object, and by nobody else.
            device: the CPU for host memory.
            on_last_release: called once, after `close` was called, every storage has died and the
                mapping is closed. Runs in whatever thread let go last, possibly inside a garbage
                collection: it must be short and must not wait for another thread. Not at the
                interpreter's exit, which gives the mapping back in any case.
        """
        self.address = mapping.address
        self.nbytes = mapping.nbytes
        self.device = device
        self._pid = os.getpid()
        owner, whole = _spanning(mapping, device)
        self._whole: Tensor | None = whole
        self._uses_of_none = _uses(whole)
        self._device_word = _device_word(whole)
        self._rows = array.array("Q")
        self._dims: list[array.array[int]] = []
        self._key = next(_keys)
        _mapped[self._key] = _Slab(self.address, self.nbytes, weakref.ref(self))
        unmap = weakref.finalize(owner, _unmap, self._key, mapping, on_last_release, self._pid)
        unmap.atexit = False

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
        first, count = len(self._rows) // _WORDS, len(offsets)
        # One array for both: their addresses are in every struct of the group.
        dims = array.array("q", [*shape, *stride, 0])
        self._dims.append(dims)
        at = dims.buffer_info()[0]
        row = _DL_TENSOR.pack(0, self._device_word, len(shape), *dtype, at, at + 8 * len(shape), 0)
        rows = array.array("Q", row * count)
        rows[::_WORDS] = array.array("Q", [self.address + offset for offset in offsets])
        self._rows += rows
        return range(first, first + count)

    def make(self, numbers: Sequence[int]) -> list[Tensor]:
        """For each number a new storage, as the one tensor over it.

        Two storages made from the same number are different storages of the same bytes.

        Raises:
            UsageError: closed, or in a forked child.
        """
        capsules: list[Any] = list(map(_export, repeat(self._exportable(), len(numbers))))
        at, size = self._rows.buffer_info()[0], _DL_TENSOR.size
        described = [at + size * number for number in numbers]
        copies = map(_copy, map(_pointer, capsules, repeat(_NAME)), described, repeat(_ROW))
        deque(copies, maxlen=0)
        return list(map(_import, capsules))

    def make_one(self, number: int) -> Tensor:
        """As `make`, for one."""
        capsule: Any = _export(self._exportable())
        described = self._rows.buffer_info()[0] + _DL_TENSOR.size * number
        _copy(_pointer(capsule, _NAME), described, _ROW)
        tensor: Tensor = _import(capsule)
        return tensor

    def whole(self) -> Tensor:
        """The slab as one tensor of bytes. Not counted as a storage, but keeps the slab mapped.

        Raises:
            UsageError: closed, or in a forked child.
        """
        return self._exportable()

    def live_count(self) -> int:
        """Storages that have not died; unknown, and given as 0, once closed."""
        whole = self._whole
        return 0 if whole is None else _uses(whole) - self._uses_of_none

    def close(self) -> None:
        """Make no more storages; unmap when the last has died, which may be now. Idempotent."""
        self._whole = None

    @property
    def is_closed(self) -> bool:
        return self._whole is None

    @property
    def is_mapped(self) -> bool:
        """Until it was closed and the last storage has died."""
        return self._key in _mapped

    def _exportable(self) -> Tensor:
        whole = self._whole  # once: a handler may close this
        if whole is None:
            raise UsageError("these weights have been released: acquire them again")
        if os.getpid() != self._pid:
            raise UsageError(
                "these weights were mapped before a fork and are not mapped in this child process: "
                "acquire them in the child"
            )
        return whole


def torch_device(platform: str, index: int = 0) -> torch.device:
    """What torch calls a device of ours.

    Raises:
        UsageError: this client does not know the platform.
    """
    if platform == "simulated":
        return torch.device("cpu")
    if platform in ("cuda", "rocm"):
        return torch.device("cuda", index)  # a ROCm build of torch calls its devices so, too
    raise UsageError(f"this client cannot make tensors on the platform {platform!r}")


def is_shared_address(address: int) -> bool:
    """Whether a slab that is still mapped (or released, with storages alive) lies there."""
    slabs = list(_mapped.values())
    return any(slab.start <= address < slab.start + slab.nbytes for slab in slabs)


def any_storage_lives() -> bool:
    """Whether anything in this process holds memory of a slab."""
    for slab in list(_mapped.values()):
        storages = slab.storages()
        if storages is None or storages.is_closed or storages.live_count():
            return True
    return False


def imports(dtype: str) -> bool:
    """Whether this torch takes a dtype through DLPack (older ones take no 8-bit floats)."""
    known = _imported.get(dtype)
    if known is None:
        known = _imported[dtype] = _try(dtype)
    return known


_imported: dict[str, bool] = {}


def _try(dtype: str) -> bool:
    whole = torch.zeros(16, dtype=torch.uint8, device="cpu")
    capsule: Any = _export(whole)
    dims = array.array("q", [1, 1])
    at = dims.buffer_info()[0]
    row = _DL_TENSOR.pack(whole.data_ptr(), _device_word(whole), 1, *DTYPES[dtype], at, at + 8, 0)
    _copy(_pointer(capsule, _NAME), row, _ROW)
    try:
        tensor: Tensor = _import(capsule)
    except (BufferError, RuntimeError):
        return False
    return tensor.dtype is getattr(torch, dtype)


# --- the spanning tensor -----------------------------------------------------------------------


class _Slab(NamedTuple):
    start: int
    nbytes: int
    storages: weakref.ref[SlabStorages]


_keys = itertools.count()
_mapped: dict[int, _Slab] = {}


def _unmap(
    key: int, mapping: Mapping, on_last_release: Callable[[], None] | None, pid: int
) -> None:
    del _mapped[key]
    if os.getpid() != pid:
        return  # never mapped here: the address range may be somebody else's by now
    mapping.close()
    if on_last_release is not None:
        on_last_release()


class _DeviceMemory:
    """GPU memory as `__cuda_array_interface__` (version 2) describes it to torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self._nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),  # torch refuses memory that says it is read-only
            "version": 2,
        }


def _spanning(mapping: Mapping, device: torch.device) -> tuple[object, Tensor]:
    """What the mapping lives as long as, and the one tensor that holds it."""
    with torch.inference_mode(False):
        if device.type == "cpu":
            memory = (ctypes.c_ubyte * mapping.nbytes).from_address(mapping.address)
            return memory, torch.frombuffer(memory, dtype=torch.uint8)
        owner = _DeviceMemory(mapping.address, mapping.nbytes)
        return owner, _device_tensor(owner, mapping.address, device)


def _device_tensor(owner: object, address: int, device: torch.device) -> Tensor:
    """A tensor over GPU memory that keeps `owner` alive.

    Raises:
        InternalError: torch made a copy, because it takes the memory for another device's.
    """
    tensor = torch.as_tensor(owner, device=device)
    if tensor.data_ptr() != address:
        raise InternalError(
            f"torch did not take the slab at {address:#x} as memory of {device}: "
            "check that the engine's device is the one the weights were acquired for"
        )
    return tensor


def _device_word(whole: Tensor) -> int:
    """DLDevice, type and index in one word, as torch writes it for this tensor."""
    capsule: Any = _export(whole)
    return ctypes.c_uint64.from_address(_pointer(capsule, _NAME) + _DEVICE_OFFSET).value


def _uses(whole: Tensor) -> int:
    """How often a tensor or its storage is referred to.

    An exported struct refers to the tensor; in older torch to a view of it, so to its storage.
    """
    storage = whole.untyped_storage()
    tensors: int = whole._use_count()  # type: ignore[attr-defined]  # noqa: SLF001
    return tensors + int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001
