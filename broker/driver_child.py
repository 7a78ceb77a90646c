"""Asks one GPU vendor's driver for its devices. A program of its own, never imported.

    python -I -S driver_child.py (nvidia | amd) LIBRARY …

A driver may hang or crash while it initialises, and leaves threads and state in the process that
asked; so `broker.platform_probe` asks in a child, with a deadline. Prints one JSON object whose
keys are fields of `DriverAnswer`. Of this project it imports what drives devices, which needs the
standard library only, and that only when there is a device to describe.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PREFIX = {"nvidia": "cu", "amd": "hip"}
_COUNT_CALL = {"nvidia": "cuDeviceGetCount", "amd": "hipGetDeviceCount"}
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h), hipErrorNoDevice (hip_runtime_api.h)


def answer(vendor: str, libraries: list[str]) -> dict[str, Any]:
    """What the first library that can be loaded says; "failure" is empty when all went well."""
    driver, library, failure = _load(libraries)
    if driver is None:
        return {"library": "", "failure": failure}
    try:
        return {"library": library, **_ask(driver, vendor)}
    except AttributeError as error:  # a library by that name that is no driver
        return {"library": library, "failure": f"{library} is not a driver ({error})"}


def _load(libraries: list[str]) -> tuple[ctypes.CDLL | None, str, str]:
    failure = ""
    for library in libraries:
        driver, error = _open(library)
        if driver is not None:
            return driver, library, ""
        if not error.startswith(f"{library}: cannot open shared object file: No such"):
            failure = failure or f"{library} cannot be loaded ({error})"
    return None, "", failure


def _open(library: str) -> tuple[ctypes.CDLL | None, str]:
    try:
        return ctypes.CDLL(library), ""
    except OSError as error:
        return None, str(error)


def _ask(driver: ctypes.CDLL, vendor: str) -> dict[str, Any]:
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    prefix = _PREFIX[vendor]
    calls: list[tuple[str, Callable[[], int]]] = [
        (f"{prefix}Init", lambda: int(driver[f"{prefix}Init"](0))),
        (_COUNT_CALL[vendor], lambda: int(driver[_COUNT_CALL[vendor]](ctypes.byref(count)))),
        (
            f"{prefix}DriverGetVersion",
            lambda: int(driver[f"{prefix}DriverGetVersion"](ctypes.byref(version))),
        ),
    ]
    for name, call in calls:
        code = call()
        if code == _NO_DEVICE:
            return {"devices": 0}
        if code:
            text = _error_text(driver, vendor, code)
            return {"code": code, "failure": f"{name} failed with code {code} ({text})"}
    described = _describe(driver, vendor) if count.value else {}
    return {"devices": count.value, "version": version.value, **described}


def _describe(library: ctypes.CDLL, vendor: str) -> dict[str, Any]:
    """What each device is and can do, by its ordinal; or why the driver cannot tell."""
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from broker.devices.base import DeviceError
    from broker.devices.discovery import visible_uuids
    from broker.devices.driver_cuda import CudaDriver
    from broker.devices.driver_hip import HipDriver

    driver = CudaDriver(library) if vendor == "nvidia" else HipDriver(library)
    try:
        driver.initialise()
        described = []
        for ordinal, uuid in enumerate(visible_uuids(driver)):
            can = driver.capabilities(ordinal)
            described.append(
                {
                    "uuid": uuid,
                    "name": driver.name(ordinal),
                    "total_bytes": driver.total_bytes(ordinal),
                    "virtual_memory": can.virtual_memory,
                    "posix_descriptors": can.posix_descriptors,
                    "compute_mode": can.compute_mode,
                }
            )
        return {"described": described}
    except DeviceError as error:
        return {"undescribed": str(error)}


def _error_text(driver: ctypes.CDLL, vendor: str, code: int) -> str:
    """The driver's own name for an error code, e.g. "CUDA_ERROR_UNKNOWN"."""
    if vendor == "amd":
        name_of = driver.hipGetErrorName
        name_of.restype = ctypes.c_char_p
        name: bytes | None = name_of(code)
    else:
        pointer = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(pointer))
        name = pointer.value
    return name.decode("ascii", "replace") if name else "unknown to the driver"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(sys.argv[1], sys.argv[2:])))
