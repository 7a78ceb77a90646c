"""Slabs on a GPU, over the fake drivers: what the contract tests cannot know of."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.devices import cuda
from broker.devices.base import PIECE_BYTES, DeviceError, DeviceOutOfMemory, Segment
from broker.devices.cuda import PATIENCE_SECONDS, RETRY_SECONDS, CudaDevice
from broker.devices.discovery import open_devices, open_driver
from broker.devices.driver import DriverError
from broker.devices.libraries import NVML_OVERRIDE
from tests.fake_driver.build import FakeDriver

MIB = 1 << 20
SLAB = 4 * MIB

CALLS = {
    "nvidia": {
        "create": "cuMemCreate",
        "export": "cuMemExportToShareableHandle",
        "import": "cuMemImportFromShareableHandle",
        "properties": "cuMemGetAllocationPropertiesFromHandle",
        "reserve": "cuMemAddressReserve",
        "map": "cuMemMap",
        "access": "cuMemSetAccess",
        "unmap": "cuMemUnmap",
        "free_address": "cuMemAddressFree",
        "release": "cuMemRelease",
        "synchronise": "cuCtxSynchronize",
        "open": "cuDevicePrimaryCtxRetain",
        "stream": "cuStreamCreate",
        "synchronise_stream": "cuStreamSynchronize",
        "pin": "cuMemHostAlloc",
        "event": "cuEventCreate",
        "wait": "cuEventSynchronize",
        "copy": "cuMemcpyHtoDAsync_v2",
    },
    "amd": {
        "create": "hipMemCreate",
        "export": "hipMemExportToShareableHandle",
        "import": "hipMemImportFromShareableHandle",
        "properties": "hipMemGetAllocationPropertiesFromHandle",
        "reserve": "hipMemAddressReserve",
        "map": "hipMemMap",
        "access": "hipMemSetAccess",
        "unmap": "hipMemUnmap",
        "free_address": "hipMemAddressFree",
        "release": "hipMemRelease",
        "synchronise": "hipDeviceSynchronize",
        "open": "hipGetDevice",
        "stream": "hipStreamCreateWithFlags",
        "synchronise_stream": "hipStreamSynchronize",
        "pin": "hipHostMalloc",
        "event": "hipEventCreateWithFlags",
        "wait": "hipEventSynchronize",
        "copy": "hipMemcpyHtoDAsync",
    },
}
"""The vendors' names for what a test lets fail."""


@pytest.fixture
def device(fake: FakeDriver) -> CudaDevice:
    return open_devices(fake.start())[0]


@pytest.fixture
def slab(device: CudaDevice) -> Iterator[int]:
    descriptor = device.create(SLAB)
    yield descriptor
    os.close(descriptor)


def fault(fake: FakeDriver, operation: str, what: str = "801") -> None:
    """Let the vendor's call for an operation fail from now on."""
    fake.script(f"{CALLS[fake.vendor][operation]}={what}")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


# --- the owner --------------------------------------------------------------------------------


def test_the_owner_opens_no_context(fake_cuda: FakeDriver) -> None:
    """Creating, freezing and asking for free memory cost the device nothing but the slab."""
    device = open_devices(fake_cuda.start())[0]
    slab = device.create(SLAB)
    reader = device.freeze(slab)
    device.free_bytes()
    os.close(reader)
    os.close(slab)
    assert fake_cuda.calls("cuDevicePrimaryCtxRetain") == 0
    assert fake_cuda.live() == {}


@pytest.mark.parametrize("rdma", [0, 1])
def test_memory_is_made_fit_for_rdma_where_the_device_can(fake_cuda: FakeDriver, rdma: int) -> None:
    """The fake complains when the flag and the attribute disagree; it cannot be added later."""
    device = open_devices(fake_cuda.start(f"rdma={rdma}"))[0]
    os.close(device.create(SLAB))


@pytest.mark.parametrize("operation", ["create", "export", "release"])
def test_a_creation_that_fails_leaves_nothing(
    fake: FakeDriver, device: CudaDevice, operation: str
) -> None:
    """Whichever step fails, neither memory nor descriptor stays behind."""
    before = descriptors()
    fault(fake, operation)
    with pytest.raises(DriverError, match="operation not supported"):
        device.create(SLAB)
    if operation == "release":
        fake.start()  # what the driver would not take back, nobody can
    assert descriptors() == before


class TestClock:
    """Time that passes only while somebody waits."""

    __test__ = False

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def patient(fake: FakeDriver, clock: TestClock) -> CudaDevice:
    return CudaDevice(fake.start(), 0, clock=clock, wait=clock.wait)


def test_creation_waits_for_the_memory_of_a_dead_process(fake: FakeDriver) -> None:
    """Out of memory three times, then the driver has cleaned up: the slab is made."""
    clock = TestClock()
    device = patient(fake, clock)
    fake.script(f"{CALLS[fake.vendor]['create']}:1-3=2")
    os.close(device.create(SLAB))
    assert clock.waits == [RETRY_SECONDS] * 3


def test_creation_gives_up_with_numbers(fake: FakeDriver) -> None:
    """Out of memory for good: an error after the deadline that says how much there is."""
    clock = TestClock()
    device = patient(fake, clock)
    fault(fake, "create", "2")
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.create(SLAB)
    assert PATIENCE_SECONDS <= clock.now < PATIENCE_SECONDS + 2 * RETRY_SECONDS
    sentence = str(caught.value)
    assert sentence.startswith(f"{CALLS[fake.vendor]['create']} on {device.properties.uuid}: ")
    assert f"{SLAB} bytes were asked for, {4 << 30} of {4 << 30} bytes are free" in sentence


def test_more_than_the_device_has_is_refused_at_once(fake: FakeDriver) -> None:
    """No waiting helps there, and the driver is not asked."""
    clock = TestClock()
    device = patient(fake, clock)
    with pytest.raises(DeviceOutOfMemory, match=f"{8 << 30} bytes were asked for"):
        device.create(8 << 30)
    assert clock.waits == []
    assert fake.calls(CALLS[fake.vendor]["create"]) == 0


def test_another_failure_is_not_waited_for(fake: FakeDriver) -> None:
    """Only want of memory can pass by itself."""
    clock = TestClock()
    device = patient(fake, clock)
    fault(fake, "create", "801")
    with pytest.raises(DriverError):
        device.create(SLAB)
    assert clock.waits == []


# --- free memory ------------------------------------------------------------------------------


def test_free_memory_counts_what_every_process_holds(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """A slab is missing from the free memory until its last holder, here another process, dies."""
    total = device.properties.total_bytes
    assert device.free_bytes() == total - SLAB
    code = "import os, sys, signal; print(flush=True); signal.pause()"
    holder = subprocess.Popen([sys.executable, "-c", code], pass_fds=[slab], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    theirs = device.create(SLAB)
    os.close(theirs)
    assert device.free_bytes() == total - SLAB
    os.close(slab)
    assert device.free_bytes() == total - SLAB
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert device.free_bytes() == total
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), slab)  # the fixture closes it


def test_without_the_management_library_the_way_out_is_named(
    fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container without the utility capability the error says which setting adds it."""
    monkeypatch.setenv(NVML_OVERRIDE, str(tmp_path / "libnvidia-ml.so.1"))
    device = open_devices(fake_cuda.start())[0]
    with pytest.raises(DeviceError, match="NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
        device.free_bytes()


def test_a_failure_of_the_management_library_is_a_sentence(fake_cuda: FakeDriver) -> None:
    """NVML's own words, the call and the device are in the error."""
    device = open_devices(fake_cuda.start())[0]
    fake_cuda.script("nvmlDeviceGetHandleByUUID=6")
    with pytest.raises(DeviceError) as caught:
        device.free_bytes()
    uuid = device.properties.uuid
    assert str(caught.value) == f"nvmlDeviceGetHandleByUUID on {uuid}: Not Found (6)"


@pytest.mark.parametrize(("used", "free"), [(3 << 30, 1 << 30), (0, 4 << 30)])
def test_amds_kernel_has_a_word_on_free_memory(fake_hip: FakeDriver, used: int, free: int) -> None:
    """The kernel's books count where they show less than the runtime does."""
    device = open_devices(fake_hip.start())[0]
    folder = fake_hip.sysfs / "bus" / "pci" / "devices" / "0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "mem_info_vram_total").write_text(f"{4 << 30}\n")
    (folder / "mem_info_vram_used").write_text(f"{used}\n")
    assert device.free_bytes() == free


# --- mapping ----------------------------------------------------------------------------------


def test_a_reader_cannot_write(fake: FakeDriver) -> None:
    """A write to a read-only mapping is the end of the writing process, and of nobody else."""
    code = (
        "import ctypes, sys; from broker.devices.discovery import *; "
        "device = open_devices(open_driver())[0]; slab = device.create(1 << 22); "
        "mapping = device.map(slab, 1 << 22, writable=False); "
        "print(ctypes.string_at(mapping.address, 1), flush=True); "
        "ctypes.memset(mapping.address, 1, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.stdout == b"b'\\x00'\n"
    assert done.returncode == -signal.SIGSEGV


def test_one_slab_mapped_twice_is_one_range(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """The second mapping shares the first one's addresses, which go with the last of them."""
    first = device.map(slab, SLAB, writable=False, slab="slab 7")
    second = device.map(slab, SLAB, writable=False, slab="slab 7")
    assert second.address == first.address
    assert fake.live()["mappings"] == 1
    first.close()
    first.close()
    assert bytes_at(second.address, 4) == bytes(4)
    second.close()
    assert "mappings" not in fake.live()


def test_clients_of_one_process_share_their_ranges(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """Two clients open the device each for itself; one slab is still one range."""
    first = device.map(slab, SLAB, writable=False, slab=("epoch", 7))
    other = open_devices(open_driver())[0]
    second = other.map(slab, SLAB, writable=False, slab=("epoch", 7))
    assert second.address == first.address
    first.close()
    second.close()


def test_a_slab_may_be_unmapped_while_another_is_being_mapped(
    device: CudaDevice, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection inside `map` that unmaps something, even the same slab, is survived."""
    dying = [device.map(slab, SLAB, writable=False, slab="slab 7")]
    uuid = device.properties.uuid

    class CollectedMeanwhile(dict[Hashable, cuda._Mapped]):
        def get(self, key: Hashable, default: Any = None) -> Any:
            found = super().get(key, default)
            while dying:
                dying.pop().close()
            return found

    monkeypatch.setattr(cuda, "_shared", CollectedMeanwhile(cuda._shared))
    mapping = device.map(slab, SLAB, writable=False, slab="slab 7")
    assert bytes_at(mapping.address, 4) == bytes(4)
    assert list(cuda._shared) == [(uuid, "slab 7", SLAB, False)]
    mapping.close()


def test_other_slabs_and_other_access_get_ranges_of_their_own(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """Neither a slab of another name nor a writable mapping shares a reader's range."""
    mappings = [
        device.map(slab, SLAB, writable=False, slab="slab 7"),
        device.map(slab, SLAB, writable=False, slab="slab 8"),
        device.map(slab, SLAB, writable=True, slab="slab 7"),
        device.map(slab, SLAB, writable=False),
        device.map(slab, SLAB, writable=False),
    ]
    assert len({mapping.address for mapping in mappings}) == len(mappings)
    for mapping in mappings:
        mapping.close()


@pytest.mark.parametrize("operation", ["open", "import", "properties", "reserve", "map", "access"])
def test_a_mapping_that_fails_leaves_nothing(
    fake: FakeDriver, device: CudaDevice, slab: int, operation: str
) -> None:
    """Whichever step fails, what the earlier ones made is undone and the next mapping works."""
    fault(fake, operation)
    with pytest.raises(DriverError, match="operation not supported"):
        device.map(slab, SLAB, writable=False, slab="slab 7")
    assert fake.live() == {}
    fake.script("")
    device.map(slab, SLAB, writable=False, slab="slab 7").close()


def test_unmapping_waits_for_the_device(fake: FakeDriver, device: CudaDevice, slab: int) -> None:
    """A device that cannot be waited for, as in a graph capture, leaves the slab mapped."""
    mapping = device.map(slab, SLAB, writable=False)
    fault(fake, "synchronise", "900")
    with pytest.raises(DriverError, match=CALLS[fake.vendor]["synchronise"]):
        mapping.close()
    assert bytes_at(mapping.address, 4) == bytes(4)
    fake.script("")
    mapping.close()
    assert fake.live() == {}


@pytest.mark.parametrize("operation", ["unmap", "free_address", "release"])
def test_unmapping_goes_on_after_a_step_that_fails(
    fake: FakeDriver, device: CudaDevice, slab: int, operation: str
) -> None:
    """The error arrives, and everything else was given back all the same."""
    mapping = device.map(slab, SLAB, writable=False)
    fault(fake, operation)
    with pytest.raises(DriverError, match="operation not supported"):
        mapping.close()
    assert "contexts" not in fake.live()
    fake.start()  # what the driver would not take back, nobody can


def test_a_slab_of_another_device_is_refused(fake_cuda: FakeDriver) -> None:
    """Mapping it would work over the bus, slowly: the error names the device that holds it."""
    first, second = open_devices(fake_cuda.start("devices=2"))
    slab = second.create(SLAB)
    with pytest.raises(DeviceError) as caught:
        first.map(slab, SLAB, writable=False)
    assert str(caught.value) == (
        f"map on {first.properties.uuid}: the slab is on another device ({second.properties.uuid})"
    )
    os.close(slab)


def test_a_forked_child_unmaps_nothing(device: CudaDevice, slab: int) -> None:
    """No driver works in a forked child; closing there does nothing and harms nobody."""
    mapping = device.map(slab, SLAB, writable=False)
    child = os.fork()
    if not child:
        mapping.close()
        os._exit(0 if bytes_at(mapping.address, 1) == b"\0" else 1)
    assert os.waitpid(child, 0)[1] == 0
    mapping.close()


# --- suspend and resume -----------------------------------------------------------------------


def test_a_suspended_slab_is_not_held(fake: FakeDriver, device: CudaDevice) -> None:
    """Of the slab nothing is kept but its addresses: the memory is free when its owner lets go."""
    slab = device.create(SLAB)
    mapping = device.map(slab, SLAB, writable=False, slab="slab 7")
    mapping.suspend()
    os.close(slab)
    assert "handles" not in fake.live()
    assert fake.live()["reservations"] == 1
    assert device.free_bytes() == device.properties.total_bytes
    mapping.close()


def test_what_is_mapped_twice_cannot_be_suspended(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """The other user of the addresses would fault; alone, the mapping is suspended."""
    first = device.map(slab, SLAB, writable=False, slab="slab 7")
    second = device.map(slab, SLAB, writable=False, slab="slab 7")
    with pytest.raises(DeviceError) as caught:
        first.suspend()
    assert str(caught.value) == (
        f"suspend on {device.properties.uuid}: 2 mappings of this process share the addresses of "
        "this slab; close the others first"
    )
    assert bytes_at(first.address, 4) == bytes(4)
    second.close()
    first.suspend()
    assert "mappings" not in fake.live()
    first.close()


def test_nobody_shares_addresses_that_were_suspended(device: CudaDevice, slab: int) -> None:
    """Who maps the slab meanwhile, or afterwards, gets a range of their own."""
    first = device.map(slab, SLAB, writable=False, slab="slab 7")
    first.suspend()
    second = device.map(slab, SLAB, writable=False, slab="slab 7")
    first.resume(slab)
    third = device.map(slab, SLAB, writable=False, slab="slab 7")
    assert second.address != first.address
    assert third.address == second.address
    for mapping in (first, second, third):
        mapping.close()


def test_suspending_waits_for_the_device(fake: FakeDriver, device: CudaDevice, slab: int) -> None:
    """A device that cannot be waited for leaves the slab mapped; later it can be suspended."""
    mapping = device.map(slab, SLAB, writable=False)
    fault(fake, "synchronise", "900")
    with pytest.raises(DriverError, match=CALLS[fake.vendor]["synchronise"]):
        mapping.suspend()
    assert bytes_at(mapping.address, 4) == bytes(4)
    fake.script("")
    mapping.suspend()
    mapping.close()


@pytest.mark.parametrize("operation", ["import", "properties", "map", "access"])
def test_a_resumption_that_fails_leaves_it_suspended(
    fake: FakeDriver, device: CudaDevice, slab: int, operation: str
) -> None:
    """Whichever step fails, the addresses stay reserved, nothing else is left, and it can again."""
    mapping = device.map(slab, SLAB, writable=False)
    mapping.suspend()
    suspended = fake.live()
    fault(fake, operation)
    with pytest.raises(DriverError, match="operation not supported"):
        mapping.resume(slab)
    assert fake.live() == suspended
    fake.script("")
    mapping.resume(slab)
    assert bytes_at(mapping.address, 4) == bytes(4)
    mapping.close()


def test_what_is_resumed_is_read_only(fake: FakeDriver, device: CudaDevice, slab: int) -> None:
    """Whatever it was before: what comes back are sealed weights."""
    mapping = device.map(slab, SLAB, writable=True)
    mapping.suspend()
    mapping.resume(slab)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.startswith(f"{mapping.address:x}-"):
            assert line.split()[1] == "r--s"
            break
    else:
        pytest.fail("the mapping is not in the process's list")
    mapping.close()


# --- writing ----------------------------------------------------------------------------------


def test_a_buffer_is_not_reused_before_its_copy_has_left_it(device: CudaDevice, slab: int) -> None:
    """With one buffer and copies that happen as late as they may, every piece arrives whole."""
    with device.open_writer(slab, SLAB, buffers=1) as writer:
        for start in range(0, SLAB, PIECE_BYTES):
            buffer = writer.buffer()
            buffer.view[:] = bytes([1 + start // PIECE_BYTES]) * PIECE_BYTES
            writer.submit(buffer, [Segment(0, PIECE_BYTES, start)])
    mapping = device.map(slab, SLAB, writable=False)
    for start in range(0, SLAB, PIECE_BYTES):
        expected = bytes([1 + start // PIECE_BYTES]) * PIECE_BYTES
        assert bytes_at(mapping.address + start, PIECE_BYTES) == expected
    mapping.close()


def test_copies_are_under_way_until_the_writer_is_closed(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """Submitting does not wait for the device; closing does."""
    writer = device.open_writer(slab, SLAB, buffers=2)
    buffer = writer.buffer()
    writer.submit(buffer, [Segment(0, 8, 0), Segment(8, 8, 64)])
    assert fake.live()["copies"] == 2
    writer.close()
    assert fake.live() == {}


def test_the_ring_is_pinned_once_and_is_all_there_is(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """One pinned area for the ring, one stream, an event for each buffer; no more however long."""
    with device.open_writer(slab, SLAB, buffers=3) as writer:
        for number in range(50):
            writer.submit(writer.buffer(), [Segment(0, 16, 16 * number)])
        live = fake.live()
        assert (live["pinned"], live["streams"], live["events"]) == (1, 1, 3)
    assert fake.calls(CALLS[fake.vendor]["pin"]) == 1


@pytest.mark.parametrize("operation", ["stream", "pin", "event"])
def test_a_writer_that_cannot_be_made_leaves_nothing(
    fake: FakeDriver, device: CudaDevice, slab: int, operation: str
) -> None:
    """Whichever part fails, ring, stream, mapping and context are given back."""
    fault(fake, operation, "2")
    with pytest.raises(DeviceOutOfMemory, match="out of memory"):
        device.open_writer(slab, SLAB, buffers=2)
    assert fake.live() == {}


def test_a_copy_that_fails_is_an_error_and_gives_the_buffer_back(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """The writer can be closed afterwards, and its only buffer is free."""
    fault(fake, "copy", "700")
    with device.open_writer(slab, SLAB, buffers=1) as writer:
        with pytest.raises(DriverError, match=CALLS[fake.vendor]["copy"]):
            writer.submit(writer.buffer(), [Segment(0, 8, 0)])
        fake.script("")
        writer.submit(writer.buffer(), [])
    assert fake.live() == {}


def test_a_copy_that_fails_late_is_an_error_of_the_next_buffer(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """Waiting for the buffer's last copy reports it, and the buffer is not lost."""
    with device.open_writer(slab, SLAB, buffers=1) as writer:
        writer.submit(writer.buffer(), [Segment(0, 8, 0)])
        fault(fake, "wait", "700")
        with pytest.raises(DriverError, match=CALLS[fake.vendor]["wait"]):
            writer.buffer()
        fake.script("")
        writer.submit(writer.buffer(), [])


def test_a_writer_whose_bytes_did_not_arrive_says_so(
    fake: FakeDriver, device: CudaDevice, slab: int
) -> None:
    """Closing is where the loader learns it; everything is given back all the same."""
    writer = device.open_writer(slab, SLAB, buffers=1)
    fault(fake, "synchronise_stream", "700")
    with pytest.raises(DriverError, match=CALLS[fake.vendor]["synchronise_stream"]):
        writer.close()
    writer.close()
    assert fake.live() == {}


def test_a_buffer_of_a_closed_writer_is_gone(device: CudaDevice, slab: int) -> None:
    """Its memory is unpinned, so touching the view is an error and not a crash."""
    with device.open_writer(slab, SLAB, buffers=1) as writer:
        buffer = writer.buffer()
        writer.submit(buffer, [])
    with pytest.raises(ValueError, match="released memoryview"):
        buffer.view[0] = 1


# --- two processes ----------------------------------------------------------------------------

ENGINE = """
import os, socket, sys
from broker.devices.discovery import open_device, open_driver
with socket.socket(fileno=int(sys.argv[1])) as broker:
    message, [slab], _, _ = socket.recv_fds(broker, 100, 1, socket.MSG_CMSG_CLOEXEC)
    uuid, nbytes = message.decode().split()
    device = open_device(open_driver(), uuid)
    mapping = device.map(slab, int(nbytes), writable=False)
    os.close(slab)
    broker.send(device.read(mapping, 1000, 16) + b" %d" % device.ordinal)
    broker.recv(1)
    broker.send(device.read(mapping, 1000, 16))
    mapping.close()
"""


def test_two_processes_share_a_slab_by_descriptor(fake: FakeDriver) -> None:
    """An engine that numbers the devices differently maps the owner's slab, and keeps it."""
    device = open_devices(fake.start("devices=2"))[1]
    slab = device.create(SLAB)
    with device.open_writer(slab, SLAB, buffers=1) as writer:
        buffer = writer.buffer()
        buffer.view[:16] = b"the same weights"
        writer.submit(buffer, [Segment(0, 16, 1000)])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, **fake.environment("devices=2"), "CUDA_VISIBLE_DEVICES": "1,0"}
    with ours, theirs:
        ours.settimeout(30)
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        socket.send_fds(ours, [f"{device.properties.uuid} {SLAB}".encode()], [slab])
        assert ours.recv(100) == b"the same weights 0"
        os.close(slab)
        ours.send(b".")
        assert ours.recv(100) == b"the same weights"
        assert engine.wait(30) == 0
    assert device.free_bytes() == device.properties.total_bytes


def test_many_threads_map_and_unmap(fake: FakeDriver, device: CudaDevice, slab: int) -> None:
    """Threads that share a slab's range and let go in any order leave one mapping, then none."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                mapping = device.map(slab, SLAB, writable=False, slab="slab 7")
                assert bytes_at(mapping.address, 1) == b"\0"
                mapping.close()
        except (AssertionError, DeviceError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert fake.live() == {}
