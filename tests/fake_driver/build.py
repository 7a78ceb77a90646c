"""Compiles the fake drivers and controls them from tests."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from broker.devices import cuda
from broker.devices.discovery import open_driver
from broker.devices.driver import Driver
from broker.devices.libraries import NVML_OVERRIDE, OVERRIDES, SYSFS_OVERRIDE, Vendor
from tests.fake_driver import headers

HERE = Path(__file__).parent
COMMON = ("core.c", "memory.c", "work.c")
VENDOR_SOURCES: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("fake_cuda.c", "layout_cuda.c", "fake_nvml.c"),
    "amd": ("fake_hip.c", "layout_hip.c"),
}
KINDS = (
    "handles",
    "reservations",
    "mappings",
    "streams",
    "events",
    "pinned",
    "copies",
    "contexts",
    "pushed",
)


class CannotBuild(Exception):
    """A fake driver cannot be compiled here; the message says what is missing."""


def build(vendor: Vendor, folder: Path) -> Path:
    """Compile one vendor's fake driver into the folder; the path of the library."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise CannotBuild("gcc is not installed")
    include = headers.find(vendor)
    if include is None:
        raise CannotBuild(f"no {vendor} headers are here (make headers fetches them)")
    library = folder / f"libfake-{vendor}.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-pthread"]
    command += ["-fvisibility=hidden", "-isystem", str(include), "-o", str(library)]
    command += [str(HERE / name) for name in (*COMMON, *VENDOR_SOURCES[vendor])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"the fake {vendor} driver does not compile:\n{done.stderr}")
    return library


@dataclass
class FakeDriver:
    """A compiled fake driver, loaded here, and what child processes need to load it."""

    vendor: Vendor
    path: Path
    log: Path
    """Complaints and what is left at exit, of every process that has `environment()`."""
    sysfs: Path

    def __post_init__(self) -> None:
        self.control = ctypes.CDLL(str(self.path))
        self.control.fake_complaints.restype = ctypes.c_char_p
        self.control.fake_layout.restype = ctypes.c_long

    def environment(self, settings: str = "", faults: str = "") -> dict[str, str]:
        """Variables that make a process use this driver, with these settings and faults."""
        return {
            OVERRIDES[self.vendor]: str(self.path),
            NVML_OVERRIDE: str(self.path),
            SYSFS_OVERRIDE: str(self.sysfs),
            "FAKE_DRIVER": settings,
            "FAKE_DRIVER_FAULTS": faults,
            "FAKE_DRIVER_LOG": str(self.log),
            "FAKE_DRIVER_NODE": hashlib.sha256(str(self.log).encode()).hexdigest()[:16],
        }

    def start(self, settings: str = "", faults: str = "") -> Driver:
        """Start over with these settings and faults: a fresh driver, as in a fresh process."""
        cuda._shared.clear()
        self.control.fake_reset(settings.encode(), faults.encode())
        return open_driver()

    def script(self, faults: str) -> None:
        """Replace the faults and count calls anew, in this process."""
        self.control.fake_script(faults.encode())

    def calls(self, symbol: str) -> int:
        return int(self.control.fake_calls(symbol.encode()))

    def live(self) -> dict[str, int]:
        """Driver objects alive in this process, those of which there are any."""
        counts = {kind: int(self.control.fake_live(kind.encode())) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}

    def complaints(self) -> str:
        """Every misuse in this process and in the children's log."""
        log = self.log.read_text() if self.log.exists() else ""
        here = bytes(self.control.fake_complaints()).decode()
        return here + log

    def layout(self, name: str) -> int:
        """A size, offset or constant from the vendor's header; -1 if it is not listed."""
        return int(self.control.fake_layout(name.encode()))


def in_environment(fake: FakeDriver, setenv: Callable[[str, str], None]) -> None:
    """Make this process and its children use the fake driver."""
    for name, value in fake.environment().items():
        setenv(name, value)
