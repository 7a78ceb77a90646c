"""The ctypes layer against the vendors' headers, and what it makes of a driver's answers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.devices import driver_abi as abi
from broker.devices.base import DeviceError
from broker.devices.discovery import (
    DeviceNotVisible,
    open_device,
    open_devices,
    open_driver,
    visible_uuids,
)
from broker.devices.driver import Capabilities, DriverError, DriverMissing, DriverOutOfMemory
from broker.devices.driver_abi import AccessDescriptor, AllocationProperties
from broker.devices.driver_cuda import CudaDriver
from broker.devices.driver_hip import HipDriver
from broker.devices.libraries import LIBRARIES, OVERRIDES, candidates
from tests.fake_driver.build import FakeDriver

FIELDS = {
    "type": "type",
    "handle_types": "requestedHandleTypes",
    "location_type": "location.type",
    "location_id": "location.id",
    "win32_metadata": "win32HandleMetaData",
    "compression": "allocFlags.compressionType",
    "rdma_capable": "allocFlags.gpuDirectRDMACapable",
    "usage": "allocFlags.usage",
}
CUDA_CONSTANTS = {
    "CU_MEM_ALLOCATION_TYPE_PINNED": abi.ALLOCATION_PINNED,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": abi.HANDLE_POSIX_DESCRIPTOR,
    "CU_MEM_LOCATION_TYPE_DEVICE": abi.LOCATION_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READ": abi.ACCESS_READ,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": abi.ACCESS_READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": abi.GRANULARITY_RECOMMENDED,
    "CU_STREAM_NON_BLOCKING": abi.STREAM_NON_BLOCKING,
    "CU_EVENT_BLOCKING_SYNC": abi.EVENT_BLOCKING_SYNC,
    "CU_EVENT_DISABLE_TIMING": abi.EVENT_DISABLE_TIMING,
    "CU_COMPUTEMODE_DEFAULT": abi.COMPUTE_MODE_DEFAULT,
    "CU_COMPUTEMODE_PROHIBITED": abi.COMPUTE_MODE_PROHIBITED,
    "CU_COMPUTEMODE_EXCLUSIVE_PROCESS": abi.COMPUTE_MODE_EXCLUSIVE,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": CudaDriver.attributes["integrated"],
    "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE": CudaDriver.attributes["compute_mode"],
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": CudaDriver.attributes[
        "virtual_memory"
    ],
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": CudaDriver.attributes[
        "posix_descriptors"
    ],
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": CudaDriver.attributes["rdma"],
}
HIP_CONSTANTS = {
    "hipMemAllocationTypePinned": abi.ALLOCATION_PINNED,
    "hipMemHandleTypePosixFileDescriptor": abi.HANDLE_POSIX_DESCRIPTOR,
    "hipMemLocationTypeDevice": abi.LOCATION_DEVICE,
    "hipMemAccessFlagsProtRead": abi.ACCESS_READ,
    "hipMemAccessFlagsProtReadWrite": abi.ACCESS_READ_WRITE,
    "hipMemAllocationGranularityRecommended": abi.GRANULARITY_RECOMMENDED,
    "hipStreamNonBlocking": abi.STREAM_NON_BLOCKING,
    "hipEventBlockingSync": abi.EVENT_BLOCKING_SYNC,
    "hipEventDisableTiming": abi.EVENT_DISABLE_TIMING,
    "hipComputeModeDefault": abi.COMPUTE_MODE_DEFAULT,
    "hipComputeModeProhibited": abi.COMPUTE_MODE_PROHIBITED,
    "hipComputeModeExclusiveProcess": abi.COMPUTE_MODE_EXCLUSIVE,
    "hipDeviceAttributeIntegrated": HipDriver.attributes["integrated"],
    "hipDeviceAttributeComputeMode": HipDriver.attributes["compute_mode"],
    "hipDeviceAttributeVirtualMemoryManagementSupported": HipDriver.attributes["virtual_memory"],
}
GPU_0 = "GPU-fa111213-1415-1617-1819-1a1b1c1d1e00"
GPU_1 = "GPU-fa111213-1415-1617-1819-1a1b1c1d1e01"


# --- against the headers ----------------------------------------------------------------------


def test_the_allocation_properties_have_the_headers_layout(fake: FakeDriver) -> None:
    """Size and every field's offset are those of the vendor's structure."""
    vendor = "CUmemAllocationProp" if fake.vendor == "nvidia" else "hipMemAllocationProp"
    assert ctypes.sizeof(AllocationProperties) == fake.layout(vendor)
    names = dict(FIELDS)
    if fake.vendor == "amd":
        names["handle_types"] = "requestedHandleType"
    for ours, theirs in names.items():
        offset = getattr(AllocationProperties, ours).offset
        assert offset == fake.layout(f"{vendor}.{theirs}"), theirs


def test_the_access_descriptor_has_the_headers_layout(fake: FakeDriver) -> None:
    """Size and every field's offset are those of the vendor's structure."""
    vendor = "CUmemAccessDesc" if fake.vendor == "nvidia" else "hipMemAccessDesc"
    assert ctypes.sizeof(AccessDescriptor) == fake.layout(vendor)
    for ours, theirs in (
        ("location_type", "location.type"),
        ("location_id", "location.id"),
        ("flags", "flags"),
    ):
        offset = getattr(AccessDescriptor, ours).offset
        assert offset == fake.layout(f"{vendor}.{theirs}"), theirs


@pytest.mark.parametrize("name", CUDA_CONSTANTS)
def test_a_cuda_constant_is_the_headers(fake_cuda: FakeDriver, name: str) -> None:
    """The number in our module is the one cuda.h defines."""
    assert CUDA_CONSTANTS[name] == fake_cuda.layout(name)


@pytest.mark.parametrize("name", HIP_CONSTANTS)
def test_a_hip_constant_is_the_headers(fake_hip: FakeDriver, name: str) -> None:
    """The number in our module is the one hip_runtime_api.h defines."""
    assert HIP_CONSTANTS[name] == fake_hip.layout(name)


def test_every_symbol_is_a_function_of_the_header(fake: FakeDriver) -> None:
    """The fake defines each symbol under the header's declaration; none of ours is missing."""
    kind = CudaDriver if fake.vendor == "nvidia" else HipDriver
    missing = [name for name in kind.symbols.values() if not hasattr(fake.control, name)]
    assert missing == []
    assert set(kind.symbols) <= set(abi.PROTOTYPES)


# --- errors -----------------------------------------------------------------------------------


def test_a_failing_call_is_named_with_the_drivers_words_and_the_device(
    fake_cuda: FakeDriver,
) -> None:
    """The error says which call failed, why in the driver's words, and on which device."""
    driver = fake_cuda.start()
    open_devices(driver)
    fake_cuda.script("cuMemAddressReserve=801")
    with pytest.raises(DriverError) as caught:
        driver.reserve(0, 2 << 20, 2 << 20)
    assert str(caught.value) == (
        f"cuMemAddressReserve on {GPU_0}: operation not supported (CUDA_ERROR_NOT_SUPPORTED, 801)"
    )
    assert (caught.value.call, caught.value.code) == ("cuMemAddressReserve", 801)


def test_a_status_the_driver_does_not_know_is_still_a_sentence(fake_cuda: FakeDriver) -> None:
    """A driver that has no words for its own status is quoted with the number."""
    driver = fake_cuda.start()
    fake_cuda.script("cuDeviceGetName=12345")
    with pytest.raises(DriverError, match="status 12345, which the driver does not know"):
        driver.name(0)


def test_a_failed_hip_call_leaves_no_error_for_torch_to_find(fake_hip: FakeDriver) -> None:
    """The runtime's last error is cleared: torch would blame its next kernel launch."""
    driver = fake_hip.start()
    fake_hip.script("hipMemAddressReserve=2")
    with pytest.raises(DriverOutOfMemory, match="out of memory \\(hipErrorOutOfMemory, 2\\)"):
        driver.reserve(0, 2 << 20, 2 << 20)
    assert fake_hip.control.fake_last_error() == 0


def test_without_a_driver_the_error_lists_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that are not there are listed; one that is broken is told in the loader's words."""
    monkeypatch.setenv(OVERRIDES["nvidia"], str(tmp_path / "libcuda.so.1"))
    broken = tmp_path / "libamdhip64.so"
    broken.write_text("not a library")
    monkeypatch.setenv(OVERRIDES["amd"], str(broken))
    with pytest.raises(DriverMissing) as caught:
        open_driver()
    sentence = str(caught.value)
    assert sentence.startswith(
        f"no GPU driver can be loaded: there is no {tmp_path}/libcuda.so.1; {broken}: "
    )
    assert len(caught.value.tried) == 2


def test_a_library_that_lacks_a_call_is_called_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library by the right name without the function is an error that names the function."""
    monkeypatch.setenv(OVERRIDES["nvidia"], "libc.so.6")
    with pytest.raises(DriverError, match=r"cuInit: libc\.so\.6 has no such function"):
        open_driver()


def test_a_driver_that_does_not_initialise_says_why(fake_cuda: FakeDriver) -> None:
    """The status of the initialisation reaches the caller."""
    with pytest.raises(DriverError) as caught:
        fake_cuda.start(faults="cuInit=803")
    assert caught.value.code == 803
    assert "unsupported display driver" in str(caught.value)


def test_only_the_named_vendor_counts_when_a_library_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one vendor's library given for a test, the other's is not looked for."""
    monkeypatch.delenv(OVERRIDES["nvidia"], raising=False)
    monkeypatch.setenv(OVERRIDES["amd"], "/some/where.so")
    assert candidates("nvidia") == ()
    assert candidates("amd") == ("/some/where.so",)


def test_without_a_given_library_the_usual_names_are_tried() -> None:
    """The vendors' own names come in their order; torch's copy of AMD's runtime comes last."""
    assert candidates("nvidia", {}) == LIBRARIES["nvidia"]
    found = candidates("amd", {})
    assert found[: len(LIBRARIES["amd"])] == LIBRARIES["amd"]
    assert all(name.endswith("torch/lib/libamdhip64.so") for name in found[len(LIBRARIES["amd"]) :])


def test_a_loaded_copy_of_amds_runtime_comes_first(fake_hip: FakeDriver, tmp_path: Path) -> None:
    """Whoever loaded it, the same copy is used again: two would not know each other's memory."""
    copy = tmp_path / "libamdhip64.so.7"
    copy.write_bytes(fake_hip.path.read_bytes())
    code = (  # in a process of its own: a library that is loaded stays
        "import ctypes, sys; from broker.devices.libraries import candidates; "
        "ctypes.CDLL(sys.argv[1]); print(candidates('amd', {})[0])"
    )
    command = [sys.executable, "-c", code, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(copy)


# --- devices ----------------------------------------------------------------------------------


def test_devices_are_told_by_uuid_and_by_bus_address(fake: FakeDriver) -> None:
    """Two devices have different UUIDs and names, and say where they sit."""
    driver = fake.start("devices=2")
    first, second = visible_uuids(driver)
    assert first.startswith("GPU-")
    assert first != second
    assert driver.name(0) != driver.name(1)
    assert driver.pci_address(1).startswith("0000:")


def test_ordinals_are_translated_by_uuid(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees the devices in another order finds the same one under its own number."""
    everything = visible_uuids(fake.start("devices=3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    driver = fake.start("devices=3")
    assert visible_uuids(driver) == [everything[2], everything[0]]
    assert open_device(driver, everything[0]).ordinal == 1


def test_a_device_can_be_made_visible_by_its_uuid(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UUIDs in the environment show the same devices as numbers do."""
    everything = visible_uuids(fake.start("devices=2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", everything[1])
    assert visible_uuids(fake.start("devices=2")) == [everything[1]]


def test_a_hidden_device_is_named_with_those_that_are_seen(
    fake_cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for a device that the environment hides lists what is visible instead."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    driver = fake_cuda.start("devices=2")
    with pytest.raises(DeviceNotVisible) as caught:
        open_device(driver, GPU_0)
    assert caught.value.visible == [GPU_1]
    assert str(caught.value).startswith(
        f"device {GPU_0} cannot be seen by this process, which sees {GPU_1} (CUDA_VISIBLE_DEVICES"
    )


def test_hiding_every_device_is_no_device(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty list of visible devices the driver says that there is none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DriverError) as caught:
        fake.start()
    assert caught.value.code == abi.NO_DEVICE


def test_a_mig_slice_has_its_own_uuid(fake_cuda: FakeDriver) -> None:
    """A slice is called MIG-… with the slice's identity, under which NVML knows it."""
    device = open_devices(fake_cuda.start("mig=1"))[0]
    assert device.properties.uuid == "MIG-a9111213-1415-1617-1819-1a1b1c1d1e00"
    assert device.free_bytes() == device.properties.total_bytes


def test_an_amd_uuid_is_the_boards_number(fake_hip: FakeDriver) -> None:
    """The digits are those that rocminfo prints."""
    assert visible_uuids(fake_hip.start()) == ["GPU-fa4e000000000000"]


def test_an_amd_board_without_a_number_goes_by_its_bus_address(fake_hip: FakeDriver) -> None:
    """Where the runtime has no UUID, the place on the bus tells the boards of a node apart."""
    driver = fake_hip.start(faults="hipDeviceGetUuid=wrong")
    assert visible_uuids(driver) == ["GPU-0000:c1:00.0"]


class TwinDriver(CudaDriver):
    """Calls both of its devices the same."""

    def _read_uuid(self, ordinal: int) -> str:
        return "GPU-twin"


def test_two_devices_with_one_uuid_are_refused(fake_cuda: FakeDriver) -> None:
    """Weights on twins could not be told apart, so the node is refused with a way out."""
    fake_cuda.start("devices=2")
    with pytest.raises(DeviceError, match="several visible devices have the UUID GPU-twin"):
        visible_uuids(TwinDriver(fake_cuda.control))


def test_capabilities_are_the_drivers_answers(fake_cuda: FakeDriver) -> None:
    """Each attribute arrives where the platform check reads it."""
    driver = fake_cuda.start("vmm=0 posix_fd=0 compute_mode=3 integrated=1 rdma=1")
    assert driver.capabilities(0) == Capabilities(
        virtual_memory=False,
        posix_descriptors=False,
        compute_mode=abi.COMPUTE_MODE_EXCLUSIVE,
        integrated=True,
        rdma=True,
    )


def test_an_attribute_the_driver_is_too_old_for_counts_as_no(fake_cuda: FakeDriver) -> None:
    """CUDA 11.2 does not know about RDMA: the memory is made without it."""
    driver = fake_cuda.start("version=11020 rdma=1")
    assert driver.capabilities(0).rdma is False


def test_amd_has_no_attribute_for_descriptors(fake_hip: FakeDriver) -> None:
    """Exporting counts as possible there until the round trip has spoken."""
    driver = fake_hip.start("vmm=1")
    assert driver.capabilities(0).posix_descriptors is True


# --- AMD's releases ---------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "by_value"), [(70_025_424, 0), (70_125_424, 1)])
def test_the_descriptor_is_imported_as_the_release_wants_it(
    fake_hip: FakeDriver, version: int, by_value: int
) -> None:
    """By pointer before HIP 7.1, by value from then on."""
    driver = fake_hip.start(f"version={version} fd_by_value={by_value}")
    device = open_devices(driver)[0]
    slab = device.create(2 << 20)
    device.map(slab, 2 << 20, writable=False).close()
    os.close(slab)


@pytest.mark.parametrize("keeps", [0, 1])
def test_the_exported_descriptor_is_closed_once_whoever_owns_it(
    fake_hip: FakeDriver, keeps: int
) -> None:
    """Some releases close it with the handle, others never: either way one is left, ours."""
    device = open_devices(fake_hip.start(f"keeps_fd={keeps}"))[0]
    before = len(list(Path("/proc/self/fd").iterdir()))
    slab = device.create(2 << 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    os.close(slab)


def test_a_number_that_another_file_has_taken_is_left_alone(fake_hip: FakeDriver) -> None:
    """The runtime closed the exported descriptor, and a file of another thread got its number."""
    device = open_devices(fake_hip.start("keeps_fd=2"))[0]
    folder = Path("/proc/self/fd")
    before = set(folder.iterdir())
    slab = device.create(2 << 20)
    new = {path for path in folder.iterdir() if path not in before and path.exists()}
    (taken,) = new - {folder / str(slab)}
    assert taken.readlink() == Path("/dev/null")
    os.close(int(taken.name))
    os.close(slab)


# --- imports ----------------------------------------------------------------------------------


def test_the_device_layer_imports_neither_torch_nor_zmq() -> None:
    """The broker's process uses it, so a fresh interpreter must not find them loaded."""
    code = (
        "import sys, broker.devices.discovery, broker.devices.roundtrip; "
        "print([name for name in ('torch', 'zmq', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
