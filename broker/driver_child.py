"""Asks one GPU vendor's driver how many devices it has. A program of its own, never imported.

    python -I -S driver_child.py (nvidia | amd) LIBRARY …

A driver may hang or crash while it initialises, and leaves threads and state in the process that
asked; so `broker.platform_probe` asks in a child, with a deadline. Prints one JSON object whose
keys are fields of `DriverAnswer`. Uses the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable

_PREFIX = {"nvidia": "cu", "amd": "hip"}
_COUNT_CALL = {"nvidia": "cuDeviceGetCount", "amd": "hipGetDeviceCount"}
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h), hipErrorNoDevice (hip_runtime_api.h)


def answer(vendor: str, libraries: list[str]) -> dict[str, str | int]:
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


def _ask(driver: ctypes.CDLL, vendor: str) -> dict[str, str | int]:
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
    return {"devices": count.value, "version": version.value}


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
