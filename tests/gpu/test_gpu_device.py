"""What only a GPU can show of device `cuda`. On the fake drivers these prove nothing new."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from broker.devices.base import PIECE_BYTES, Segment
from broker.devices.cuda import PATIENCE_SECONDS, CudaDevice
from broker.devices.roundtrip import compare_canary, prove_sharing

pytestmark = pytest.mark.gpu

SLAB = 256 << 20
CHILD_SECONDS = 60.0
"""A first context may take long on a machine that was idle."""

NEIGHBOUR = """
import os, socket, sys
from broker.devices.discovery import open_device, open_driver
work, uuid, nbytes = sys.argv[2], sys.argv[3], int(sys.argv[4])
with socket.socket(fileno=int(sys.argv[1])) as parent:
    device = open_device(open_driver(), uuid)
    if work == "own":  # no context here
        slab = device.create(nbytes)
        parent.send(b"%d" % device.free_bytes())
    else:
        context = device.driver.open_context(device.ordinal)
        parent.send(b"ready")
        _, [slab], _, _ = socket.recv_fds(parent, 100, 1)
        mapping = device.map(slab, nbytes, writable=False)
        if work == "read":
            parent.send(device.read(mapping, nbytes - 16, 16))
        elif work == "write":
            import torch
            class Slab:
                __cuda_array_interface__ = {
                    "shape": (nbytes,), "typestr": "|u1", "data": (mapping.address, False),
                    "version": 3,
                }
            tensor = torch.as_tensor(Slab(), device=f"cuda:{device.ordinal}")
            try:
                tensor.fill_(1)
                torch.cuda.synchronize(device.ordinal)
                parent.send(b"written")
            except RuntimeError as error:
                parent.send(b"refused")
            os._exit(0)  # the context is beyond use
    parent.recv(1)
"""


class Neighbour:
    """Another process on the same GPU."""

    def __init__(self, device: CudaDevice, work: str, nbytes: int = SLAB) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", NEIGHBOUR, str(theirs.fileno()), work]
        command += [device.properties.uuid, str(nbytes)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.socket = ours
        self.socket.settimeout(CHILD_SECONDS)
        self.first_words = ours.recv(100)

    def give(self, slab: int) -> bytes:
        """Let it map the slab; what it says then."""
        socket.send_fds(self.socket, [b"slab"], [slab])
        return self.socket.recv(100)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(CHILD_SECONDS)
        self.socket.close()


@pytest.fixture
def neighbour(gpu: CudaDevice) -> Iterator[Callable[..., Neighbour]]:
    """Starts processes beside this one, and ends them."""
    started: list[Neighbour] = []

    def start(work: str) -> Neighbour:
        started.append(Neighbour(gpu, work))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def slab(gpu: CudaDevice) -> Iterator[int]:
    """A slab that ends with sixteen known bytes."""
    descriptor = gpu.create(SLAB)
    with gpu.open_writer(descriptor, SLAB, buffers=1) as writer:
        buffer = writer.buffer()
        buffer.view[:16] = b"the same weights"
        writer.submit(buffer, [Segment(0, 16, SLAB - 16)])
    yield descriptor
    os.close(descriptor)


def free_within(device: CudaDevice, expected: int, seconds: float) -> int:
    """The free bytes once there are as many as expected, or after so many seconds."""
    end = time.monotonic() + seconds
    while device.free_bytes() < expected and time.monotonic() < end:
        time.sleep(0.05)
    return device.free_bytes()


def test_memory_is_shared_between_processes(gpu: CudaDevice) -> None:
    """The round trip of the platform check succeeds, and this process compares its canary."""
    canary = prove_sharing(gpu.properties.uuid)
    compare_canary(gpu, canary)
    os.close(canary.descriptor)


def test_the_owner_needs_no_context(gpu: CudaDevice, neighbour: Callable[..., Neighbour]) -> None:
    """An owner costs the device its slab and no context, which would take hundreds of MiB."""
    before = gpu.free_bytes()
    owner = neighbour("own")
    taken = before - int(owner.first_words)
    assert SLAB <= taken < SLAB + (64 << 20)


def test_three_readers_use_one_copy(
    gpu: CudaDevice, slab: int, neighbour: Callable[..., Neighbour]
) -> None:
    """Three processes that have their contexts already map a slab for next to nothing."""
    readers = [neighbour("read") for _ in range(3)]
    before = gpu.free_bytes()
    for reader in readers:
        assert reader.give(slab) == b"the same weights"
    assert before - gpu.free_bytes() < SLAB // 4


def test_a_write_fails_in_the_writer_only(
    gpu: CudaDevice, slab: int, neighbour: Callable[..., Neighbour]
) -> None:
    """A kernel that writes to a read-only mapping loses its own context; the bytes stay."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    assert neighbour("write").give(slab) == b"refused"
    assert neighbour("read").give(slab) == b"the same weights"


def test_the_memory_of_a_killed_owner_comes_back(
    gpu: CudaDevice, neighbour: Callable[..., Neighbour]
) -> None:
    """Whoever was the last holder, its memory is free within the time creation waits for it."""
    before = gpu.free_bytes()
    owner = neighbour("own")
    assert gpu.free_bytes() <= before - SLAB
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait(CHILD_SECONDS)
    assert free_within(gpu, before - (16 << 20), PATIENCE_SECONDS) >= before - (16 << 20)


def test_mapped_memory_outlives_its_owner(
    gpu: CudaDevice, slab: int, neighbour: Callable[..., Neighbour]
) -> None:
    """A slab whose descriptor is closed everywhere stays readable where it is mapped."""
    mapping = gpu.map(slab, SLAB, writable=False)
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), slab)
    assert gpu.read(mapping, SLAB - 16, 16) == b"the same weights"
    mapping.close()


def test_mapping_and_unmapping_leaves_nothing(gpu: CudaDevice, slab: int) -> None:
    """Two hundred rounds later the device has as much free memory as before."""
    gpu.map(slab, SLAB, writable=False).close()
    before = gpu.free_bytes()
    for _ in range(200):
        gpu.map(slab, SLAB, writable=False).close()
    assert before - gpu.free_bytes() < SLAB // 4


def test_creating_and_freeing_leaves_nothing(gpu: CudaDevice) -> None:
    """Fifty slabs later the device has as much free memory as before."""
    before = gpu.free_bytes()
    for _ in range(50):
        os.close(gpu.create(SLAB))
    assert free_within(gpu, before, PATIENCE_SECONDS) > before - SLAB // 4


def test_a_large_slab_arrives_whole(gpu: CudaDevice) -> None:
    """Every piece written through a short ring is found again, to the last byte."""
    nbytes = 64 * PIECE_BYTES
    slab = gpu.create(nbytes)
    with gpu.open_writer(slab, nbytes, buffers=4) as writer:
        for start in range(0, nbytes, PIECE_BYTES):
            buffer = writer.buffer()
            buffer.view[:] = start.to_bytes(8, "little") * (PIECE_BYTES // 8)
            writer.submit(buffer, [Segment(0, PIECE_BYTES, start)])
    mapping = gpu.map(slab, nbytes, writable=False)
    for start in range(0, nbytes, PIECE_BYTES):
        expected = start.to_bytes(8, "little") * (PIECE_BYTES // 8)
        assert gpu.read(mapping, start, PIECE_BYTES) == expected
    mapping.close()
    os.close(slab)
