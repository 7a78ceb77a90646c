"""Finding the GPUs this process can see, by UUID.

UUIDs travel; ordinals do not: each process numbers the devices that its own environment shows.
"""

from __future__ import annotations

from broker.devices.base import DeviceError
from broker.devices.cuda import CudaDevice
from broker.devices.driver import Driver, DriverError, DriverMissing
from broker.devices.driver_cuda import CudaDriver
from broker.devices.driver_hip import HipDriver
from broker.devices.libraries import candidates, load_first


class DeviceNotVisible(DeviceError):
    """This process cannot see the device. `uuid`, and `visible`: the UUIDs it can see."""

    def __init__(self, uuid: str, visible: list[str]) -> None:
        super().__init__(
            f"device {uuid} cannot be seen by this process, which sees "
            f"{', '.join(visible) or 'no device'} (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and "
            "HIP_VISIBLE_DEVICES hide devices)"
        )
        self.uuid = uuid
        self.visible = visible


def open_driver(platform: str = "") -> Driver:
    """The driver of this node, loaded and initialised in this process. May take seconds.

    With both vendors' libraries present it is the one that sees a device. Opens no context.

    Args:
        platform: "cuda" or "rocm": this one only.

    Raises:
        DriverMissing: no library can be loaded.
        DriverError: none of those loaded initialises; that of the last one tried.
    """
    every: tuple[type[Driver], ...] = (CudaDriver, HipDriver)
    kinds = [kind for kind in every if platform in ("", kind.platform)]
    tried: list[str] = []
    failure: DriverError | None = None
    empty: Driver | None = None
    for kind in kinds:
        library, failures = load_first(candidates(kind.vendor))
        tried += failures
        if library is None:
            continue
        driver = kind(library)
        try:
            driver.initialise()
            if driver.device_count():
                return driver
            empty = empty or driver
        except DriverError as error:
            failure = error
    if empty is not None:
        return empty
    raise failure or DriverMissing(tried)


def visible_uuids(driver: Driver) -> list[str]:
    """The UUIDs of the devices this process sees, by ordinal. Opens no context.

    Raises:
        DeviceError: two devices have the same UUID (partitions of one board with some releases of
            AMD's runtime): weights could not be told apart.
    """
    uuids = [driver.uuid(ordinal) for ordinal in range(driver.device_count())]
    doubled = sorted({uuid for uuid in uuids if uuids.count(uuid) > 1})
    if doubled:
        raise DeviceError(
            f"several visible devices have the UUID {doubled[0]}, so weights on them cannot be "
            "told apart: make only one of them visible to each broker and its engines"
        )
    return uuids


def open_devices(driver: Driver) -> list[CudaDevice]:
    """Every device this process sees, by ordinal.

    Raises:
        DeviceError: a device cannot be described or lacks virtual memory management.
    """
    return [CudaDevice(driver, ordinal) for ordinal in range(len(visible_uuids(driver)))]


def open_device(driver: Driver, uuid: str) -> CudaDevice:
    """The device with this UUID, under this process's own ordinal.

    Raises:
        DeviceNotVisible: it is hidden from this process, or not in this machine.
        DeviceError: it cannot be described or lacks virtual memory management.
    """
    visible = visible_uuids(driver)
    if uuid not in visible:
        raise DeviceNotVisible(uuid, visible)
    return CudaDevice(driver, visible.index(uuid))
