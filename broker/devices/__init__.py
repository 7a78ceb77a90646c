"""Where weights can live. The functions here are the only way anybody gets a device.

They open no context, and are for after the platform check, which says more about what is missing.
What drives GPUs is imported with the first GPU: the simulated device has no use for it.
"""

from __future__ import annotations

from broker.device_names import SIMULATED_UUID, devices_meant, is_simulated
from broker.devices.base import Device
from broker.devices.simulated import SimulatedDevice


def devices_named(device: str, platform: str = "") -> list[str]:
    """The UUIDs of the devices that a name means in this process.

    Args:
        device: as `check_ipc_platform_support` takes it.
        platform: "cuda" or "rocm" where the drivers of both may be present; "": whichever sees a
            device.

    Raises:
        DeviceNotVisible: one of several names means none that this process sees.
        DeviceError: there is no usable driver.
    """
    if is_simulated(device):
        return [SIMULATED_UUID]
    from broker.devices.discovery import DeviceNotVisible, open_driver, visible_uuids

    visible = visible_uuids(open_driver(platform))
    found, missing = devices_meant(device, visible)
    if missing:
        raise DeviceNotVisible(missing[0], visible)
    return found


def open_device(uuid: str, platform: str = "") -> Device:
    """The device with this UUID, under this process's own number.

    Raises:
        DeviceNotVisible: this process does not see it.
        DeviceError: it cannot be described or lacks virtual memory management.
    """
    if uuid == SIMULATED_UUID:
        return SimulatedDevice()
    from broker.devices import discovery

    return discovery.open_device(discovery.open_driver(platform), uuid)


def open_devices(device: str, platform: str = "") -> list[Device]:
    """Every device that a name means, as `devices_named` and `open_device`."""
    return [open_device(uuid, platform) for uuid in devices_named(device, platform)]
