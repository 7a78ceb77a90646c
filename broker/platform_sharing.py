"""Can these devices share memory? The last steps of the platform check, for GPUs with a driver.

Attributes promise too much (WSL2, containers), so the step that decides is a real round trip.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from broker.device_names import devices_meant
from broker.platform_probe import DeviceAnswer, DriverAnswer, Probe, Vendor

if TYPE_CHECKING:
    from broker.devices.base import Canary
    from broker.devices.roundtrip import RoundTripFailed

Where = Literal["broker", "engine"]

PLATFORMS: dict[Vendor, str] = {"nvidia": "cuda", "amd": "rocm"}
MAKERS: dict[Vendor, str] = {"nvidia": "NVIDIA", "amd": "AMD"}

OLDEST_HIP = 60_000_000
"""HIP 6.0 (major * 10^7 + minor * 10^5 + patch). `hipMemAllocationProp` had another layout before
(headers of ROCm 5.2 and 7.1)."""

_COMPUTE_MODES = {
    2: ("prohibited", "PROHIBITED, which admits no process"),
    3: ("exclusive", "EXCLUSIVE_PROCESS, which admits one process and not loaders and engines"),
}
"""CUcomputemode, hipComputeMode, where they forbid what we do."""


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


class SharingSteps:
    """The steps for one side, as far as they are about devices that a driver has described.

    Attributes:
        canaries: what round trips left behind, by UUID; the holder owns the descriptors.
    """

    def __init__(self, where: Where, probe: Probe) -> None:
        self.where = where
        self.probe = probe
        self.canaries: dict[str, Canary] = {}

    def sharing(self, answer: DriverAnswer, device: str) -> Iterator[Step]:
        """For the broker all of them; an engine relies on what its broker has proven."""
        yield self._release(answer)
        yield self._meant(answer, device)
        if self.where == "engine":
            return
        uuids, _missing = devices_meant(device, [found.uuid for found in answer.described])
        meant = [found for found in answer.described if found.uuid in uuids]
        yield self._export(answer, meant)
        yield self._compute_mode(answer, meant)
        yield self._round_trip(answer, meant)

    def close_canaries(self) -> None:
        while self.canaries:
            os.close(self.canaries.popitem()[1].descriptor)

    def refused(self, name: str, platform: str, reason: str, found: str, fix: str = "") -> Step:
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

    def _release(self, answer: DriverAnswer) -> Step:
        name, platform = "driver release", PLATFORMS[answer.vendor]
        if answer.vendor == "amd" and answer.version < OLDEST_HIP:
            found = f"{describe(answer)} is older than ROCm 6, whose memory calls are others"
            return self.refused(name, platform, "rocm-too-old", found, "install ROCm 6 or newer")
        if answer.undescribed:
            found = f"{describe(answer)} cannot describe its devices: {answer.undescribed}"
            return self.refused(name, platform, "not-described", found, "update the driver")
        return Step(name, ok=True, sentence="new enough")

    def _meant(self, answer: DriverAnswer, device: str) -> Step:
        name, platform = "devices meant", PLATFORMS[answer.vendor]
        visible = [found.uuid for found in answer.described]
        uuids, missing = devices_meant(device, visible)
        if not missing:
            return Step(name, ok=True, sentence=", ".join(uuids), platform=platform)
        found = (
            f"device {missing[0]} cannot be seen by this process, which sees {', '.join(visible)}"
        )
        fix = "name one of those"
        if any(uuid.startswith("MIG-") for uuid in (*missing, *visible)):
            fix += (
                ", or, since a process sees one MIG slice, start a broker and its engines with "
                "CUDA_VISIBLE_DEVICES set to that slice"
            )
        return self.refused(name, platform, "not-visible", found, fix)

    def _export(self, answer: DriverAnswer, meant: Sequence[DeviceAnswer]) -> Step:
        name, platform = "memory export", PLATFORMS[answer.vendor]
        for device in meant:
            who = f"{device.uuid} ({device.name})"
            if not device.virtual_memory:
                found = f"{who} has no virtual memory management, without which nothing is shared"
                return self.refused(name, platform, "no-vmm", found, _others(answer, device))
            if not device.posix_descriptors:
                found = f"the memory of {who} cannot be exported as POSIX descriptors"
                fix = _others(answer, device)
                return self.refused(name, platform, "no-descriptors", found, fix)
        return Step(name, ok=True, sentence="virtual memory management and POSIX descriptors")

    def _compute_mode(self, answer: DriverAnswer, meant: Sequence[DeviceAnswer]) -> Step:
        name, platform = "compute mode", PLATFORMS[answer.vendor]
        for device in meant:
            if device.compute_mode in _COMPUTE_MODES:
                reason, text = _COMPUTE_MODES[device.compute_mode]
                found = f"{device.uuid} ({device.name}) is in compute mode {text}"
                fix = "set it to DEFAULT"
                if answer.vendor == "nvidia":
                    fix += f" (nvidia-smi -i {device.uuid} -c DEFAULT)"
                return self.refused(name, platform, reason, found, fix)
        return Step(name, ok=True, sentence="shared")

    def _round_trip(self, answer: DriverAnswer, meant: Sequence[DeviceAnswer]) -> Step:
        """On all devices at the same time: each costs its children seconds."""
        name, platform = "round trip", PLATFORMS[answer.vendor]
        began = time.monotonic()
        from concurrent.futures import ThreadPoolExecutor  # which the simulated device needs not

        with ThreadPoolExecutor(len(meant)) as pool:
            failures = list(pool.map(lambda device: self._prove(device.uuid), meant))
        for device, failure in zip(meant, failures, strict=True):
            if failure is not None:
                found = (
                    f"memory of {device.uuid} ({device.name}) could not be shared between two "
                    f"processes: {failure}"
                )
                fix = _others(answer, device)
                return self.refused(name, platform, f"round-trip-{failure.reason}", found, fix)
        seconds = time.monotonic() - began
        sentence = f"a process read what another had written, after {seconds:.1f} s"
        return Step(name, ok=True, sentence=sentence, platform=platform)

    def _prove(self, uuid: str) -> RoundTripFailed | None:
        from broker.devices.roundtrip import RoundTripFailed  # not at the top: it needs Linux

        try:
            self.canaries[uuid] = self.probe.prove_sharing(uuid)
        except RoundTripFailed as error:
            return error
        return None


def _others(answer: DriverAnswer, device: DeviceAnswer) -> str:
    """What else could be served, where there is anything else."""
    others = [found.uuid for found in answer.described if found.uuid != device.uuid]
    return f"serve other devices by name (--device {','.join(others)})" if others else ""


def describe(answer: DriverAnswer) -> str:
    """ "the NVIDIA driver for CUDA 12.8 (libcuda.so.1)"."""
    version = f" for {_version(answer)}" if answer.version else ""
    return f"the {MAKERS[answer.vendor]} driver{version} ({answer.library})"


def _version(answer: DriverAnswer) -> str:
    """ "CUDA 12.8" for 12080 (cuDriverGetVersion), "HIP 7.1" for 70125424 (hipDriverGetVersion)."""
    if answer.vendor == "nvidia":
        return f"CUDA {answer.version // 1000}.{answer.version % 1000 // 10}"
    return f"HIP {answer.version // 10_000_000}.{answer.version // 100_000 % 100}"
