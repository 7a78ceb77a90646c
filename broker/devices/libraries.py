"""Where the vendors' driver libraries are found, and how a test puts another in their place.

Loads nothing: whoever asks a driver decides in which process. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Vendor = Literal["nvidia", "amd"]

OVERRIDES: dict[Vendor, str] = {
    "nvidia": "WEIGHT_BROKER_CUDA_LIBRARY",
    "amd": "WEIGHT_BROKER_HIP_LIBRARY",
}
"""For tests only: a path to load instead of the vendor's library. Where either is set, nothing is
looked for elsewhere and the vendor that is not named counts as absent."""

NVML_OVERRIDE = "WEIGHT_BROKER_NVML_LIBRARY"
"""For tests only: a path to load instead of NVIDIA's management library."""

SYSFS_OVERRIDE = "WEIGHT_BROKER_SYSFS"
"""For tests only: a folder to read instead of /sys."""

LIBRARIES: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("libcuda.so.1",),
    # Without the development package there is only the name with the major version.
    "amd": (
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "libamdhip64.so",
        "/opt/rocm/lib/libamdhip64.so",
    ),
}
"""Where each vendor's driver library is looked for, in this order."""

NVML_LIBRARIES = ("libnvidia-ml.so.1",)


def candidates(vendor: Vendor, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names or paths to try for a vendor's driver, the best one first; none if it is hidden.

    A copy of AMD's runtime that this process has loaded already comes first, whoever loaded it: two
    runtimes in one process do not know of each other's memory. torch's ROCm wheels bring a copy
    of their own, which comes last.
    """
    if any(environ.get(name) for name in OVERRIDES.values()):
        override = environ.get(OVERRIDES[vendor])
        return (override,) if override else ()
    if vendor == "nvidia":
        return LIBRARIES[vendor]
    return (*_loaded("libamdhip64.so"), *LIBRARIES[vendor], *_bundled_with_torch())


def load_first(names: tuple[str, ...]) -> tuple[ctypes.CDLL | None, list[str]]:
    """Load the first library that can be; with the loader's words on each that cannot."""
    failures: list[str] = []
    for name in names:
        library = _load(name, failures)
        if library is not None:
            return library, failures
    return None, failures


def _load(name: str, failures: list[str]) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        failures.append(str(error))
        return None


def _loaded(name: str) -> tuple[str, ...]:
    """Paths of libraries with this name in the process (proc(5): the path is the sixth column)."""
    found: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6 and Path(columns[5]).name.startswith(name):
            found[columns[5]] = None
    return tuple(found)


def _bundled_with_torch() -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # ValueError: somebody put a module without spec in place
        return ()
    if spec is None or spec.origin is None:
        return ()
    return (str(Path(spec.origin).parent / "lib" / "libamdhip64.so"),)
