"""A thousand rounds leave descriptors, address space and driver objects as they were."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.devices.base import Segment
from broker.devices.cuda import CudaDevice
from broker.devices.discovery import open_devices
from tests.fake_driver.build import FakeDriver

ROUNDS = 1000
SLAB = 2 << 20


@pytest.fixture
def device(fake: FakeDriver) -> CudaDevice:
    return open_devices(fake.start())[0]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def regions() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def address_space() -> int:
    """Bytes of address space (proc(5): statm counts pages)."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def rounds(fake: FakeDriver, work: Callable[[], None], count: int = ROUNDS) -> None:
    """Run the work often enough that one object, region or descriptor lost a round would show."""
    for _ in range(10):
        work()  # caches and arenas of the interpreter fill up first
    live, before = fake.live(), (descriptors(), regions(), address_space())
    for _ in range(count):
        work()
    assert fake.live() == live
    assert descriptors() == before[0]
    # The interpreter may map an arena meanwhile; a slab is 2 MiB and two regions.
    assert regions() - before[1] < count // 10
    assert address_space() - before[2] < count * SLAB // 10


def test_creating_and_freeing(fake: FakeDriver, device: CudaDevice) -> None:
    """A slab whose descriptors are closed is gone altogether."""

    def work() -> None:
        slab = device.create(SLAB)
        os.close(device.freeze(slab))
        os.close(slab)

    rounds(fake, work)
    assert device.free_bytes() == device.properties.total_bytes


def test_mapping_and_unmapping(fake: FakeDriver, device: CudaDevice) -> None:
    """Mappings come and go without a trace, shared ones and others."""
    slab = device.create(SLAB)

    def work() -> None:
        first = device.map(slab, SLAB, writable=False, slab="slab")
        second = device.map(slab, SLAB, writable=False, slab="slab")
        first.close()
        second.close()

    rounds(fake, work)
    os.close(slab)


def test_writing(fake: FakeDriver, device: CudaDevice) -> None:
    """A writer takes its ring, stream, events, mapping and context with it."""
    slab = device.create(SLAB)

    def work() -> None:
        with device.open_writer(slab, SLAB, buffers=2) as writer:
            writer.submit(writer.buffer(), [Segment(0, 64, 0)])

    rounds(fake, work)
    os.close(slab)


def test_mapping_that_fails(fake: FakeDriver, device: CudaDevice) -> None:
    """A refusal in the middle of mapping loses nothing, however often it comes."""
    slab = device.create(SLAB)
    access = "cuMemSetAccess" if fake.vendor == "nvidia" else "hipMemSetAccess"
    fake.script(f"{access}=801")

    def work() -> None:
        with pytest.raises(Exception, match=access):
            device.map(slab, SLAB, writable=False)

    rounds(fake, work)
    os.close(slab)
