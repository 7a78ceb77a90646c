"""What the simulated device adds to the contract: the kernel's own proof that nobody can write."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from broker.device_names import SIMULATED_UUID as UUID
from broker.devices import simulated
from broker.devices.base import (
    DeviceError,
    DeviceOutOfMemory,
    Segment,
    StillMappedWritable,
)
from broker.devices.simulated import SimulatedDevice

NBYTES = 4 * 4096


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def slab(device: SimulatedDevice) -> Iterator[int]:
    descriptor = device.create(NBYTES)
    yield descriptor
    os.close(descriptor)


def test_says_what_it_is(device: SimulatedDevice) -> None:
    """Nobody can take the simulated device for a GPU."""
    assert device.properties.uuid == "SIM-0"
    assert device.properties.name == "simulated device (host memory)"
    assert device.properties.platform == "simulated"


def test_freeze_proves_that_the_writer_let_go(device: SimulatedDevice, slab: int) -> None:
    """While anybody maps the slab writable it cannot be frozen; afterwards it can."""
    mapping = device.map(slab, NBYTES, writable=True)
    with pytest.raises(StillMappedWritable) as caught:
        device.freeze(slab)
    assert str(caught.value) == "freeze: the slab is still mapped writable"
    ctypes.memmove(mapping.address, b"late", 4)
    mapping.close()
    reader = device.freeze(slab)
    assert os.pread(reader, 4, 0) == b"late"
    os.close(reader)


def test_nobody_writes_after_freezing(device: SimulatedDevice, slab: int) -> None:
    """A frozen slab is immutable through every descriptor of it, also one kept by its writer."""
    writer = device.open_writer(slab, NBYTES, buffers=1)
    reader = device.freeze(slab)
    with pytest.raises(DeviceError) as caught:
        writer.submit(writer.buffer(), [Segment(0, 8, 0)])
    assert str(caught.value) == "write on SIM-0: Operation not permitted"
    for descriptor in (slab, reader):
        with pytest.raises(DeviceError) as caught:
            device.map(descriptor, NBYTES, writable=True)
        assert str(caught.value).startswith("map on SIM-0: ")
        with pytest.raises(OSError, match=r"not permitted|Invalid argument|Bad file"):
            os.ftruncate(descriptor, NBYTES // 2)
    os.close(reader)


def test_write_to_a_reading_view_ends_the_writer_only(device: SimulatedDevice, slab: int) -> None:
    """A process that writes through a read-only mapping dies of SIGSEGV; the bytes stay."""
    os.pwrite(slab, b"weights", 0)
    reader = device.freeze(slab)
    program = (
        "import ctypes, sys\n"
        "from broker.devices.simulated import SimulatedDevice\n"
        f"mapping = SimulatedDevice().map({reader}, {NBYTES}, writable=False)\n"
        "assert ctypes.string_at(mapping.address, 7) == b'weights'\n"
        "ctypes.memmove(mapping.address, b'garbage', 7)\n"
    )
    child = subprocess.run([sys.executable, "-c", program], pass_fds=[reader], timeout=30)
    assert child.returncode == -signal.SIGSEGV
    with closing(device.map(reader, NBYTES, writable=False)) as mapping:
        os.close(reader)
        assert ctypes.string_at(mapping.address, 7) == b"weights"


def test_forked_child_has_no_mapping_and_unmaps_nothing(device: SimulatedDevice, slab: int) -> None:
    """In a forked child the slab is not mapped, and closing there spares what took its place."""
    program = (
        "import ctypes, mmap, os, sys\n"
        "from broker.devices import simulated\n"
        f"mapping = simulated.SimulatedDevice().map({slab}, {NBYTES}, writable=False)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE\n"
        f"taken = simulated._libc.mmap(mapping.address, {NBYTES}, 3, fixed, -1, 0)\n"
        "if taken != mapping.address:\n"
        "    os._exit(2)\n"
        "mapping.close()\n"
        "ctypes.memset(taken, 1, 1)\n"
        "os._exit(0)\n"
    )
    child = subprocess.run([sys.executable, "-c", program], pass_fds=[slab], timeout=30)
    assert child.returncode == 0


def test_slab_whose_size_is_not_sealed(device: SimulatedDevice) -> None:
    """A memory file that could be cut short under its readers is refused."""
    descriptor = os.memfd_create("trap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, NBYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(DeviceError) as caught:
        device.map(descriptor, NBYTES, writable=False)
    assert str(caught.value) == (
        "map on SIM-0: the slab's size is not sealed, so it could be cut short"
    )
    os.close(descriptor)


def test_sentences(device: SimulatedDevice, slab: int, tmp_path: Path) -> None:
    """Refusals name the call, the device and the numbers."""
    with pytest.raises(DeviceError) as caught:
        device.map(slab, NBYTES + 1, writable=False)
    assert str(caught.value) == (
        f"map on SIM-0: the slab has {NBYTES} bytes, {NBYTES + 1} were announced"
    )
    with (tmp_path / "file").open("wb") as file, pytest.raises(DeviceError) as caught:
        device.map(file.fileno(), NBYTES, writable=False)
    assert str(caught.value) == (
        "map on SIM-0: the descriptor is not a slab ([Errno 22] Invalid argument)"
    )
    with device.open_writer(slab, NBYTES, buffers=1) as writer:
        with pytest.raises(DeviceError) as caught:
            writer.submit(writer.buffer(), [Segment(0, 8, NBYTES)])
        assert str(caught.value) == "write on SIM-0: Operation not permitted"
        with pytest.raises(DeviceError) as caught:
            writer.submit(writer.buffer(), [Segment(1, 1 << 20, 0)])
        assert str(caught.value) == (
            "write on SIM-0: Segment(start=1, nbytes=1048576, offset=0) is not inside a buffer of "
            "1048576"
        )
    with pytest.raises(DeviceOutOfMemory) as out:
        device.create(1 << 63)
    assert str(out.value) == f"create on SIM-0: {1 << 63} bytes are more than any file has"


def test_no_descriptor_left(device: SimulatedDevice, slab: int) -> None:
    """Out of descriptors, creating and freezing fail as a device does, and can be tried again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (slab + 1, before[1]))
    held: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            take_every_descriptor(slab, held)
        with pytest.raises(DeviceError) as creating:
            device.create(NBYTES)
        with pytest.raises(DeviceError) as freezing:
            device.freeze(slab)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)
    assert str(creating.value) == "create on SIM-0: Too many open files"
    assert str(freezing.value) == "freeze on SIM-0: Too many open files"
    os.close(device.freeze(slab))


def take_every_descriptor(slab: int, held: list[int]) -> None:
    while True:
        held.append(os.dup(slab))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_out_of_memory(
    device: SimulatedDevice, slab: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel calls no space is out of memory, when creating and when writing."""

    def refused(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refused)
    monkeypatch.setattr(os, "ftruncate", refused)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.create(NBYTES)
    assert str(caught.value) == f"create on SIM-0: {os.strerror(code)}"
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    writer = device.open_writer(slab, NBYTES, buffers=1)
    with pytest.raises(DeviceOutOfMemory):
        writer.submit(writer.buffer(), [Segment(0, 8, 0)])
    writer.submit(writer.buffer(), [])


def test_short_writes_are_continued(
    device: SimulatedDevice, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the kernel cuts short goes on where it stopped."""
    pwrite = os.pwrite

    def stingy(descriptor: int, data: memoryview, offset: int) -> int:
        return pwrite(descriptor, data[:3], offset)

    monkeypatch.setattr(os, "pwrite", stingy)
    with device.open_writer(slab, NBYTES, buffers=1) as writer:
        buffer = writer.buffer()
        buffer.view[:8] = b"abcdefgh"
        writer.submit(buffer, [Segment(0, 8, 16)])
    assert os.pread(slab, 8, 16) == b"abcdefgh"


def test_creating_costs_no_memory_yet(device: SimulatedDevice) -> None:
    """Pages come with the first write: a slab that nobody has written to is empty."""
    descriptor = device.create(1 << 30)
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_memory_figures_are_the_kernels(device: SimulatedDevice) -> None:
    """Total and free memory are bytes, as /proc/meminfo has them in units of 1024."""
    line = Path("/proc/meminfo").read_text().splitlines()[0]
    assert line.split()[0] == "MemTotal:"
    assert device.properties.total_bytes == int(line.split()[1]) * 1024
    with pytest.raises(DeviceError) as caught:
        simulated._meminfo("MemImagined")
    assert str(caught.value) == "/proc/meminfo has no line MemImagined"
    assert device.properties.uuid == UUID
