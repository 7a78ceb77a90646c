"""The contract of `broker.devices.base`, held against every device that can be had here.

A device joins by one more entry in `DEVICES`: the name of a fixture that gives a `Candidate`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.devices.base import PIECE_BYTES, Device, DeviceError, Mapping, Segment
from broker.devices.cuda import CudaDevice
from broker.devices.discovery import open_devices, open_driver
from broker.devices.simulated import SimulatedDevice
from tests.fake_driver.build import FakeDriver

PATIENCE_SECONDS = 20


@dataclass(frozen=True)
class Candidate:
    """How to get a device, and how to look at memory it has mapped."""

    open: Callable[[], Device]
    read: Callable[[Device, Mapping, int, int], bytes]
    faults: Callable[[Device, Mapping], bool]
    """Whether touching the mapping's addresses would fault."""


def read_host(device: Device, mapping: Mapping, offset: int, nbytes: int) -> bytes:
    """What lies in a mapping whose address is one of the host's."""
    return ctypes.string_at(mapping.address + offset, nbytes)


def host_faults(device: Device, mapping: Mapping) -> bool:
    """Whether the kernel lets nobody read there, and keeps the addresses taken (proc(5))."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights = line.split()[:2]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= mapping.address < end:
            return rights.startswith("---")
    raise AssertionError("nothing is at the mapping's address, not even a reservation")


def open_gpu() -> Device:
    return open_devices(open_driver())[0]


@pytest.fixture
def simulated() -> Candidate:
    return Candidate(SimulatedDevice, read_host, host_faults)


@pytest.fixture
def on_fake_cuda(fake_cuda: FakeDriver) -> Candidate:
    """Device `cuda` on the fake NVIDIA driver, whose addresses are the host's."""
    return Candidate(open_gpu, read_host, host_faults)


@pytest.fixture
def on_fake_hip(fake_hip: FakeDriver) -> Candidate:
    """Device `cuda` on the fake AMD driver, whose addresses are the host's."""
    return Candidate(open_gpu, read_host, host_faults)


@pytest.fixture
def on_gpu(gpu: CudaDevice) -> Candidate:
    """The real thing, whose memory the host cannot look at."""

    def read(device: Device, mapping: Mapping, offset: int, nbytes: int) -> bytes:
        return gpu.read(mapping, offset, nbytes)

    def faults(device: Device, mapping: Mapping) -> bool:
        try:
            gpu.read(mapping, 0, 1)
        except DeviceError:
            return True
        return False

    return Candidate(open_gpu, read, faults)


DEVICES = [
    "simulated",
    "on_fake_cuda",
    "on_fake_hip",
    pytest.param("on_gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def candidate(request: pytest.FixtureRequest) -> Candidate:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Candidate)
    return found


@pytest.fixture
def device(candidate: Candidate) -> Device:
    return candidate.open()


@dataclass
class Slab:
    """A slab of two granules whose descriptor the test's fixture closes."""

    descriptor: int
    nbytes: int


@pytest.fixture
def slab(device: Device) -> Iterator[Slab]:
    nbytes = 2 * device.properties.granularity
    descriptor = device.create(nbytes)
    yield Slab(descriptor, nbytes)
    os.close(descriptor)


def fill(device: Device, slab: Slab, offset: int, data: bytes) -> None:
    """Write into the slab as a loader does."""
    with device.open_writer(slab.descriptor, slab.nbytes, buffers=1) as writer:
        buffer = writer.buffer()
        buffer.view[: len(data)] = data
        writer.submit(buffer, [Segment(0, len(data), offset)])


# --- the device ---------------------------------------------------------------------------------


def test_properties(device: Device) -> None:
    """A device has a name for everything, a granularity and some memory, part of it free."""
    properties = device.properties
    assert properties.uuid
    assert properties.name
    assert properties.platform in ("cuda", "rocm", "simulated")
    assert properties.granularity > 0
    assert properties.granularity & (properties.granularity - 1) == 0
    assert 0 < device.free_bytes() <= properties.total_bytes


def test_uuid_is_stable(candidate: Candidate) -> None:
    """The same device has the same UUID whenever it is opened."""
    assert candidate.open().properties == candidate.open().properties


# --- create and freeze --------------------------------------------------------------------------


@pytest.mark.parametrize("granules", [0.0, -1.0, 0.5, 1.5])
def test_slab_sizes(device: Device, granules: float) -> None:
    """A slab is a positive multiple of the granularity, else nothing is created."""
    nbytes = int(granules * device.properties.granularity)
    before = descriptors()
    with pytest.raises(DeviceError) as caught:
        device.create(nbytes)
    assert str(caught.value) == (
        f"create({nbytes}) on {device.properties.uuid}: a slab is a positive multiple of "
        f"{device.properties.granularity} bytes"
    )
    assert descriptors() == before


@pytest.mark.parametrize("exponent", [62, 63, 80])
def test_impossible_sizes(device: Device, exponent: int) -> None:
    """More memory than there can be is an error of the device that leaves nothing behind."""
    before = descriptors()
    try:
        os.close(device.create(1 << exponent))  # a promise that nobody has to keep yet
    except DeviceError as error:
        assert device.properties.uuid in str(error)  # noqa: PT017
    assert descriptors() == before


def test_descriptors_close_on_exec(device: Device, slab: Slab) -> None:
    """No child process inherits a slab by accident."""
    assert not os.get_inheritable(slab.descriptor)
    reader = device.freeze(slab.descriptor)
    assert not os.get_inheritable(reader)
    os.close(reader)


def test_freeze_gives_a_second_descriptor(candidate: Candidate, device: Device, slab: Slab) -> None:
    """Freezing gives readers a descriptor of their own; the first one stays the caller's."""
    fill(device, slab, 0, b"weights")
    reader = device.freeze(slab.descriptor)
    assert reader != slab.descriptor
    os.fstat(slab.descriptor)
    with closing(device.map(reader, slab.nbytes, writable=False)) as mapping:
        os.close(reader)
        assert candidate.read(device, mapping, 0, 7) == b"weights"


def test_freeze_again(candidate: Candidate, device: Device, slab: Slab) -> None:
    """Freezing what is frozen gives one more descriptor for readers."""
    fill(device, slab, 0, b"weights")
    for _ in range(2):
        reader = device.freeze(slab.descriptor)
        with closing(device.map(reader, slab.nbytes, writable=False)) as mapping:
            assert candidate.read(device, mapping, 0, 7) == b"weights"
        os.close(reader)


# --- map ----------------------------------------------------------------------------------------


def test_mapping_outlives_the_descriptors(candidate: Candidate, device: Device) -> None:
    """Memory lives while it is mapped, though every descriptor of it is closed."""
    nbytes = device.properties.granularity
    slab = Slab(device.create(nbytes), nbytes)
    fill(device, slab, 100, b"still here")
    reader = device.freeze(slab.descriptor)
    mapping = device.map(reader, nbytes, writable=False)
    os.close(slab.descriptor)
    os.close(reader)
    assert candidate.read(device, mapping, 100, 10) == b"still here"
    mapping.close()


def test_mappings_share_one_memory(candidate: Candidate, device: Device, slab: Slab) -> None:
    """Two readers see what was written, each at an address that is its own to unmap."""
    fill(device, slab, slab.nbytes - 4, b"tail")
    reader = device.freeze(slab.descriptor)
    one = device.map(reader, slab.nbytes, writable=False)
    other = device.map(reader, slab.nbytes, writable=False)
    os.close(reader)
    assert (one.nbytes, other.nbytes) == (slab.nbytes, slab.nbytes)
    one.close()
    assert candidate.read(device, other, slab.nbytes - 4, 4) == b"tail"
    other.close()


def test_mapping_is_closed_once(device: Device, slab: Slab) -> None:
    """Closing a mapping again does nothing, from several threads at the same moment as well."""
    mapping = device.map(slab.descriptor, slab.nbytes, writable=True)
    together = threading.Barrier(4)
    failures: list[Exception] = []

    def close() -> None:
        try:
            together.wait(PATIENCE_SECONDS)
            mapping.close()
        except (DeviceError, threading.BrokenBarrierError) as error:
            failures.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    mapping.close()
    assert failures == []


def test_mapping_more_than_there_is(device: Device, slab: Slab) -> None:
    """A slab that is shorter than was announced is refused before it is mapped."""
    before = maps()
    for writable in [False, True] * 10:
        with pytest.raises(DeviceError):
            device.map(slab.descriptor, 2 * slab.nbytes, writable=writable)
        with pytest.raises(DeviceError):
            device.open_writer(slab.descriptor, 2 * slab.nbytes, buffers=1)
    assert maps() < before + 10  # what the interpreter itself may have mapped meanwhile


@pytest.mark.parametrize("nbytes", [0, -4096, 1 << 80])
def test_mapping_no_size(device: Device, slab: Slab, nbytes: int) -> None:
    """A size that no slab has is refused."""
    with pytest.raises(DeviceError):
        device.map(slab.descriptor, nbytes, writable=False)


@pytest.mark.parametrize("writable", [False, True])
def test_mapping_what_is_no_slab(device: Device, tmp_path: Path, writable: bool) -> None:
    """A file, a pipe and a closed descriptor are refused as slabs."""
    nbytes = device.properties.granularity
    path = tmp_path / "file"
    path.write_bytes(bytes(nbytes))
    with path.open("r+b") as file:
        with pytest.raises(DeviceError):
            device.map(file.fileno(), nbytes, writable=writable)
        closed = os.dup(file.fileno())
    ends = os.pipe()
    os.close(closed)
    for descriptor in (*ends, closed):
        with pytest.raises(DeviceError):
            device.map(descriptor, nbytes, writable=writable)
    for end in ends:
        os.close(end)


def test_reading_out_of_a_mapping(device: Device, slab: Slab) -> None:
    """Bytes inside come back; a range that is not inside is an error that names it."""
    fill(device, slab, 8, b"weights")
    with closing(device.map(slab.descriptor, slab.nbytes, writable=False)) as mapping:
        assert device.read(mapping, 8, 7) == b"weights"
        assert device.read(mapping, slab.nbytes, 0) == b""
        for offset, nbytes in ((-1, 2), (slab.nbytes - 1, 2), (0, -1)):
            with pytest.raises(DeviceError) as caught:
                device.read(mapping, offset, nbytes)
            assert str(caught.value) == (
                f"read on {device.properties.uuid}: {nbytes} bytes from {offset} are not inside "
                f"the mapping of {slab.nbytes}"
            )


# --- suspend and resume -------------------------------------------------------------------------


def test_a_suspended_mapping_keeps_its_addresses_and_comes_back(
    candidate: Candidate, device: Device, slab: Slab
) -> None:
    """Unmapped, the addresses fault and nobody else gets them; mapped again, the bytes are there.

    The slab's memory is not held meanwhile, and suspending again changes nothing.
    """
    fill(device, slab, 0, b"weights")
    with closing(device.map(slab.descriptor, slab.nbytes, writable=False)) as mapping:
        address = mapping.address
        mapping.suspend()
        mapping.suspend()
        assert candidate.faults(device, mapping)
        others = [device.map(slab.descriptor, slab.nbytes, writable=False) for _ in range(4)]
        assert all(abs(other.address - address) >= slab.nbytes for other in others)
        mapping.resume(slab.descriptor)
        assert mapping.address == address
        assert candidate.read(device, mapping, 0, 7) == b"weights"
        for other in others:
            other.close()


def test_another_slab_of_the_same_size_may_come_back(
    candidate: Candidate, device: Device, slab: Slab
) -> None:
    """The addresses outlive the slab: its successor may lie there."""
    nbytes = slab.nbytes
    first = device.create(nbytes)
    mapping = device.map(first, nbytes, writable=False)
    os.close(first)
    mapping.suspend()
    fill(device, slab, nbytes - 4, b"tail")
    reader = device.freeze(slab.descriptor)
    mapping.resume(reader)
    os.close(reader)
    assert candidate.read(device, mapping, nbytes - 4, 4) == b"tail"
    mapping.close()


def test_resuming_what_does_not_fit_leaves_it_suspended(
    candidate: Candidate, device: Device, slab: Slab, tmp_path: Path
) -> None:
    """A shorter slab, a file, a closed descriptor: an error, and the right slab still can."""
    small = device.create(device.properties.granularity)
    path = tmp_path / "file"
    path.write_bytes(bytes(slab.nbytes))
    with closing(device.map(slab.descriptor, slab.nbytes, writable=False)) as mapping:
        mapping.suspend()
        with path.open("rb") as file:
            for wrong in (small, file.fileno(), -1):
                with pytest.raises(DeviceError):
                    mapping.resume(wrong)
        assert candidate.faults(device, mapping)
        mapping.resume(slab.descriptor)
        assert not candidate.faults(device, mapping)
    os.close(small)


def test_resuming_what_is_mapped_is_refused(device: Device, slab: Slab) -> None:
    """Only a suspended mapping can be resumed."""
    mapping = device.map(slab.descriptor, slab.nbytes, writable=False)
    with pytest.raises(DeviceError, match="is mapped already"):
        mapping.resume(slab.descriptor)
    mapping.close()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_closed_mapping_is_neither_suspended_nor_resumed(
    device: Device, slab: Slab, suspended: bool
) -> None:
    """Its addresses may be somebody else's by now. It can be closed in either state, once."""
    mapping = device.map(slab.descriptor, slab.nbytes, writable=False)
    if suspended:
        mapping.suspend()
    mapping.close()
    mapping.close()
    with pytest.raises(DeviceError, match="not mapped in this process any more"):
        mapping.suspend()
    with pytest.raises(DeviceError, match="not mapped in this process any more"):
        mapping.resume(slab.descriptor)


def test_a_forked_child_suspends_nothing(device: Device, slab: Slab) -> None:
    """The child gets an error, and the parent's mapping is as it was."""
    fill(device, slab, 0, b"here")
    with closing(device.map(slab.descriptor, slab.nbytes, writable=False)) as mapping:
        child = os.fork()
        if not child:
            code = 1
            try:
                mapping.suspend()
            except DeviceError:
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert device.read(mapping, 0, 4) == b"here"


# --- writing ------------------------------------------------------------------------------------


def test_segments(candidate: Candidate, device: Device, slab: Slab) -> None:
    """Each segment of a buffer lands at its own offset, and nothing beside it."""
    fill(device, slab, 0, b"." * 32)
    with device.open_writer(slab.descriptor, slab.nbytes, buffers=1) as writer:
        buffer = writer.buffer()
        buffer.view[:12] = b"abcdefghijkl"
        writer.submit(buffer, [Segment(8, 4, 0), Segment(0, 3, 20), Segment(5, 0, 9)])
    reader = device.freeze(slab.descriptor)
    with closing(device.map(reader, slab.nbytes, writable=False)) as mapping:
        os.close(reader)
        assert candidate.read(device, mapping, 0, 32) == b"ijkl" + b"." * 16 + b"abc" + b"." * 9


def test_pieces_from_several_threads(candidate: Candidate, device: Device) -> None:
    """Several threads fill a slab larger than the ring; every byte arrives at its place."""
    granularity = device.properties.granularity
    nbytes = -(-5 * PIECE_BYTES // granularity) * granularity
    slab = Slab(device.create(nbytes), nbytes)
    starts = list(range(0, 5 * PIECE_BYTES, PIECE_BYTES))
    addresses = set()
    lock = threading.Lock()
    with device.open_writer(slab.descriptor, nbytes, buffers=2) as writer:

        def work() -> None:
            while True:
                with lock:
                    if not starts:
                        return
                    start = starts.pop()
                buffer = writer.buffer()
                assert len(buffer.view) == PIECE_BYTES
                assert buffer.view.format == "B"
                with lock:
                    addresses.add(ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)))
                buffer.view[:] = piece_of(start)
                writer.submit(buffer, [Segment(0, PIECE_BYTES, start)])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert len(addresses) <= 2
    reader = device.freeze(slab.descriptor)
    os.close(slab.descriptor)
    with closing(device.map(reader, nbytes, writable=False)) as mapping:
        os.close(reader)
        for start in range(0, 5 * PIECE_BYTES, PIECE_BYTES):
            assert candidate.read(device, mapping, start, PIECE_BYTES) == piece_of(start)


def piece_of(start: int) -> bytes:
    number = start // PIECE_BYTES + 1
    return (b"%08d" % number) * (PIECE_BYTES // 8)


def test_ring_is_all_there_is(device: Device, slab: Slab) -> None:
    """With every buffer taken the next taker waits until one is given back, even unused."""
    taken = threading.Event()
    with device.open_writer(slab.descriptor, slab.nbytes, buffers=2) as writer:
        first, second = writer.buffer(), writer.buffer()

        def take() -> None:
            third = writer.buffer()
            taken.set()
            writer.submit(third, [])

        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.05)
        writer.submit(first, [])
        assert taken.wait(PATIENCE_SECONDS)
        thread.join(PATIENCE_SECONDS)
        writer.submit(second, [])


@pytest.mark.parametrize(
    ("start", "nbytes", "at"),
    [
        (PIECE_BYTES - 4, 8, 0),
        (-4, 8, 0),
        (0, -8, 0),
        (0, 8, -8),
        (0, PIECE_BYTES + 1, 0),
        (0, 8, "end"),
    ],
)
def test_segments_that_do_not_fit(
    candidate: Candidate, device: Device, slab: Slab, start: int, nbytes: int, at: int | str
) -> None:
    """A segment outside its buffer or its slab is refused, and the buffer is back in the ring."""
    offset = slab.nbytes - 4 if isinstance(at, str) else at
    with device.open_writer(slab.descriptor, slab.nbytes, buffers=1) as writer:
        with pytest.raises(DeviceError):
            writer.submit(writer.buffer(), [Segment(start, nbytes, offset)])
        writer.submit(writer.buffer(), [])


def test_writer_is_closed_once(device: Device, slab: Slab) -> None:
    """Closing a writer again does nothing, inside its own context as well."""
    with device.open_writer(slab.descriptor, slab.nbytes, buffers=1) as writer:
        writer.close()
    writer.close()


def test_writer_borrows_the_descriptor(device: Device, slab: Slab) -> None:
    """A closed writer leaves the descriptor open and the slab ready to be frozen."""
    fill(device, slab, 0, b"x")
    os.fstat(slab.descriptor)
    os.close(device.freeze(slab.descriptor))


# --- nothing is left ----------------------------------------------------------------------------


def test_nothing_is_left(device: Device) -> None:
    """A hundred lives of a slab leave descriptors and address space as they were."""

    def life() -> None:
        nbytes = device.properties.granularity
        slab = Slab(device.create(nbytes), nbytes)
        fill(device, slab, 0, b"x")
        reader = device.freeze(slab.descriptor)
        mapping = device.map(reader, nbytes, writable=False)
        mapping.suspend()
        mapping.resume(reader)
        mapping.suspend()
        mapping.close()
        os.close(reader)
        os.close(slab.descriptor)

    life()
    before = descriptors(), maps()
    for _ in range(100):
        life()
    assert descriptors() == before[0]
    assert maps() <= before[1] + 4  # what the interpreter itself may have mapped meanwhile


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())
