"""The devices a server serves, and how many bytes it may hold on each."""

from __future__ import annotations

from broker.config import memory_limit_bytes
from broker.devices import open_devices
from broker.devices.base import Device, DeviceError
from broker.errors import BadRequest, InternalError


def open_served(names: str) -> dict[str, Device]:
    """The devices by UUID. Opens no context.

    Args:
        names: as `BrokerConfig.device`.

    Raises:
        InternalError: a driver that the platform check found usable is not.
    """
    try:
        return {device.properties.uuid: device for device in open_devices(names)}
    except DeviceError as error:
        raise InternalError(f"the devices cannot be opened: {error}") from error


def limit_of(device: Device, memory_limit: str | None) -> int:
    """Bytes the broker may hold on the device.

    Args:
        memory_limit: as `BrokerConfig.memory_limit`.

    Raises:
        BadRequest: there is no limit given, and how much is free cannot be told.
    """
    free = 0
    if memory_limit is None:
        try:
            free = device.free_bytes()
        except DeviceError as error:
            raise BadRequest(f"give a --memory-limit: {error}") from error
    total = device.properties.total_bytes
    return memory_limit_bytes(memory_limit, free_bytes=free, total_bytes=total)
