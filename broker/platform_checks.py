"""The steps of the platform check, each with the sentence of its refusal."""

from __future__ import annotations

from collections.abc import Iterator

from broker.amounts import counted
from broker.device_names import is_simulated, means_gpus
from broker.platform_probe import DriverAnswer, Probe, TorchBuild, Vendor
from broker.platform_sharing import MAKERS, PLATFORMS, SharingSteps, Step, Where, describe

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
ALL_HIDING = tuple(sorted({name for names in _HIDING.values() for name in names}))

OTHER_PLATFORMS = ("cpu", "xpu", "mps", "hpu", "mtia", "npu", "tpu", "xla", "meta")
"""What torch and its extensions call devices that cannot share memory between processes."""


class Check(SharingSteps):
    """The steps for one side. Each generator is only run up to its first failed step."""

    def __init__(self, where: Where, probe: Probe) -> None:
        super().__init__(where, probe)
        self.steps: list[Step] = []

    def run(self, device: str) -> None:
        """All steps up to the first that fails."""
        for step in self.simulated() if is_simulated(device) else self.gpu(device):
            self.steps.append(step)
            if not step.ok:
                self.close_canaries()
                return

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
        yield from self.sharing(ready[0], device)

    # --- steps ------------------------------------------------------------------------------

    def _system(self) -> Step:
        system = self.probe.system()
        if system == "linux":
            return Step("operating system", ok=True, sentence="Linux")
        names = {"darwin": ("macos", "macOS"), "win32": ("windows", "Windows")}
        platform, title = names.get(system, (system, system))
        if platform == "macos" and self.probe.machine() == "arm64":
            platform, title = "mps", "macOS with an Apple GPU"
        return self.refused(
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
        if means_gpus(device):
            return Step("device asked for", ok=True, sentence=f"{device} means a GPU")
        kind = device.partition(":")[0][:32]
        found = f"the device {device[:64]!r} was asked for"
        if kind not in OTHER_PLATFORMS:
            found += ", which is the name of none"
        fix = 'say "cuda" for a GPU, also AMD\'s, "cuda:1" or a UUID for one of several'
        platform = kind if kind in (*OTHER_PLATFORMS, "cuda") else "unknown"
        return self.refused("device asked for", platform, "device-name", found, fix)

    def _not_wsl(self) -> Step:
        release = self.probe.read("/proc/sys/kernel/osrelease").strip()
        name = "not under Windows"
        if "microsoft" in release.lower():
            found = f"the kernel {release} is Windows' own (WSL2), whose GPU driver cannot export"
        elif self.probe.exists("/dev/dxg"):
            found = "the GPU is lent by Windows through /dev/dxg (WSL2), whose driver cannot export"
        else:
            return Step(name, ok=True, sentence=f"kernel {release}")
        return self.refused(name, "wsl2", "wsl2", f"{found} GPU memory", "use Linux itself")

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
                return self.refused(name, "tegra", "tegra", found)
        return Step(name, ok=True, sentence="no sign of one")

    def _driver(self, answers: tuple[DriverAnswer, ...]) -> Step:
        name = "GPU driver"
        working = [answer for answer in answers if answer.library and not answer.failure]
        failed = [answer for answer in answers if answer.failure]
        if any(answer.devices for answer in working) or (working and not failed):
            drivers = " and ".join(describe(answer) for answer in working)
            return Step(name, ok=True, sentence=drivers)
        if not failed:
            return self._no_driver(name)
        answer = failed[0]
        return self.refused(
            name,
            PLATFORMS[answer.vendor],
            answer.reason,
            f"the {MAKERS[answer.vendor]} driver cannot be used: {answer.failure}",
            "repair the driver",
        )

    def _no_driver(self, name: str) -> Step:
        """Neither library can be loaded: a machine without GPU, or half of a driver."""
        for vendor, maker in MAKERS.items():
            platform, library = PLATFORMS[vendor], _LIBRARY_NAMES[vendor]
            for path in _KERNEL_DRIVERS[vendor]:
                if self.probe.exists(path):
                    found = (
                        f"the {maker} kernel driver is here ({path}) but its library {library} is "
                        "not, as in a container that was started without the GPU"
                    )
                    fix = f"make {library} available"
                    return self.refused(name, platform, "no-driver-library", found, fix)
        return self.refused(name, *self._without_driver())

    def _without_driver(self) -> tuple[str, str, str, str]:
        """Platform, reason, what was found, what could be done about it."""
        on_bus = self.probe.pci_gpus()
        for vendor, maker in MAKERS.items():
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
            return Step(name, ok=True, sentence=counts + self._unseen_slices(ready))
        hidden = self._hidden()
        if hidden:
            platform, variables = hidden
            found = f"its GPU is hidden by {' and '.join(variables)}"
            return self.refused(name, platform, "hidden", found, "unset that")
        vendor = next(answer.vendor for answer in answers if answer.library)
        found = f"the {MAKERS[vendor]} driver is here but says that there is no device"
        return self.refused(name, PLATFORMS[vendor], "no-device", found)

    def _unseen_slices(self, ready: list[DriverAnswer]) -> str:
        """A word on MIG slices that were named and are not seen, or "" if there are none."""
        named = self.probe.environ().get("CUDA_VISIBLE_DEVICES", "").split(",")
        slices = sum(name.strip().startswith("MIG-") for name in named)
        if slices <= sum(answer.devices for answer in ready):
            return ""
        return (
            f", although CUDA_VISIBLE_DEVICES names {slices} MIG slices: a process sees one, so "
            "start one broker for each"
        )

    def _hidden(self) -> tuple[str, list[str]] | None:
        """The platform and the variables that hide it: those without which there are devices."""
        environ = self.probe.environ()
        if not any(name in environ for name in ALL_HIDING):
            return None
        bare = {name: value for name, value in environ.items() if name not in ALL_HIDING}
        for answer in self.probe.ask_drivers(bare):
            if answer.devices:
                names = [name for name in _HIDING[answer.vendor] if name in environ]
                return PLATFORMS[answer.vendor], [f"{name}={environ[name]!r}" for name in names]
        return None

    def _torch(self, ready: list[DriverAnswer], build: TorchBuild | None) -> Step:
        name = "torch"
        gpu = " and ".join(_count_devices(answer) for answer in ready)
        platform = PLATFORMS[ready[0].vendor]
        if build is None:
            found = f"no usable torch is installed, although here are {gpu}"
            return self.refused(name, "cpu", "no-torch", found, "install torch for it")
        built_for = _builds(build)
        if any(_built_for(build, answer.vendor) for answer in ready):
            return Step(name, ok=True, sentence=f"torch {build.version} for {built_for}")
        fix = f"install torch for {platform.upper() if platform == 'cuda' else 'ROCm'}"
        if not built_for:
            found = f"torch {build.version} is built without GPU support, although here are {gpu}"
            return self.refused(name, "cpu", "torch-without-gpu", found, fix)
        found = f"torch {build.version} is built for {built_for}, but here are {gpu}"
        platform = "xpu" if built_for == "XPU" else platform
        return self.refused(name, platform, "torch-for-another-device", found, fix)


_LIBRARY_NAMES: dict[Vendor, str] = {"nvidia": "libcuda.so.1", "amd": "libamdhip64.so"}


def _built_for(build: TorchBuild | None, vendor: Vendor) -> bool:
    return bool(build and (build.cuda if vendor == "nvidia" else build.hip))


def _builds(build: TorchBuild) -> str:
    names = {"CUDA": build.cuda, "ROCm": build.hip, "XPU": build.xpu}
    return " and ".join(name for name, version in names.items() if version)


def _count_devices(answer: DriverAnswer) -> str:
    return counted(answer.devices, f"{MAKERS[answer.vendor]} device")
