"""What the platform check asks of the outside world, in one replaceable object.

`Probe` only looks; what follows from what it sees is decided in `broker.platform`. Imports neither
torch nor zmq, and takes no GPU driver into this process.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from broker.devices.base import Canary

Vendor = Literal["nvidia", "amd"]

DRIVER_DEADLINE_SECONDS = 60.0
"""How long a driver may take to initialise. Without persistence mode NVIDIA's needs one to three
seconds for each GPU ("Driver Persistence" in its documentation), and nodes have up to sixteen."""

VENDORS: tuple[Vendor, ...] = ("nvidia", "amd")
_CHILD = Path(__file__).with_name("driver_child.py")
_DISPLAY_CLASSES = ("0x03", "0x12")  # PCI base classes: display controller, accelerator


@dataclass(frozen=True)
class DeviceAnswer:
    """What a driver says of one device in a child process; capabilities as in `Capabilities`."""

    uuid: str
    name: str
    total_bytes: int
    virtual_memory: bool = True
    posix_descriptors: bool = True
    compute_mode: int = 0


@dataclass(frozen=True)
class DriverAnswer:
    """What one vendor's driver said when it was asked in a child process.

    Attributes:
        library: the library that was loaded, or "" if there is none.
        failure: why it cannot be used, as a clause of a sentence; "" if it initialised.
        reason: "", "driver-failed", "driver-hung", "driver-crashed" or "driver-not-asked".
        code: the driver's error code, 0 if it gave none.
        devices: devices this process may see; 0 with an empty `failure` means there are none.
        version: as the driver encodes it (CUDA 12.8 is 12080); 0 without a device.
        described: each device by its ordinal, if the driver can describe them.
        undescribed: why it cannot, in its own words.
    """

    vendor: Vendor
    library: str = ""
    failure: str = ""
    reason: str = ""
    code: int = 0
    devices: int = 0
    version: int = 0
    described: tuple[DeviceAnswer, ...] = ()
    undescribed: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """What torch in this environment was built for; `None` where it was not."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


class Probe:
    """Looks at this machine and this process. Methods may block for as long as they say."""

    root = Path("/")

    def system(self) -> str:
        """`sys.platform`: "linux", "darwin", "win32", …"""
        return sys.platform

    def machine(self) -> str:
        """The processor architecture, as `uname -m` gives it."""
        return os.uname().machine if hasattr(os, "uname") else ""

    def environ(self) -> Mapping[str, str]:
        return os.environ

    def read(self, path: str) -> str:
        """A small text file, or "" if it cannot be read."""
        try:
            return self._at(path).read_text("utf-8", "replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def pci_gpus(self) -> frozenset[str]:
        """PCI vendor ids ("0x10de") of the GPUs in the machine, with or without a driver."""
        found = set()
        for device in self._at("/sys/bus/pci/devices").glob("*"):
            name = f"/sys/bus/pci/devices/{device.name}"
            if self.read(f"{name}/class").startswith(_DISPLAY_CLASSES):
                found.add(self.read(f"{name}/vendor").strip())
        return frozenset(found)

    def ask_drivers(self, environ: Mapping[str, str]) -> tuple[DriverAnswer, ...]:
        """Each vendor's driver, asked in a child that sees `environ`.

        Blocks for `DRIVER_DEADLINE_SECONDS` at most, even if a driver hangs for good.
        """
        return ask_drivers(environ, DRIVER_DEADLINE_SECONDS)

    def prove_sharing(self, uuid: str) -> Canary:
        """Let two child processes share memory of the device. Blocks, for a minute at most.

        Raises:
            RoundTripFailed: they could not.
        """
        from broker.devices.roundtrip import prove_sharing  # not at the top: it needs Linux

        return prove_sharing(uuid)

    def torch_build(self) -> TorchBuild | None:
        """The torch an engine here would use, or `None` without one. Does not import torch."""
        return torch_build()

    def sealing_failure(self) -> str:
        """Why memory files cannot be sealed here, or "" if they can. Tries it on one page."""
        return sealing_failure()


def ask_drivers(
    environ: Mapping[str, str], deadline_seconds: float, child: Path = _CHILD
) -> tuple[DriverAnswer, ...]:
    """Ask both drivers at the same time; see `Probe.ask_drivers`."""
    deadline = time.monotonic() + deadline_seconds
    started = [(vendor, _start(vendor, environ, child)) for vendor in VENDORS]
    return tuple(
        _collect(vendor, process, deadline, deadline_seconds) for vendor, process in started
    )


def _start(
    vendor: Vendor, environ: Mapping[str, str], child: Path
) -> subprocess.Popen[bytes] | OSError:
    # Not at the top: the devices need Linux, where this module must import without and say so.
    from broker.devices.libraries import candidates

    # Isolated (-I): without it the script's folder comes first on the path, and our platform.py
    # would hide the standard library's.
    libraries = candidates(vendor, environ)
    command = [sys.executable, "-I", "-S", str(child), vendor, *libraries]
    try:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return error


def _collect(
    vendor: Vendor,
    process: subprocess.Popen[bytes] | OSError,
    deadline: float,
    deadline_seconds: float,
) -> DriverAnswer:
    if isinstance(process, OSError):
        failure = f"a child process to ask it in cannot be started ({process})"
        return DriverAnswer(vendor, failure=failure, reason="driver-not-asked")
    try:
        output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        _abandon(process)
        failure = f"it has not initialised within {deadline_seconds:g} seconds"
        return DriverAnswer(vendor, "?", failure, "driver-hung")
    if process.returncode:
        failure = f"it crashed while it was initialising (exit status {process.returncode})"
        return DriverAnswer(vendor, "?", failure, "driver-crashed")
    return _parsed(vendor, output)


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill the child, and reap it whenever the kernel lets it die.

    A process inside a hanging driver call may ignore even SIGKILL, so nobody waits for it here.
    """
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    threading.Thread(target=process.wait, name="reap-driver-child", daemon=True).start()


def _parsed(vendor: Vendor, output: bytes) -> DriverAnswer:
    try:
        fields: dict[str, Any] = json.loads(output)
        reason = "driver-failed" if fields.get("failure") else ""
        described = tuple(DeviceAnswer(**device) for device in fields.pop("described", ()))
        return DriverAnswer(vendor, reason=reason, described=described, **fields)
    except (ValueError, TypeError):  # a library that writes to standard output
        failure = f"its answer is unintelligible ({output[:80]!r})"
        return DriverAnswer(vendor, "?", failure, "driver-failed")


def torch_build() -> TorchBuild | None:
    """See `Probe.torch_build`. Reads torch/version.py unless torch is imported already.

    Importing torch costs more than a second; the file it reads its own build from says the same.
    """
    found = _torch_version_names()
    if found is None:
        return None
    values = {name: found.get(name) for name in ("cuda", "hip", "xpu")}
    texts = {name: value if isinstance(value, str) else None for name, value in values.items()}
    return TorchBuild(str(found.get("__version__", "of unknown version")), **texts)


def _torch_version_names() -> Mapping[str, Any] | None:
    loaded = getattr(sys.modules.get("torch"), "version", None)
    if loaded is not None:
        return dict(vars(loaded))
    folder = _torch_folder()
    if folder is None:
        return None
    try:
        return _constants(ast.parse((folder / "version.py").read_text("utf-8")).body)
    except (OSError, SyntaxError):  # not torch, or only its remains
        return None


def _torch_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # ValueError: somebody put a module without spec in place
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _constants(statements: Iterable[ast.stmt]) -> dict[str, Any]:
    """The module's plain `name = constant` and `name: type = constant` assignments."""
    found: dict[str, Any] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found.update(dict.fromkeys(names, statement.value.value))
    return found


def sealing_failure() -> str:
    """See `Probe.sealing_failure`."""
    import fcntl  # not on Windows, where this module must still import and say so

    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return "this Python was built without memfd_create"
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    try:
        descriptor = os.memfd_create("weight-broker-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, wanted)
            # Readers map a read-only reopening, which needs /proc.
            os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"a sealed memory file cannot be made and reopened ({error.strerror})"
    return ""
