"""The proof that memory can be shared: two children, and everything that can go wrong in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.devices.base import Canary, DeviceError
from broker.devices.cuda import CudaDevice
from broker.devices.discovery import open_devices
from broker.devices.roundtrip import (
    REAPER,
    RoundTripFailed,
    _run_child,
    compare_canary,
    prove_sharing,
)
from tests.fake_driver.build import FakeDriver

DEADLINE_SECONDS = 30.0
SHORT_DEADLINE_SECONDS = 0.5
"""For a child that hangs; one that has not got there yet ends in the same way."""

IMPORT = {"nvidia": "cuMemImportFromShareableHandle", "amd": "hipMemImportFromShareableHandle"}
CREATE = {"nvidia": "cuMemCreate", "amd": "hipMemCreate"}
COPY_OUT = {"nvidia": "cuMemcpyDtoH_v2", "amd": "hipMemcpyDtoH"}
RELEASE = {"nvidia": "cuMemRelease", "amd": "hipMemRelease"}


@pytest.fixture
def device(fake: FakeDriver) -> CudaDevice:
    return open_devices(fake.start())[0]


@pytest.fixture
def cuda(fake_cuda: FakeDriver) -> CudaDevice:
    """For what does not depend on the vendor."""
    return open_devices(fake_cuda.start())[0]


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """No test here leaves a descriptor behind, whatever happened to the children."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture(autouse=True)
def no_child_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every child has ended when the call has returned, or is ended soon after a hang."""
    started: list[subprocess.Popen[bytes]] = []

    class RecordedChild(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr("broker.devices.roundtrip.subprocess.Popen", RecordedChild)
    yield
    for thread in threading.enumerate():
        if thread.name == REAPER:
            thread.join(DEADLINE_SECONDS)
    assert all(child.returncode is not None for child in started)


def failing(
    fake: FakeDriver,
    device: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    faults: str = "",
    settings: str = "",
    deadline_seconds: float = DEADLINE_SECONDS,
) -> RoundTripFailed:
    """The error of a round trip whose children have these faults."""
    for name, value in fake.environment(settings, faults).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RoundTripFailed) as caught:
        prove_sharing(device.properties.uuid, deadline_seconds=deadline_seconds)
    return caught.value


def test_the_pattern_arrives_and_stays_as_a_canary(fake: FakeDriver, device: CudaDevice) -> None:
    """The reader sees what the writer wrote before it died; this process does so too."""
    canary = prove_sharing(device.properties.uuid, deadline_seconds=DEADLINE_SECONDS)
    total = device.properties.total_bytes
    assert device.free_bytes() == total - canary.nbytes
    compare_canary(device, canary)
    os.close(canary.descriptor)
    assert device.free_bytes() == total


def test_a_canary_with_another_pattern_is_wrong_bytes(fake: FakeDriver) -> None:
    """Memory that is not what the broker wrote is refused, with the place and both values."""
    device = open_devices(fake.start())[0]
    slab = device.create(2 << 20)
    with pytest.raises(RoundTripFailed, match="reads wrong bytes: byte 0 is 0, not ") as caught:
        compare_canary(device, Canary(slab, 2 << 20, "seed"))
    assert caught.value.reason == "wrong-bytes"
    os.close(slab)


def test_a_reader_that_sees_other_memory(
    fake_cuda: FakeDriver, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import works but gives other memory, as on WSL2: the bytes tell."""
    # The writer imports its slab as well, to map it; only the reader copies out.
    error = failing(fake_cuda, cuda, monkeypatch, f"{COPY_OUT[fake_cuda.vendor]}=wrong")
    assert (error.step, error.reason) == ("read", "wrong-bytes")
    assert cuda.properties.uuid in str(error)


def test_an_import_that_gives_other_memory(
    fake: FakeDriver, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both children see is memory of their own: the reader's zeros are not the pattern."""
    error = failing(fake, device, monkeypatch, f"{IMPORT[fake.vendor]}=elsewhere")
    assert (error.step, error.reason) == ("read", "wrong-bytes")
    # The pattern is another each time, and may begin with a zero.
    assert re.search(r": byte \d+ is 0, not ", str(error))


def test_a_call_that_fails_in_the_writer(
    fake_cuda: FakeDriver, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's words come back from the child."""
    error = failing(fake_cuda, cuda, monkeypatch, f"{CREATE[fake_cuda.vendor]}=801")
    assert (error.step, error.reason) == ("write", "failed")
    assert f"{CREATE[fake_cuda.vendor]} on {cuda.properties.uuid}: operation not s" in str(error)


def test_a_call_that_fails_in_the_reader(
    fake_cuda: FakeDriver, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's words come back from the child, and the writer's slab is gone."""
    error = failing(fake_cuda, cuda, monkeypatch, f"{COPY_OUT[fake_cuda.vendor]}=700")
    assert (error.step, error.reason) == ("read", "failed")
    assert COPY_OUT[fake_cuda.vendor] in str(error)
    assert cuda.free_bytes() == cuda.properties.total_bytes


@pytest.mark.parametrize(("step", "calls"), [("write", CREATE), ("read", COPY_OUT)])
def test_a_child_that_crashes(
    fake_cuda: FakeDriver,
    cuda: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    calls: dict[str, str],
) -> None:
    """A driver that takes the process down is a sentence with the exit status."""
    error = failing(fake_cuda, cuda, monkeypatch, f"{calls[fake_cuda.vendor]}=crash")
    assert (error.step, error.reason) == (step, "crashed")
    assert f"should {step} a pattern on {cuda.properties.uuid} crashed with exit status -6" in (
        str(error)
    )


def test_a_writer_that_hangs(
    fake_cuda: FakeDriver, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that never answers is given up at the deadline, and its child is ended."""
    faults = f"{CREATE['nvidia']}=hang"
    error = failing(fake_cuda, cuda, monkeypatch, faults, deadline_seconds=SHORT_DEADLINE_SECONDS)
    assert (error.step, error.reason) == ("write", "hung")
    assert str(error) == (
        f"the child that should write a pattern on {cuda.properties.uuid} did not finish in time"
    )


def test_a_reader_that_hangs(
    fake_cuda: FakeDriver, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for the second child."""
    canary = Canary(cuda.create(2 << 20), 2 << 20, "seed")
    monkeypatch.setenv("FAKE_DRIVER_FAULTS", f"{COPY_OUT['nvidia']}=hang")
    with pytest.raises(RoundTripFailed, match=r"should read a pattern on .* in time") as caught:
        _run_child("read", cuda.properties.uuid, lambda: SHORT_DEADLINE_SECONDS, canary)
    assert (caught.value.step, caught.value.reason) == ("read", "hung")
    os.close(canary.descriptor)


def test_an_import_in_the_wrong_form_crashes_a_child_only(
    fake_hip: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AMD release that disagrees with its version number is found out, not found fatal."""
    device = open_devices(fake_hip.start())[0]
    error = failing(fake_hip, device, monkeypatch, settings="version=70125424 fd_by_value=0")
    assert (error.step, error.reason) == ("write", "crashed")


def test_a_child_that_cannot_see_the_device(
    fake_cuda: FakeDriver, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's list of visible devices is in the sentence."""
    with pytest.raises(RoundTripFailed, match="device GPU-other cannot be seen"):
        prove_sharing("GPU-other", deadline_seconds=DEADLINE_SECONDS)


def test_a_child_that_cannot_start(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an interpreter to run there is still a sentence."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RoundTripFailed, match="cannot be started") as caught:
        prove_sharing(cuda.properties.uuid, deadline_seconds=DEADLINE_SECONDS)
    assert caught.value.reason == "failed"


def test_a_child_whose_program_is_broken_says_why(
    cuda: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter that cannot import the broker: its last words are in the sentence."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named broker' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RoundTripFailed) as caught:
        prove_sharing(cuda.properties.uuid, deadline_seconds=DEADLINE_SECONDS)
    assert caught.value.reason == "crashed"
    assert str(caught.value).endswith("exit status 1 (No module named broker)")


def test_a_canary_that_cannot_be_mapped_is_the_drivers_error(
    fake: FakeDriver, device: CudaDevice
) -> None:
    """An engine learns from its first map what its driver says, and keeps nothing mapped."""
    slab = device.create(2 << 20)
    fake.script(f"{IMPORT[fake.vendor]}=801")
    with pytest.raises(DeviceError, match=IMPORT[fake.vendor]):
        compare_canary(device, Canary(slab, 2 << 20, "seed"))
    os.close(slab)
