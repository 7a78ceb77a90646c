"""The platform check with everything real but the driver: its children, its round trip, doctor."""

from __future__ import annotations

import io
import os

import pytest

from broker import platform_probe
from broker.commands.doctor import examine
from broker.devices.base import Canary
from broker.devices.discovery import open_device, open_driver
from broker.devices.roundtrip import compare_canary, prove_sharing
from broker.errors import UnsupportedPlatformForIPCError
from broker.platform import check_ipc_platform_support
from broker.platform_probe import Probe
from tests.fake_driver.build import FakeDriver

SHORT_DEADLINE_SECONDS = 0.5


class HastyProbe(Probe):
    """Waits half a second where the product waits a minute."""

    def prove_sharing(self, uuid: str) -> Canary:
        return prove_sharing(uuid, deadline_seconds=SHORT_DEADLINE_SECONDS)


def use(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, settings: str = "", faults: str = ""
) -> None:
    """What the children of this process find."""
    for name, value in fake.environment(settings, faults).items():
        monkeypatch.setenv(name, value)


def refusal(probe: Probe | None = None) -> UnsupportedPlatformForIPCError:
    with pytest.raises(UnsupportedPlatformForIPCError) as caught:
        check_ipc_platform_support(where="broker", probe=probe or Probe())
    return caught.value


def test_a_broker_may_share_and_keeps_a_canary(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is proven to be shared, and this process reads what the children wrote there."""
    use(fake, monkeypatch)
    fake.start()
    report = check_ipc_platform_support(where="broker", probe=Probe())
    assert report.platform == ("cuda" if fake.vendor == "nvidia" else "rocm")
    assert len(report.canaries) == 1
    for uuid, canary in report.canaries.items():
        compare_canary(open_device(open_driver(), uuid), canary)
        os.close(canary.descriptor)


def test_two_slices_are_two_devices(fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows several MIG slices to a process has them all served, by their UUIDs."""
    use(fake_cuda, monkeypatch, "devices=2 mig=1")
    report = check_ipc_platform_support(where="broker", probe=Probe())
    assert [uuid[:4] for uuid in report.canaries] == ["MIG-", "MIG-"]
    for canary in report.canaries.values():
        os.close(canary.descriptor)


@pytest.mark.parametrize(
    ("settings", "faults", "reason"),
    [
        ("", "cuInit=999", "driver-failed"),
        ("", "cuInit=crash", "driver-crashed"),
        ("", "cuDeviceGetUuid_v2=801", "not-described"),
        ("devices=0", "", "no-device"),
        ("vmm=0", "", "no-vmm"),
        ("posix_fd=0", "", "no-descriptors"),
        ("compute_mode=3", "", "exclusive"),
        ("compute_mode=2", "", "prohibited"),
        ("", "cuMemExportToShareableHandle=801", "round-trip-failed"),
        ("", "cuMemImportFromShareableHandle=crash", "round-trip-crashed"),
        ("", "cuMemImportFromShareableHandle=elsewhere", "round-trip-wrong-bytes"),
    ],
)
def test_what_a_driver_may_do_wrong(
    fake_cuda: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    faults: str,
    reason: str,
) -> None:
    """Each fault of a driver ends in the sentence of its own step."""
    use(fake_cuda, monkeypatch, settings, faults)
    error = refusal()
    assert error.reason == reason
    assert str(error).startswith("[weight-broker:broker] found platform cuda: ")


def test_a_round_trip_that_hangs(fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that never answers is given up."""
    use(fake_cuda, monkeypatch, "", "cuMemCreate=hang")
    error = refusal(HastyProbe())
    assert error.reason == "round-trip-hung"
    assert "did not finish in time" in str(error)


def test_a_driver_that_hangs(fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where it hangs at its start."""
    use(fake_cuda, monkeypatch, "", "cuInit=hang")
    monkeypatch.setattr(platform_probe, "DRIVER_DEADLINE_SECONDS", SHORT_DEADLINE_SECONDS)
    assert refusal().reason == "driver-hung"


def test_an_old_rocm(fake_hip: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its structures are others, so it is refused before one of them is used."""
    use(fake_hip, monkeypatch, "version=50731921")
    assert refusal().reason == "rocm-too-old"


def test_rocm_6_is_served(fake_hip: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runtime takes descriptors by pointer, as its version says, and the round trip passes."""
    use(fake_hip, monkeypatch, "version=60443484")
    report = check_ipc_platform_support(where="broker", probe=Probe())
    for canary in report.canaries.values():
        os.close(canary.descriptor)
    assert report.platform == "rocm"


def test_doctor_lists_the_devices(fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has its tick; then each device with its name and free memory."""
    use(fake_cuda, monkeypatch, "devices=2 total=1G")
    fake_cuda.start("devices=2 total=1G")
    out = io.StringIO()
    assert examine("cuda:1", out) == 0
    *steps, device = out.getvalue().splitlines()
    assert len(steps) == 11
    assert all(step.startswith("ok   ") for step in steps)
    assert "(Fake NVIDIA GPU 1): 1.0 GiB of 1.0 GiB free" in device


def test_doctor_without_free_memory(fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVML is missing the device is listed all the same, with what to do."""
    use(fake_cuda, monkeypatch)
    fake_cuda.start()
    fake_cuda.script("nvmlDeviceGetHandleByUUID=6")
    out = io.StringIO()
    assert examine("auto", out) == 0
    assert "4.0 GiB; how much is free is unknown: nvmlDeviceGetHandleByUUID on" in out.getvalue()
