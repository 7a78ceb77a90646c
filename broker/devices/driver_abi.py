"""Structures, constants and argument types that both vendors' drivers have in common.

Sources: cuda.h of CUDA 13 and hip_runtime_api.h of ROCm 7; tests compare every structure and
constant with those headers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, ClassVar

# Both vendors' values (CUmemAllocationType and so on; the names in hip_runtime_api.h are alike).
ALLOCATION_PINNED = 1
HANDLE_POSIX_DESCRIPTOR = 1
LOCATION_DEVICE = 1
ACCESS_READ = 1
ACCESS_READ_WRITE = 3
GRANULARITY_RECOMMENDED = 1
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100

COMPUTE_MODE_DEFAULT = 0
COMPUTE_MODE_PROHIBITED = 2
COMPUTE_MODE_EXCLUSIVE = 3
"""One process only may have a context on the device: engines and loaders could not map."""


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, hipMemAllocationProp."""

    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32_metadata", c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AccessDescriptor(ctypes.Structure):
    """CUmemAccessDesc, hipMemAccessDesc."""

    _fields_: ClassVar = [("location_type", c_int), ("location_id", c_int), ("flags", c_int)]


Uuid = ctypes.c_ubyte * 16

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "initialise": (c_uint,),
    "version": (POINTER(c_int),),
    "count": (POINTER(c_int),),
    "name": (c_char_p, c_int, c_int),
    "uuid": (POINTER(Uuid), c_int),
    "plain_uuid": (POINTER(Uuid), c_int),
    "pci": (c_char_p, c_int, c_int),
    "total": (POINTER(c_size_t), c_int),
    "attribute": (POINTER(c_int), c_int, c_int),
    "granularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "create": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "export": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "import": (POINTER(c_uint64), c_void_p, c_int),
    "properties": (POINTER(AllocationProperties), c_uint64),
    "release": (c_uint64,),
    "reserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "free_address": (c_uint64, c_size_t),
    "map": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "access": (c_uint64, c_size_t, POINTER(AccessDescriptor), c_size_t),
    "unmap": (c_uint64, c_size_t),
    "memory": (POINTER(c_size_t), POINTER(c_size_t)),
    "retain": (POINTER(c_void_p), c_int),
    "release_context": (c_int,),
    "push": (c_void_p,),
    "pop": (POINTER(c_void_p),),
    "get_device": (POINTER(c_int),),
    "set_device": (c_int,),
    "synchronise": (),
    "create_stream": (POINTER(c_void_p), c_uint),
    "synchronise_stream": (c_void_p,),
    "destroy_stream": (c_void_p,),
    "create_event": (POINTER(c_void_p), c_uint),
    "record_event": (c_void_p, c_void_p),
    "synchronise_event": (c_void_p,),
    "destroy_event": (c_void_p,),
    "pin": (POINTER(c_void_p), c_size_t, c_uint),
    "unpin": (c_void_p,),
    "copy_in": (c_uint64, c_void_p, c_size_t, c_void_p),
    "copy_out": (c_void_p, c_uint64, c_size_t),
}
"""Argument types of each operation; the vendors' modules give each its symbol. Handles and device
addresses are 64 bits wide in both, whether the header calls them integers or pointers."""
