"""The fake drivers notice misuse: a check that never complains would prove nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.devices.cuda import CudaDevice
from broker.devices.discovery import open_devices
from broker.devices.driver import Driver, DriverError
from tests.fake_driver import headers
from tests.fake_driver.build import FakeDriver

SLAB = 2 << 20


class Clumsy:
    """Uses a driver as nobody should, one method a mistake."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.driver: Driver = device.driver
        self.slab = device.create(SLAB)

    def released_twice(self) -> None:
        handle = self.driver.import_slab(0, self.slab)
        self.driver.release(0, handle)
        self.driver.release(0, handle)

    def created_in_an_odd_size(self) -> None:
        self.driver.create_slab(0, SLAB + 4096, rdma=False)

    def mapped_where_nothing_is_reserved(self) -> None:
        handle = self.driver.import_slab(0, self.slab)
        self.driver.map(0, 0x10000000, SLAB, handle)

    def addresses_freed_while_mapped(self) -> None:
        mapping = self.device.map(self.slab, SLAB, writable=False)
        self.driver.free_address(0, mapping.address, SLAB)

    def unmapped_twice(self) -> None:
        mapping = self.device.map(self.slab, SLAB, writable=False)
        self.driver.unmap(0, mapping.address, SLAB)
        self.driver.unmap(0, mapping.address, SLAB)

    def accessed_before_it_is_mapped(self) -> None:
        address = self.driver.reserve(0, SLAB, SLAB)
        self.driver.allow(0, address, SLAB, writable=False)

    def read_without_access(self) -> None:
        handle = self.driver.import_slab(0, self.slab)
        address = self.driver.reserve(0, SLAB, SLAB)
        self.driver.map(0, address, SLAB, handle)
        self._copy_out(address)

    def read_after_unmapping(self) -> None:
        mapping = self.device.map(self.slab, SLAB, writable=False)
        mapping.close()
        self._copy_out(mapping.address)

    def _copy_out(self, address: int) -> None:
        with self.driver.open_context(0).current():
            self.driver.call("copy_out", ctypes.create_string_buffer(8), address, 8)

    def copied_into_a_reader(self) -> None:
        mapping = self.device.map(self.slab, SLAB, writable=False)
        self._copy_in(mapping.address, pinned=True)

    def copied_from_memory_that_is_not_pinned(self) -> None:
        mapping = self.device.map(self.slab, SLAB, writable=True)
        self._copy_in(mapping.address, pinned=False)

    def unmapped_under_a_copy(self) -> None:
        mapping = self.device.map(self.slab, SLAB, writable=True)
        self._copy_in(mapping.address, pinned=True)
        self.driver.unmap(0, mapping.address, SLAB)

    def _copy_in(self, address: int, *, pinned: bool) -> None:
        stream, memory = ctypes.c_void_p(), ctypes.c_void_p()
        with self.driver.open_context(0).current():
            self.driver.call("create_stream", ctypes.byref(stream), 1)
            self.driver.call("pin", ctypes.byref(memory), 4096, 0)
            source = memory if pinned else ctypes.create_string_buffer(8)
            self.driver.call("copy_in", address, source, 8, stream)


MISTAKES: dict[str, str] = {
    "released_twice": "which is no live handle",
    "created_in_an_odd_size": "no multiple of the granularity",
    "mapped_where_nothing_is_reserved": "range not reserved",
    "addresses_freed_while_mapped": "still mapped",
    "unmapped_twice": "unmap of a range that is not mapped",
    "accessed_before_it_is_mapped": "access was set for a range that is not mapped",
    "read_without_access": "from addresses that are not mapped",
    "read_after_unmapping": "from addresses that are not mapped",
    "copied_into_a_reader": "to addresses that are not mapped writable",
    "copied_from_memory_that_is_not_pinned": "memory that is not pinned",
    "unmapped_under_a_copy": "while copies into it were under way",
}


@pytest.fixture
def clumsy(fake: FakeDriver) -> Iterator[Clumsy]:
    """On a fake driver whose complaints are forgotten afterwards."""
    user = Clumsy(open_devices(fake.start())[0])
    yield user
    os.close(user.slab)
    fake.start()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_complained_about(fake: FakeDriver, clumsy: Clumsy, mistake: str) -> None:
    """Each misuse is written down, whether or not the call also fails."""
    make: Callable[[], None] = getattr(clumsy, mistake)
    try:
        make()
    except DriverError as error:
        assert error.code == 1  # noqa: PT017 - not every mistake is refused
    assert MISTAKES[mistake] in fake.complaints()
    fake.log.unlink()


def test_work_without_a_context_is_complained_about(fake_cuda: FakeDriver) -> None:
    """On NVIDIA's driver what needs a context is refused without one."""
    driver = fake_cuda.start()
    with pytest.raises(DriverError, match="invalid device context"):
        driver.call("synchronise")
    assert fake_cuda.complaints().startswith("cuCtxSynchronize without a context")
    fake_cuda.log.unlink()
    fake_cuda.start()


def test_a_descriptor_closed_before_access_is_set_is_complained_about(
    fake_hip: FakeDriver,
) -> None:
    """Some releases of AMD's runtime need it until then."""
    device = open_devices(fake_hip.start())[0]
    driver, slab = device.driver, device.create(SLAB)
    handle = driver.import_slab(0, slab)
    os.close(slab)
    address = driver.reserve(0, SLAB, SLAB)
    driver.map(0, address, SLAB, handle)
    with pytest.raises(DriverError):
        driver.allow(0, address, SLAB, writable=False)
    assert "closed between import and setting access" in fake_hip.complaints()
    fake_hip.log.unlink()
    fake_hip.start()


def test_what_a_process_leaves_at_exit_is_written_down(fake: FakeDriver) -> None:
    """A child that ends with a slab mapped is in the log."""
    child = os.fork()
    if not child:
        device = open_devices(fake.start())[0]
        device.map(device.create(SLAB), SLAB, writable=False)
        fake.control.fake_report()
        os._exit(0)
    os.waitpid(child, 0)
    assert "left at exit: 1 mappings" in fake.complaints()
    fake.log.unlink()


def test_headers_that_are_too_old_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROCm 5 had another structure under the same name: its headers would prove the wrong one."""
    monkeypatch.setattr(headers, "_folders", lambda vendor: iter([tmp_path]))
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip" / "hip_runtime_api.h").write_text("")
    version = tmp_path / "hip" / "hip_version.h"
    version.write_text("#define HIP_VERSION_MAJOR 5\n")
    assert headers.find("amd") is None
    version.write_text("#define HIP_VERSION_MAJOR 7\n")
    assert headers.find("amd") == tmp_path
