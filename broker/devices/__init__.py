"""Where weights can live. `open_devices` is the only way anybody gets a device."""

from __future__ import annotations

from broker.devices.base import Device
from broker.devices.simulated import SimulatedDevice
from broker.errors import UnsupportedPlatformForIPCError


def open_devices(device: str) -> list[Device]:
    """The devices a broker serves, or an engine can map, after the platform check.

    Args:
        device: "auto" or "cuda" for the GPUs of this machine, "simulated" for host memory.
    """
    if device == "simulated":
        return [SimulatedDevice()]
    raise UnsupportedPlatformForIPCError(
        "this version of the weight broker serves no CUDA or ROCm device yet", platform=device
    )
