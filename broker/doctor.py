"""`weight-broker doctor`: the platform check for a person, then the devices and their memory."""

from __future__ import annotations

import sys
from typing import TextIO

from broker.admin import human
from broker.devices import open_devices
from broker.devices.base import Device, DeviceError
from broker.errors import UnsupportedPlatformForIPCError
from broker.platform import platform_steps
from broker.platform_probe import Probe


def examine(device: str, out: TextIO | None = None, probe: Probe | None = None) -> int:
    """Print each step with a tick, or the sentence of the one that failed; the exit code.

    On GPUs the last step lets processes share memory, which takes seconds. Opens no context here.

    Args:
        device: as `BrokerConfig.device`.
        out: where to print; None: standard output.
        probe: what to look with; for tests.
    """
    out = out or sys.stdout
    passed, failed = _marks(out)
    steps = platform_steps("broker", device, probe)
    for step in steps:
        print(f"{passed if step.ok else failed} {step.name}: {step.sentence}", file=out)
    if not steps[-1].ok:
        return UnsupportedPlatformForIPCError.exit_code
    for line in _devices(device):
        print(line, file=out)
    return 0


def _marks(out: TextIO) -> tuple[str, str]:
    """For a step that passed or failed, as far as the terminal can show them."""
    try:
        "✓✗".encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return "ok  ", "FAIL"
    return "✓", "✗"


def _devices(device: str) -> list[str]:
    try:
        return [_described(found) for found in open_devices(device)]
    except DeviceError as error:
        return [f"the devices cannot be opened: {error}"]


def _described(device: Device) -> str:
    properties = device.properties
    try:
        free = f"{human(device.free_bytes())} of {human(properties.total_bytes)} free"
    except DeviceError as error:
        free = f"{human(properties.total_bytes)}; how much is free is unknown: {error}"
    return f"device {properties.uuid} ({properties.name}): {free}"
