"""The devices of a server: what it opens, what it may hold there, and that it opens no context."""

from __future__ import annotations

import pytest

from broker.device_names import SIMULATED_UUID as UUID
from broker.devices import devices_named, open_device, open_devices
from broker.devices.discovery import DeviceNotVisible
from broker.errors import BadRequest, InternalError, OverBudget
from broker.memfd import sealed_memfd
from broker.served import limit_of, open_served
from broker.store import Store
from tests.fake_driver.build import FakeDriver

GRANULE = 2 << 20
CONTEXT = {"nvidia": "cuDevicePrimaryCtxRetain", "amd": "hipStreamCreateWithFlags"}
"""What only a process calls that uses a device."""


def manifest() -> int:
    return sealed_memfd("weight-broker-manifest", b"manifest")


def test_a_server_opens_no_context(fake: FakeDriver) -> None:
    """A set is created, frozen and freed, free memory is asked for, and no device is used."""
    fake.start("devices=2")
    devices = open_served("auto")
    assert len(devices) == 2
    for number, (uuid, device) in enumerate(devices.items()):
        assert limit_of(device, None) > 0
        store = Store(devices)
        store.create(number, uuid, GRANULE, manifest())
        store.freeze(number, uuid)
        assert device.free_bytes() == device.properties.total_bytes - GRANULE
        store.free(number)
        assert device.free_bytes() == device.properties.total_bytes
    assert fake.calls(CONTEXT[fake.vendor]) == 0
    assert fake.live() == {}


def test_the_drivers_refusal_has_numbers(fake: FakeDriver) -> None:
    """More than the device has is over budget, by the driver's word."""
    fake.start("total=4M")
    devices = open_served("auto")
    [uuid] = devices
    with pytest.raises(OverBudget) as caught:
        Store(devices).create(1, uuid, 3 * GRANULE, manifest())
    assert caught.value.fields == {"requested": 6 << 20, "free": 4 << 20, "device": uuid}


def test_a_refusal_whose_free_memory_is_unknown(fake_cuda: FakeDriver) -> None:
    """Without the management library it is the same error, with one number less."""
    fake_cuda.start("total=4M")
    fake_cuda.script("nvmlInit_v2=1 nvmlDeviceGetHandleByUUID=1")
    devices = open_served("auto")
    [uuid] = devices
    with pytest.raises(OverBudget, match="how many are free is unknown") as caught:
        Store(devices).create(1, uuid, 3 * GRANULE, manifest())
    assert caught.value.free is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [(None, 960 << 20), ("80%", (1 << 30) * 8 // 10), ("512m", 512 << 20), ("2g", 2 << 30)],
)
def test_limits(fake: FakeDriver, text: str | None, limit: int) -> None:
    """What is free less a sixteenth, a share of all memory, or the very bytes."""
    fake.start("total=1G")
    [device] = open_served("auto").values()
    assert limit_of(device, text) == limit


def test_no_limit_where_free_memory_is_unknown(fake_cuda: FakeDriver) -> None:
    """Nobody guesses: the sentence asks for a limit and says why; one that is given is taken."""
    fake_cuda.start()
    fake_cuda.script("nvmlDeviceGetHandleByUUID=6")
    [device] = open_served("auto").values()
    with pytest.raises(BadRequest, match=r"^give a --memory-limit: nvmlDeviceGetHandleByUUID on "):
        limit_of(device, None)
    assert limit_of(device, "50%") == 2 << 30


def test_a_driver_that_fails_after_the_check(fake_cuda: FakeDriver) -> None:
    """It is the broker's trouble, in a sentence."""
    fake_cuda.start("", "cuDeviceGetName=999")
    with pytest.raises(InternalError, match=r"^the devices cannot be opened: cuDeviceGetName"):
        open_served("auto")


def test_devices_by_name(fake: FakeDriver) -> None:
    """Numbers, UUIDs and lists of them mean the devices they say, in that order, each once."""
    fake.start("devices=3")
    one, two, three = devices_named("auto")
    assert devices_named("cuda") == [one, two, three]
    assert devices_named(f"cuda:2,{one},cuda:0") == [three, one]
    assert [device.ordinal for device in open_devices("cuda:1,cuda:0")] == [1, 0]
    with pytest.raises(DeviceNotVisible, match="device cuda:3 cannot be seen by this process"):
        devices_named("cuda:3")


def test_the_simulated_device_has_one_name() -> None:
    """Asked for by name, found by its UUID; it needs no driver."""
    assert devices_named("simulated") == [UUID]
    assert open_device(UUID).properties.platform == "simulated"


def test_one_vendors_driver_can_be_demanded(fake_hip: FakeDriver) -> None:
    """Where the other vendor's is meant, this one's devices are not taken for it."""
    fake_hip.start()
    [uuid] = devices_named("auto", "rocm")
    assert open_device(uuid, "rocm").properties.platform == "rocm"
    with pytest.raises(Exception, match="no GPU driver can be loaded"):
        devices_named("auto", "cuda")
