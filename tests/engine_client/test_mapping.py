"""How an engine maps and lets go: the canary it compares once, and the lease it keeps meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from broker import wire
from broker.devices import open_device, open_devices
from broker.devices.base import Canary, Device, DeviceError, Segment
from broker.devices.roundtrip import PATTERN_BYTES, _pattern
from broker.devices.simulated import SimulatedDevice
from broker.errors import InternalError, UnsupportedPlatformForIPCError
from broker.weights import WeightKey
from engine_client import mapping
from engine_client.deadline import Deadline
from engine_client.mapping import compare_canary_once, let_go, map_granted
from engine_client.session import Session
from tests.fake_driver.build import FakeDriver
from tests.fake_driver.fixtures import fake, fake_libraries

__all__ = ["fake", "fake_libraries"]  # fixtures of this file's tests

GRANULE = 2 << 20
PATIENCE_SECONDS = 10.0


class CanarySession:
    """A session with a broker that holds one canary, and counts who asks for it."""

    epoch = "epoch"

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self.asked = 0

    @contextmanager
    def canary(self, device: str, deadline: Deadline) -> Iterator[Canary]:
        self.asked += 1
        yield self._canary


class BusyDevice:
    """A mapping that cannot be unmapped the first times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.closed = threading.Event()

    def close(self) -> None:
        if self.times:
            self.times -= 1
            raise DeviceError("cuCtxSynchronize: a graph is being captured")
        self.closed.set()


@pytest.fixture(autouse=True)
def nothing_compared() -> Iterator[None]:
    """Each test is a process that has mapped nothing yet."""
    mapping._compared.clear()
    yield
    mapping._compared.clear()


@pytest.fixture
def device(fake: FakeDriver) -> Device:
    fake.start()
    return open_devices("auto")[0]


@pytest.fixture
def canary(device: Device) -> Iterator[Canary]:
    """As the writer of a round trip leaves it."""
    slab = device.create(GRANULE)
    with device.open_writer(slab, GRANULE, buffers=1) as writer:
        for offset in (0, GRANULE - PATTERN_BYTES):
            buffer = writer.buffer()
            buffer.view[:PATTERN_BYTES] = _pattern("seed")
            writer.submit(buffer, [Segment(0, PATTERN_BYTES, offset)])
    yield Canary(slab, GRANULE, "seed")
    os.close(slab)


def compare(canary: Canary, device: Device) -> CanarySession:
    session = CanarySession(canary)
    compare_canary_once(cast("Session", session), device, Deadline(PATIENCE_SECONDS))
    return session


def granted(device: Device, nbytes: int) -> wire.Granted:
    key = WeightKey(device=device.properties.uuid)
    return wire.Granted("1", 7, key, None, nbytes, 1, "resident")


# --- the canary ---------------------------------------------------------------------------------


def test_the_canary_is_compared_once(device: Device, canary: Canary, fake: FakeDriver) -> None:
    """The first map asks for it, later ones do not, and nothing of it is kept."""
    assert compare(canary, device).asked == 1
    assert compare(canary, device).asked == 0
    assert fake.live() == {}


def test_threads_that_map_first_compare_once(device: Device, canary: Canary) -> None:
    """One of them compares and the others wait for its result."""
    session = CanarySession(canary)
    together = threading.Barrier(4)

    def work() -> None:
        together.wait(PATIENCE_SECONDS)
        compare_canary_once(cast("Session", session), device, Deadline(PATIENCE_SECONDS))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert session.asked == 1


def test_other_bytes_are_refused(device: Device, canary: Canary, fake: FakeDriver) -> None:
    """Memory that is not what the broker's processes wrote; asked again, it is compared again."""
    other = Canary(canary.descriptor, canary.nbytes, "another seed")
    for _ in range(2):
        with pytest.raises(UnsupportedPlatformForIPCError) as caught:
            compare(other, device)
        assert caught.value.reason == "canary-wrong-bytes"
        uuid, platform = device.properties.uuid, device.properties.platform
        assert str(caught.value).startswith(
            f"[weight-broker:engine] found platform {platform}: this process cannot read what the "
            f"broker's own processes wrote to device {uuid}: memory of {uuid} shared between "
            "processes reads wrong bytes: byte 0 is "
        )
        assert str(caught.value).endswith(
            "; only CUDA and ROCm devices can share memory between processes; run engine and "
            "broker under the same driver, or load the checkpoint the ordinary way on this platform"
        )
    assert compare(canary, device).asked == 1


def test_a_canary_that_cannot_be_mapped_is_refused(
    device: Device, canary: Canary, fake: FakeDriver
) -> None:
    """The driver's words are in the sentence, and nothing stays mapped."""
    call = "cuMemMap" if fake.vendor == "nvidia" else "hipMemMap"
    fake.script(f"{call}=801")
    with pytest.raises(UnsupportedPlatformForIPCError, match=call) as caught:
        compare(canary, device)
    assert caught.value.reason == "canary-failed"
    assert fake.live() == {}


def test_the_simulated_device_has_no_canary() -> None:
    """Host memory is shared by the kernel: nothing is asked for."""
    assert compare(Canary(-1, 0, ""), SimulatedDevice()).asked == 0


def test_a_forked_child_has_compared_nothing(device: Device, canary: Canary) -> None:
    """What its parent knew is forgotten, and a lock that another thread held is not its own."""
    compare(canary, device)
    with mapping._comparing:
        child = os.fork()
        if not child:
            free = mapping._comparing.acquire(timeout=PATIENCE_SECONDS)
            os._exit(0 if free and not mapping._compared else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- mapping and letting go ---------------------------------------------------------------------


def test_one_set_is_mapped_once_a_process(device: Device, canary: Canary) -> None:
    """Two clients of a process map a set of one broker at the same addresses."""
    session = cast("Session", CanarySession(canary))
    slab = device.create(GRANULE)
    other = open_device(device.properties.uuid)
    grant, deadline = granted(device, GRANULE), Deadline(PATIENCE_SECONDS)
    mappings = [map_granted(session, at, grant, slab, deadline) for at in (device, other)]
    assert mappings[0].address == mappings[1].address
    for one in mappings:
        one.close()
    os.close(slab)


def test_a_slab_that_cannot_be_mapped(device: Device, canary: Canary, tmp_path: Path) -> None:
    """What the device says of it is an error of the broker's, which delivered it."""
    session = cast("Session", CanarySession(canary))
    path = tmp_path / "no slab"
    path.write_bytes(bytes(8))
    grant, deadline = granted(device, GRANULE), Deadline(PATIENCE_SECONDS)
    with path.open("rb") as file, pytest.raises(InternalError, match="cannot be mapped: "):
        map_granted(session, device, grant, file.fileno(), deadline)


def test_letting_go_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A device that is busy is asked again in another thread, and each time is logged."""
    busy = BusyDevice(times=3)
    let_go(busy.close, delay=0.001)
    assert busy.closed.wait(PATIENCE_SECONDS)
    assert [record.message for record in caplog.records] == [
        f"weights stay mapped and leased for now, next try in {delay} s: "
        "cuCtxSynchronize: a graph is being captured"
        for delay in ("0.001", "0.002", "0.004")
    ]


def test_letting_go_at_once() -> None:
    """Usually there is one try, in the thread that lets go."""
    idle = BusyDevice(times=0)
    let_go(idle.close)
    assert idle.closed.is_set()
