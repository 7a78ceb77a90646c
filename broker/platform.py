"""May this machine and this process share device memory? Checked before anything is opened.

Only CUDA and ROCm devices can be shared between processes. Everything else is refused in one
sentence that says what was found, why it cannot serve and what to do instead; there is no fallback.
The simulated device is for trials and has to be asked for by name.

The steps are plain functions of what a `Probe` sees, so every platform is tested on any machine.
Imports neither torch nor zmq, and neither does what it calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from broker.errors import UnsupportedPlatformForIPCError
from broker.platform_probe import DriverAnswer, Probe, TorchBuild, Vendor

Where = Literal["broker", "engine"]

AUTO = "auto"
SIMULATED = "simulated"

_GPU_DEVICE = re.compile(r"auto|cuda(:\d+)?|(GPU|MIG)-.+")
"""Devices a GPU is meant by: torch's names (ROCm devices are "cuda" to torch too) and UUIDs."""

_PLATFORMS: dict[Vendor, str] = {"nvidia": "cuda", "amd": "rocm"}
_MAKERS: dict[Vendor, str] = {"nvidia": "NVIDIA", "amd": "AMD"}
_PCI_VENDORS: dict[Vendor, str] = {"nvidia": "0x10de", "amd": "0x1002"}
_PCI_INTEL = "0x8086"
_KERNEL_DRIVERS: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("/proc/driver/nvidia/version", "/dev/nvidiactl"),
    "amd": ("/dev/kfd",),
}
_HIDING: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    # HIP reads NVIDIA's variable as well ("GPU isolation techniques" in the ROCm documentation).
    "amd": (
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
    ),
}
"""Variables that hide GPUs from a process, by the driver that reads them."""
_ALL_HIDING = tuple(sorted({name for names in _HIDING.values() for name in names}))


@dataclass(frozen=True)
class Step:
    """One step of the check.

    Attributes:
        name: what was looked at, a few words.
        ok: whether the check goes on.
        sentence: what was found; of a failed step the whole refusal, which starts with
            "[weight-broker:broker]" or "[weight-broker:engine]".
        platform: what this machine was found to be, e.g. "cpu", "wsl2", "cuda".
        reason: a short word for why a failed step failed, else "".
    """

    name: str
    ok: bool
    sentence: str
    platform: str = ""
    reason: str = ""


@dataclass(frozen=True)
class PlatformReport:
    """A platform that may share. `platform` is "cuda", "rocm" or "simulated"."""

    where: Where
    platform: str
    steps: tuple[Step, ...]


_cache: dict[tuple[Any, ...], tuple[Step, ...]] = {}


def check_ipc_platform_support(
    *, where: Where, device: str = AUTO, probe: Probe | None = None
) -> PlatformReport:
    """Make sure that device memory can be shared between processes here.

    Opens no socket, creates no file, imports no torch and initialises no driver in this process
    (drivers are asked in child processes, which may take up to a minute if one of them hangs). The
    result is kept for the life of the process, for each `device` and state of the variables that
    hide GPUs; a given `probe` is always asked anew.

    Args:
        where: which side asks; it starts every sentence.
        device: "auto", a GPU ("cuda", "cuda:1", a UUID), or "simulated" for the simulated device,
            which is never chosen otherwise and needs Linux only.
        probe: what to look with; for tests.

    Raises:
        UnsupportedPlatformForIPCError: it cannot; with `where`, `platform` and `reason`.
    """
    steps = _cached_steps(where, device) if probe is None else _steps(where, device, probe)
    last = steps[-1]
    if not last.ok:
        raise UnsupportedPlatformForIPCError(
            last.sentence, where=where, platform=last.platform, reason=last.reason
        )
    return PlatformReport(where, last.platform, steps)


def platform_steps(where: Where, device: str = AUTO, probe: Probe | None = None) -> list[Step]:
    """The same check step by step, for a person to read: the last step may have failed.

    Raises nothing for an unsupported platform, and never answers from memory.
    """
    return list(_steps(where, device, probe or Probe()))


def _cached_steps(where: Where, device: str) -> tuple[Step, ...]:
    probe = Probe()
    environ = probe.environ()
    key = (where, device, *(environ.get(name) for name in _ALL_HIDING))
    if key not in _cache:
        _cache[key] = _steps(where, device, probe)
    return _cache[key]


def _steps(where: Where, device: str, probe: Probe) -> tuple[Step, ...]:
    look = _Check(where, probe)
    done = []
    for step in look.simulated() if device == SIMULATED else look.gpu(device):
        done.append(step)
        if not step.ok:
            break
    return tuple(done)


class _Check:
    """The steps for one side. Each generator is only run up to its first failed step."""

    def __init__(self, where: Where, probe: Probe) -> None:
        self.where = where
        self.probe = probe

    def simulated(self) -> Iterator[Step]:
        yield self._system()
        yield self._sealing()

    def gpu(self, device: str) -> Iterator[Step]:
        yield self._system()
        yield self._device_name(device)
        yield self._not_wsl()
        yield self._not_tegra()
        answers = self.probe.ask_drivers(self.probe.environ())
        yield self._driver(answers)
        yield self._devices(answers)
        ready = [answer for answer in answers if answer.devices]
        if self.where == "engine":
            build = self.probe.torch_build()
            yield self._torch(ready, build)
            ready = [answer for answer in ready if _built_for(build, answer.vendor)]
        yield self._served(ready[0])

    # --- sentences --------------------------------------------------------------------------

    def _refused(self, name: str, platform: str, reason: str, found: str, fix: str = "") -> Step:
        """A failed step: found what, why that cannot serve, what to do instead."""
        sentence = (
            f"[weight-broker:{self.where}] found platform {platform}: {found}; only CUDA and ROCm "
            f"devices can share memory between processes; {fix and fix + ', or '}"
            "load the checkpoint the ordinary way on this platform"
        )
        if self.probe.system() == "linux":
            by_name = "--device simulated" if self.where == "broker" else 'device="simulated"'
            sentence += f", or for a trial ask for the simulated device by name ({by_name})"
        return Step(name, ok=False, sentence=sentence, platform=platform, reason=reason)

    # --- steps ------------------------------------------------------------------------------

    def _system(self) -> Step:
        system = self.probe.system()
        if system == "linux":
            return Step("operating system", ok=True, sentence="Linux")
        names = {"darwin": ("macos", "macOS"), "win32": ("windows", "Windows")}
        platform, title = names.get(system, (system, system))
        if platform == "macos" and self.probe.machine() == "arm64":
            platform, title = "mps", "macOS with an Apple GPU"
        return self._refused(
            "operating system", platform, "not-linux", f"the weight broker needs Linux, not {title}"
        )

    def _sealing(self) -> Step:
        failure = self.probe.sealing_failure()
        if not failure:
            return Step("sealed memory files", ok=True, sentence="work", platform="simulated")
        sentence = (
            f"[weight-broker:{self.where}] found platform cpu: the simulated device needs sealed "
            f"memory files, but {failure}; only CUDA and ROCm devices can share memory between "
            "processes without it; load the checkpoint the ordinary way on this platform"
        )
        return Step("sealed memory files", False, sentence, "cpu", "no-memory-files")

    def _device_name(self, device: str) -> Step:
        if _GPU_DEVICE.fullmatch(device):
            return Step("device asked for", ok=True, sentence=f"{device} means a GPU")
        platform = device.partition(":")[0][:32]
        return self._refused(
            "device asked for", platform, "device-name", f"the device {device[:64]!r} was asked for"
        )

    def _not_wsl(self) -> Step:
        release = self.probe.read("/proc/sys/kernel/osrelease").strip()
        name = "not under Windows"
        if "microsoft" in release.lower():
            found = f"the kernel {release} is Windows' own (WSL2), whose GPU driver cannot export"
        elif self.probe.exists("/dev/dxg"):
            found = "the GPU is lent by Windows through /dev/dxg (WSL2), whose driver cannot export"
        else:
            return Step(name, ok=True, sentence=f"kernel {release}")
        return self._refused(name, "wsl2", "wsl2", f"{found} GPU memory", "use Linux itself")

    def _not_tegra(self) -> Step:
        name = "not a Tegra"
        for path, mark in (
            ("/etc/nv_tegra_release", ""),
            ("/proc/device-tree/compatible", "tegra"),
        ):
            text = self.probe.read(path)
            if text and mark in text:
                found = (
                    f"an NVIDIA Tegra (Jetson), by {path}, whose driver cannot export GPU memory"
                )
                return self._refused(name, "tegra", "tegra", found)
        return Step(name, ok=True, sentence="no sign of one")

    def _driver(self, answers: tuple[DriverAnswer, ...]) -> Step:
        name = "GPU driver"
        working = [answer for answer in answers if answer.library and not answer.failure]
        failed = [answer for answer in answers if answer.failure]
        if any(answer.devices for answer in working) or (working and not failed):
            drivers = " and ".join(_describe(answer) for answer in working)
            return Step(name, ok=True, sentence=drivers)
        if not failed:
            return self._no_driver(name)
        answer = failed[0]
        return self._refused(
            name,
            _PLATFORMS[answer.vendor],
            answer.reason,
            f"the {_MAKERS[answer.vendor]} driver cannot be used: {answer.failure}",
            "repair the driver",
        )

    def _no_driver(self, name: str) -> Step:
        """Neither library can be loaded: a machine without GPU, or half of a driver."""
        for vendor, maker in _MAKERS.items():
            platform, library = _PLATFORMS[vendor], _LIBRARY_NAMES[vendor]
            for path in _KERNEL_DRIVERS[vendor]:
                if self.probe.exists(path):
                    found = (
                        f"the {maker} kernel driver is here ({path}) but its library {library} is "
                        "not, as in a container that was started without the GPU"
                    )
                    fix = f"make {library} available"
                    return self._refused(name, platform, "no-driver-library", found, fix)
        return self._refused(name, *self._without_driver())

    def _without_driver(self) -> tuple[str, str, str, str]:
        """Platform, reason, what was found, what could be done about it."""
        on_bus = self.probe.pci_gpus()
        for vendor, maker in _MAKERS.items():
            if _PCI_VENDORS[vendor] in on_bus:
                found = (
                    f"an {maker} GPU is in this machine but no driver ({_LIBRARY_NAMES[vendor]})"
                )
                return "cpu", "no-driver", found, "install its driver"
        build = self.probe.torch_build() if self.where == "engine" else None
        absent = f"no NVIDIA or AMD GPU driver ({' or '.join(_LIBRARY_NAMES.values())}) is here"
        if _PCI_INTEL in on_bus:
            return "xpu", "no-driver", f"{absent}, only an Intel GPU", ""
        if build and build.xpu:
            return "xpu", "no-driver", f"{absent}, and torch {build.version} is built for XPU", ""
        return "cpu", "no-driver", absent, ""

    def _devices(self, answers: tuple[DriverAnswer, ...]) -> Step:
        name = "visible devices"
        ready = [answer for answer in answers if answer.devices]
        if ready:
            counts = " and ".join(_count_devices(answer) for answer in ready)
            return Step(name, ok=True, sentence=counts)
        hidden = self._hidden()
        if hidden:
            platform, variables = hidden
            found = f"its GPU is hidden by {' and '.join(variables)}"
            return self._refused(name, platform, "hidden", found, "unset that")
        vendor = next(answer.vendor for answer in answers if answer.library)
        found = f"the {_MAKERS[vendor]} driver is here but says that there is no device"
        return self._refused(name, _PLATFORMS[vendor], "no-device", found)

    def _hidden(self) -> tuple[str, list[str]] | None:
        """The platform and the variables that hide it: those without which there are devices."""
        environ = self.probe.environ()
        if not any(name in environ for name in _ALL_HIDING):
            return None
        bare = {name: value for name, value in environ.items() if name not in _ALL_HIDING}
        for answer in self.probe.ask_drivers(bare):
            if answer.devices:
                names = [name for name in _HIDING[answer.vendor] if name in environ]
                return _PLATFORMS[answer.vendor], [f"{name}={environ[name]!r}" for name in names]
        return None

    def _torch(self, ready: list[DriverAnswer], build: TorchBuild | None) -> Step:
        name = "torch"
        gpu = " and ".join(_count_devices(answer) for answer in ready)
        platform = _PLATFORMS[ready[0].vendor]
        if build is None:
            found = f"no usable torch is installed, although here are {gpu}"
            return self._refused(name, "cpu", "no-torch", found, "install torch for it")
        built_for = _builds(build)
        if any(_built_for(build, answer.vendor) for answer in ready):
            return Step(name, ok=True, sentence=f"torch {build.version} for {built_for}")
        fix = f"install torch for {platform.upper() if platform == 'cuda' else 'ROCm'}"
        if not built_for:
            found = f"torch {build.version} is built without GPU support, although here are {gpu}"
            return self._refused(name, "cpu", "torch-without-gpu", found, fix)
        found = f"torch {build.version} is built for {built_for}, but here are {gpu}"
        platform = "xpu" if built_for == "XPU" else platform
        return self._refused(name, platform, "torch-for-another-device", found, fix)

    def _served(self, answer: DriverAnswer) -> Step:
        """Replaced by the steps of the CUDA device (export, round trip) once there is one."""
        platform = _PLATFORMS[answer.vendor]
        found = (
            f"{_count_devices(answer)} could serve, but this version of the weight broker has no "
            "support for them yet"
        )
        return self._refused("device support", platform, "not-yet-served", found)


_LIBRARY_NAMES: dict[Vendor, str] = {"nvidia": "libcuda.so.1", "amd": "libamdhip64.so"}


def _built_for(build: TorchBuild | None, vendor: Vendor) -> bool:
    return bool(build and (build.cuda if vendor == "nvidia" else build.hip))


def _builds(build: TorchBuild) -> str:
    names = {"CUDA": build.cuda, "ROCm": build.hip, "XPU": build.xpu}
    return " and ".join(name for name, version in names.items() if version)


def _count_devices(answer: DriverAnswer) -> str:
    plural = "" if answer.devices == 1 else "s"
    return f"{answer.devices} {_MAKERS[answer.vendor]} device{plural}"


def _describe(answer: DriverAnswer) -> str:
    version = f" for {_version(answer)}" if answer.version else ""
    return f"the {_MAKERS[answer.vendor]} driver{version} ({answer.library})"


def _version(answer: DriverAnswer) -> str:
    """ "CUDA 12.8" for 12080 (cuDriverGetVersion), "HIP 7.1" for 70125424 (hipDriverGetVersion)."""
    if answer.vendor == "nvidia":
        return f"CUDA {answer.version // 1000}.{answer.version % 1000 // 10}"
    return f"HIP {answer.version // 10_000_000}.{answer.version // 100_000 % 100}"
