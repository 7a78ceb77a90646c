"""Which device of this process an engine means, and whether its broker serves it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.devices import devices_named, open_device
from broker.devices.base import Device, DeviceError
from broker.errors import BrokerError, InternalError, UnsupportedPlatformForIPCError
from broker.platform import PlatformReport, check_ipc_platform_support
from engine_client.observer import Observer


def check_platform(device: str, broker: str, directory: Path | None) -> PlatformReport:
    """The platform check of an engine; where a device cannot be seen, with the broker's list too.

    Raises:
        UnsupportedPlatformForIPCError: before any socket is opened, unless to ask for that list.
    """
    try:
        return check_ipc_platform_support(where="engine", device=device)
    except UnsupportedPlatformForIPCError as error:
        if error.reason != "not-visible":
            raise
        raise _with_served(error, broker, directory) from None


def _with_served(
    error: UnsupportedPlatformForIPCError, broker: str, directory: Path | None
) -> UnsupportedPlatformForIPCError:
    try:
        with Observer(broker, directory) as observer:
            served = observer.served_devices
    except BrokerError:
        return error  # that nobody answers is another matter
    sentence = f"{error.sentence}; the broker serves {', '.join(served)}"
    return UnsupportedPlatformForIPCError(sentence, **error.fields, served=served)


def choose_device(wanted: str, platform: str, served: Sequence[str]) -> Device:
    """The first device that is meant and that the broker serves. Opens no context.

    Args:
        wanted: as `check_ipc_platform_support` takes it, and has accepted it.
        served: UUIDs.

    Raises:
        UnsupportedPlatformForIPCError: the broker serves none of them; names both sides' lists.
        InternalError: the driver failed, although the platform check found it usable.
    """
    try:
        seen = devices_named(wanted, platform)
        for uuid in seen:
            if uuid in served:
                return open_device(uuid, platform)
    except DeviceError as error:
        raise InternalError(f"the device {wanted} cannot be opened: {error}") from error
    meant = f"device {wanted} means {', '.join(seen)}"
    raise UnsupportedPlatformForIPCError(
        f"[weight-broker:engine] found platform {platform}: {meant} in this process, and the "
        f"broker serves {', '.join(served)}; only CUDA and ROCm devices that both sides see can "
        "share memory between processes; choose a device that is on both lists, start the broker "
        "with this one (--device), or load the checkpoint the ordinary way on this device",
        where="engine",
        platform=platform,
        reason="not-served",
        served=list(served),
    )
