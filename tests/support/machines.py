"""Machines of every kind for the platform check, on a machine that is none of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.devices.base import Canary
from broker.devices.roundtrip import RoundTripFailed
from broker.platform_probe import DeviceAnswer, DriverAnswer, Probe, TorchBuild

H100 = DeviceAnswer("GPU-0100", "NVIDIA H100", 80 << 30)
L4 = DeviceAnswer("GPU-0004", "NVIDIA L4", 24 << 30)
MI300 = DeviceAnswer("GPU-a300", "AMD Instinct MI300X", 192 << 30)
NVIDIA = DriverAnswer("nvidia", "libcuda.so.1", devices=2, version=12080, described=(H100, L4))
AMD = DriverAnswer("amd", "libamdhip64.so.7", devices=1, version=70125424, described=(MI300,))
NO_NVIDIA = DriverAnswer("nvidia")
NO_AMD = DriverAnswer("amd")
CUDA_TORCH = TorchBuild("2.13.0+cu128", cuda="12.8")
ROCM_TORCH = TorchBuild("2.13.0+rocm7.1", hip="7.1.25424")
CPU_TORCH = TorchBuild("2.13.0+cpu")
XPU_TORCH = TorchBuild("2.13.0+xpu", xpu="20250300")


@dataclass
class PlainBox(Probe):
    """A Linux machine without any GPU; the doubles below say what is different."""

    os_name: str = "linux"
    processor: str = "x86_64"
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    on_bus: frozenset[str] = frozenset()
    answers: tuple[DriverAnswer, ...] = (NO_NVIDIA, NO_AMD)
    torch: TorchBuild | None = CPU_TORCH
    sealing: str = ""
    looked: list[str] = field(default_factory=list)

    def system(self) -> str:
        return self.os_name

    def machine(self) -> str:
        return self.processor

    def environ(self) -> Mapping[str, str]:
        return self.variables

    def read(self, path: str) -> str:
        return self.files.get(path, "")

    def exists(self, path: str) -> bool:
        return path in self.files

    def pci_gpus(self) -> frozenset[str]:
        return self.on_bus

    def ask_drivers(self, environ: Mapping[str, str]) -> tuple[DriverAnswer, ...]:
        self.looked.append("drivers")
        return self.answers

    def prove_sharing(self, uuid: str) -> Canary:
        self.looked.append(f"round trip {uuid}")
        return Canary(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 2 << 20, "seed")

    def torch_build(self) -> TorchBuild | None:
        self.looked.append("torch")
        return self.torch

    def sealing_failure(self) -> str:
        return self.sealing


class NvidiaBox(PlainBox):
    """Two NVIDIA GPUs, their driver, and torch for CUDA."""

    def __init__(self, torch: TorchBuild | None = CUDA_TORCH, **different: object) -> None:
        super().__init__(torch=torch, answers=(NVIDIA, NO_AMD), **different)  # type: ignore[arg-type]


class AmdBox(PlainBox):
    """One AMD GPU, its driver, and torch for ROCm."""

    def __init__(self, torch: TorchBuild | None = ROCM_TORCH) -> None:
        super().__init__(torch=torch, answers=(NO_NVIDIA, AMD))


class LyingDriver(NvidiaBox):
    """A driver that promises everything, but memory of these devices cannot be shared."""

    def __init__(self, *uuids: str, reason: str = "wrong-bytes") -> None:
        super().__init__()
        self.uuids = uuids
        self.reason = reason

    def prove_sharing(self, uuid: str) -> Canary:
        if uuid in self.uuids:
            raise RoundTripFailed(self.reason, "read", "these are the reader's words")
        return super().prove_sharing(uuid)


class MeetingDriver(NvidiaBox):
    """Its round trips each wait for another one to be under way."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2)

    def prove_sharing(self, uuid: str) -> Canary:
        self.together.wait(10)
        return super().prove_sharing(uuid)


class WslBox(NvidiaBox):
    """Linux as Windows runs it, with a driver that claims to work."""

    def __init__(self) -> None:
        release = "5.15.167.4-microsoft-standard-WSL2\n"
        super().__init__(files={"/proc/sys/kernel/osrelease": release})


class OwnKernelWslBox(NvidiaBox):
    """WSL2 with a kernel of the user's own making, known by its GPU device alone."""

    def __init__(self) -> None:
        super().__init__(files={"/dev/dxg": ""})


class JetsonBox(NvidiaBox):
    """A Tegra that only its device tree gives away, as inside a container."""

    def __init__(self) -> None:
        super().__init__(files={"/proc/device-tree/compatible": "nvidia,p3737\0nvidia,tegra234"})


class MacBox(PlainBox):
    def __init__(self, processor: str = "arm64") -> None:
        super().__init__(os_name="darwin", processor=processor)


class HiddenGpu(PlainBox):
    """A GPU that its driver shows only to processes without the hiding variables."""

    def __init__(self, seen_otherwise: DriverAnswer, **variables: str) -> None:
        super().__init__(variables={"PATH": "/bin", **variables})
        self.seen_otherwise = seen_otherwise

    def ask_drivers(self, environ: Mapping[str, str]) -> tuple[DriverAnswer, ...]:
        hidden = environ == self.variables
        assert hidden or environ == {"PATH": "/bin"}
        unseen = DriverAnswer(self.seen_otherwise.vendor, self.seen_otherwise.library)
        return (unseen if hidden else self.seen_otherwise,)


class FailingDriver(PlainBox):
    """An NVIDIA driver that does not come up, beside an AMD library without any device."""

    def __init__(self, failure: str, reason: str, library: str = "?") -> None:
        answer = DriverAnswer("nvidia", library, failure, reason)
        super().__init__(answers=(answer, DriverAnswer("amd", "libamdhip64.so.7")))


class EmptyDriver(PlainBox):
    """A driver that comes up and finds no device."""

    def __init__(self, **variables: str) -> None:
        answer = DriverAnswer("nvidia", "libcuda.so.1")
        super().__init__(answers=(answer, NO_AMD), variables=variables)
