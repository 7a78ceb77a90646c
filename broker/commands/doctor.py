"""`weight-broker doctor`: the platform check for a person, then the devices and their memory."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TextIO

from broker.amounts import human
from broker.commands.parsing import Commands, Examples, add_device, add_plain
from broker.config import check_device
from broker.device_names import AUTO
from broker.errors import UnsupportedPlatformForIPCError

if TYPE_CHECKING:
    from broker.devices.base import Device
    from broker.platform_probe import Probe

EXAMPLES: Examples = (
    ("doctor", "every GPU that this process sees"),
    ("doctor --device simulated", "the device for trying out"),
)


def add_to(commands: Commands) -> None:
    text = "check step by step whether a broker can work here"
    add_device(add_plain(commands, "doctor", check_machine, text, examples=EXAMPLES))


def check_machine(options: argparse.Namespace) -> int:
    """Raises `BadRequest` for a device's name that is none, as `serve` does."""
    device = ",".join(options.device or [AUTO])
    check_device(device)
    return examine(device)


def examine(device: str, out: TextIO | None = None, probe: Probe | None = None) -> int:
    """Print each step with a tick, or the sentence of the one that failed; the exit code.

    On GPUs the last step lets processes share memory, which takes seconds. Opens no context here.

    Args:
        device: as `BrokerConfig.device`.
        out: where to print; None: standard output.
        probe: what to look with; for tests.
    """
    from broker.platform import platform_steps

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
    from broker.devices import open_devices
    from broker.devices.base import DeviceError

    try:
        return [_described(found) for found in open_devices(device)]
    except DeviceError as error:
        return [f"the devices cannot be opened: {error}"]


def _described(device: Device) -> str:
    from broker.devices.base import DeviceError

    properties = device.properties
    try:
        free = f"{human(device.free_bytes())} of {human(properties.total_bytes)} free"
    except DeviceError as error:
        free = f"{human(properties.total_bytes)}; how much is free is unknown: {error}"
    return f"device {properties.uuid} ({properties.name}): {free}"
