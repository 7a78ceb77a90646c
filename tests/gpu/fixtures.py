"""The fixture that gives a test a real GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.devices.base import DeviceError
from broker.devices.cuda import CudaDevice
from broker.devices.discovery import open_devices, open_driver
from broker.devices.driver import DriverMissing


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDevice]:
    """The first GPU this process sees, with a context that stays open for the session.

    Skips with the driver's words where there is none. (For trying these tests out without a GPU,
    give a fake driver by WEIGHT_BROKER_CUDA_LIBRARY; those which need torch's GPU still skip.)
    """
    try:
        devices = open_devices(open_driver())
    except DriverMissing:
        pytest.skip("no GPU: no driver of either vendor is installed")
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    if not devices:
        pytest.skip("no GPU: the driver sees no device")
    # Without it every mapping would open and destroy the primary context, which takes long.
    context = devices[0].driver.open_context(devices[0].ordinal)
    yield devices[0]
    context.close()
