"""The platform check: every platform there is, on a machine that is none of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from broker import platform
from broker.errors import UnsupportedPlatformForIPCError
from broker.platform import PlatformReport, Where, check_ipc_platform_support, platform_steps
from broker.platform_probe import DriverAnswer, Probe
from tests.support.machines import (
    AMD,
    CPU_TORCH,
    CUDA_TORCH,
    NVIDIA,
    ROCM_TORCH,
    XPU_TORCH,
    AmdBox,
    EmptyDriver,
    FailingDriver,
    HiddenGpu,
    JetsonBox,
    MacBox,
    NvidiaBox,
    OwnKernelWslBox,
    PlainBox,
    WslBox,
)

BROKER_ELSE = (
    "; only CUDA and ROCm devices can share memory between processes; "
    "{fix}load the checkpoint the ordinary way on this platform, or for a trial ask for the "
    "simulated device by name (--device simulated)"
)
ENGINE_ELSE = BROKER_ELSE.replace("--device simulated", 'device="simulated"')

NO_LIBRARY = "no NVIDIA or AMD GPU driver (libcuda.so.1 or libamdhip64.so) is here"

BOTH_SIDES: list[tuple[str, Probe, str, str, str, str]] = [
    ("plain", PlainBox(), "cpu", "no-driver", NO_LIBRARY, ""),
    (
        "intel",
        PlainBox(on_bus=frozenset({"0x8086"})),
        "xpu",
        "no-driver",
        f"{NO_LIBRARY}, only an Intel GPU",
        "",
    ),
    (
        "nvidia without driver",
        PlainBox(on_bus=frozenset({"0x8086", "0x10de"})),
        "cpu",
        "no-driver",
        "an NVIDIA GPU is in this machine but no driver (libcuda.so.1)",
        "install its driver, or ",
    ),
    (
        "amd without driver",
        PlainBox(on_bus=frozenset({"0x1002"})),
        "cpu",
        "no-driver",
        "an AMD GPU is in this machine but no driver (libamdhip64.so)",
        "install its driver, or ",
    ),
    (
        "nvidia container without library",
        PlainBox(files={"/proc/driver/nvidia/version": "NVRM"}),
        "cuda",
        "no-driver-library",
        (
            "the NVIDIA kernel driver is here (/proc/driver/nvidia/version) but its library "
            "libcuda.so.1 is not, as in a container that was started without the GPU"
        ),
        "make libcuda.so.1 available, or ",
    ),
    (
        "amd container without library",
        PlainBox(files={"/dev/kfd": ""}),
        "rocm",
        "no-driver-library",
        (
            "the AMD kernel driver is here (/dev/kfd) but its library libamdhip64.so is not, as in "
            "a container that was started without the GPU"
        ),
        "make libamdhip64.so available, or ",
    ),
    (
        "wsl2",
        WslBox(),
        "wsl2",
        "wsl2",
        (
            "the kernel 5.15.167.4-microsoft-standard-WSL2 is Windows' own (WSL2), whose GPU "
            "driver cannot export GPU memory"
        ),
        "use Linux itself, or ",
    ),
    (
        "wsl2 with its own kernel",
        OwnKernelWslBox(),
        "wsl2",
        "wsl2",
        "the GPU is lent by Windows through /dev/dxg (WSL2), whose driver cannot export GPU memory",
        "use Linux itself, or ",
    ),
    (
        "jetson",
        JetsonBox(),
        "tegra",
        "tegra",
        (
            "an NVIDIA Tegra (Jetson), by /proc/device-tree/compatible, whose driver cannot export "
            "GPU memory"
        ),
        "",
    ),
    (
        "jetson by its release file",
        NvidiaBox(files={"/etc/nv_tegra_release": "# R36 (release)"}),
        "tegra",
        "tegra",
        "an NVIDIA Tegra (Jetson), by /etc/nv_tegra_release, whose driver cannot export GPU memory",
        "",
    ),
    (
        "hidden from cuda",
        HiddenGpu(NVIDIA, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="0"),
        "cuda",
        "hidden",
        "its GPU is hidden by CUDA_VISIBLE_DEVICES=''",
        "unset that, or ",
    ),
    (
        "hidden from rocm",
        HiddenGpu(AMD, HIP_VISIBLE_DEVICES="-1", ROCR_VISIBLE_DEVICES="7"),
        "rocm",
        "hidden",
        "its GPU is hidden by ROCR_VISIBLE_DEVICES='7' and HIP_VISIBLE_DEVICES='-1'",
        "unset that, or ",
    ),
    (
        "driver without device",
        EmptyDriver(),
        "cuda",
        "no-device",
        "the NVIDIA driver is here but says that there is no device",
        "",
    ),
    (
        "driver without device, though something is hidden",
        EmptyDriver(CUDA_VISIBLE_DEVICES="0"),
        "cuda",
        "no-device",
        "the NVIDIA driver is here but says that there is no device",
        "",
    ),
    (
        "driver that fails",
        FailingDriver("cuInit failed with code 999 (CUDA_ERROR_UNKNOWN)", "driver-failed"),
        "cuda",
        "driver-failed",
        "the NVIDIA driver cannot be used: cuInit failed with code 999 (CUDA_ERROR_UNKNOWN)",
        "repair the driver, or ",
    ),
    (
        "driver of another architecture",
        FailingDriver("libcuda.so.1 cannot be loaded (wrong ELF class)", "driver-failed", ""),
        "cuda",
        "driver-failed",
        "the NVIDIA driver cannot be used: libcuda.so.1 cannot be loaded (wrong ELF class)",
        "repair the driver, or ",
    ),
    (
        "hanging driver",
        FailingDriver("it has not initialised within 60 seconds", "driver-hung"),
        "cuda",
        "driver-hung",
        "the NVIDIA driver cannot be used: it has not initialised within 60 seconds",
        "repair the driver, or ",
    ),
]


def accepted(where: Where, probe: Probe, device: str = "auto") -> PlatformReport:
    """The report of a machine that may share; what its round trips left is closed."""
    report = check_ipc_platform_support(where=where, device=device, probe=probe)
    for canary in report.canaries.values():
        os.close(canary.descriptor)
    return report


def refusal(where: Where, probe: Probe, device: str = "auto") -> UnsupportedPlatformForIPCError:
    with pytest.raises(UnsupportedPlatformForIPCError) as caught:
        check_ipc_platform_support(where=where, device=device, probe=probe)
    return caught.value


@pytest.mark.parametrize("where", ["broker", "engine"])
@pytest.mark.parametrize(
    ("probe", "found", "reason", "text", "fix"),
    [pytest.param(*row, id=name) for name, *row in BOTH_SIDES],
)
def test_both_sides_refuse(
    where: Where, probe: Probe, found: str, reason: str, text: str, fix: str
) -> None:
    """Each platform is refused on both sides, in a sentence: what, why, what instead."""
    error = refusal(where, probe)
    instead = (BROKER_ELSE if where == "broker" else ENGINE_ELSE).format(fix=fix)
    assert str(error) == f"[weight-broker:{where}] found platform {found}: {text}{instead}"
    assert error.fields == {"where": where, "platform": found, "reason": reason}


@pytest.mark.parametrize(
    ("probe", "found", "reason", "text", "fix"),
    [
        (
            NvidiaBox(CPU_TORCH),
            "cpu",
            "torch-without-gpu",
            ("torch 2.13.0+cpu is built without GPU support, although here are 2 NVIDIA devices"),
            "install torch for CUDA, or ",
        ),
        (
            AmdBox(CUDA_TORCH),
            "rocm",
            "torch-for-another-device",
            "torch 2.13.0+cu128 is built for CUDA, but here are 1 AMD device",
            "install torch for ROCm, or ",
        ),
        (
            NvidiaBox(XPU_TORCH),
            "xpu",
            "torch-for-another-device",
            "torch 2.13.0+xpu is built for XPU, but here are 2 NVIDIA devices",
            "install torch for CUDA, or ",
        ),
        (
            NvidiaBox(None),
            "cpu",
            "no-torch",
            "no usable torch is installed, although here are 2 NVIDIA devices",
            "install torch for it, or ",
        ),
        (
            PlainBox(torch=XPU_TORCH),
            "xpu",
            "no-driver",
            f"{NO_LIBRARY}, and torch 2.13.0+xpu is built for XPU",
            "",
        ),
    ],
)
def test_engine_refuses_torch(
    probe: PlainBox, found: str, reason: str, text: str, fix: str
) -> None:
    """An engine whose torch cannot use the GPU is refused; the broker never looks at torch."""
    error = refusal("engine", probe)
    instead = ENGINE_ELSE.format(fix=fix)
    assert str(error) == f"[weight-broker:engine] found platform {found}: {text}{instead}"
    assert error.fields == {"where": "engine", "platform": found, "reason": reason}
    probe.looked.clear()
    platform_steps("broker", probe=probe)
    assert "torch" not in probe.looked


@pytest.mark.parametrize(
    ("probe", "found", "title"),
    [
        (MacBox(), "mps", "macOS with an Apple GPU"),
        (MacBox("x86_64"), "macos", "macOS"),
        (PlainBox(os_name="win32"), "windows", "Windows"),
        (PlainBox(os_name="freebsd14"), "freebsd14", "freebsd14"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda:0", "simulated"])
def test_only_linux(probe: PlainBox, found: str, title: str, device: str) -> None:
    """Other operating systems are refused, without offering the device that cannot work there."""
    assert str(refusal("engine", probe, device)) == (
        f"[weight-broker:engine] found platform {found}: the weight broker needs Linux, not "
        f"{title}; only CUDA and ROCm devices can share memory between processes; "
        "load the checkpoint the ordinary way on this platform"
    )
    assert probe.looked == []


@pytest.mark.parametrize("device", ["cpu", "xpu:1", "mps", "gpu", "cuda:x", "SIMULATED", ""])
def test_other_devices_are_refused_by_name(device: str) -> None:
    """A device neither GPU nor simulated is refused before any driver is asked."""
    box = NvidiaBox()
    error = refusal("broker", box, device)
    platform = (
        device.partition(":")[0] if device in ("cpu", "xpu:1", "mps", "cuda:x") else "unknown"
    )
    other = "" if device in ("cpu", "xpu:1", "mps") else ", which is the name of none"
    fix = 'say "cuda" for a GPU, also AMD\'s, "cuda:1" or a UUID for one of several, or '
    assert str(error) == (
        f"[weight-broker:broker] found platform {platform}: the device {device!r} was asked for"
        + other
        + BROKER_ELSE.format(fix=fix)
    )
    assert box.looked == []


@pytest.mark.parametrize(
    ("device", "proven"),
    [
        ("auto", ["GPU-0100", "GPU-0004"]),
        ("cuda", ["GPU-0100", "GPU-0004"]),
        ("cuda:1", ["GPU-0004"]),
        ("GPU-0100", ["GPU-0100"]),
        ("GPU-0004, cuda:0,GPU-0004", ["GPU-0004", "GPU-0100"]),
    ],
)
def test_a_broker_proves_the_devices_that_are_meant(device: str, proven: list[str]) -> None:
    """Every way to name GPUs means those, each makes one round trip, whose canary is handed on."""
    box = NvidiaBox()
    report = accepted("broker", box, device)
    assert report.platform == "cuda"
    assert sorted(report.canaries) == sorted(proven)
    assert sorted(box.looked) == sorted(["drivers", *(f"round trip {uuid}" for uuid in proven)])


@pytest.mark.parametrize("device", ["auto", "cuda:0", "GPU-0004"])
def test_an_engine_makes_no_round_trip(device: str) -> None:
    """It relies on its broker's, and compares a canary when it maps for the first time."""
    box = NvidiaBox()
    report = accepted("engine", box, device)
    assert (report.platform, report.canaries) == ("cuda", {})
    assert box.looked == ["drivers", "torch"]


@pytest.mark.parametrize("device", ["simulated", "SIM-0"])
@pytest.mark.parametrize("probe", [PlainBox(), NvidiaBox(), WslBox(), JetsonBox()])
def test_simulated_needs_linux_only(probe: PlainBox, device: str) -> None:
    """The simulated device is there on any Linux when it is asked for, and no driver is asked."""
    report = check_ipc_platform_support(where="engine", device=device, probe=probe)
    assert isinstance(report, PlatformReport)
    assert (report.where, report.platform) == ("engine", "simulated")
    assert [step.name for step in report.steps] == ["operating system", "sealed memory files"]
    assert probe.looked == []


def test_simulated_needs_sealing() -> None:
    """Without sealed memory files the simulated device is refused and not offered again."""
    probe = PlainBox(sealing="this Python was built without memfd_create")
    error = refusal("broker", probe, "simulated")
    assert str(error) == (
        "[weight-broker:broker] found platform cpu: the simulated device needs sealed memory files,"
        " but this Python was built without memfd_create; only CUDA and ROCm devices can share"
        " memory between processes without it; load the checkpoint the ordinary way on this"
        " platform"
    )
    assert error.reason == "no-memory-files"


def test_one_working_driver_is_enough() -> None:
    """A GPU that works serves, whatever is wrong with another vendor's driver."""
    hung = DriverAnswer("amd", "?", "it crashed", "driver-crashed")
    probe = PlainBox(answers=(NVIDIA, hung), torch=CUDA_TORCH)
    assert accepted("engine", probe).platform == "cuda"


def test_engine_takes_the_gpu_its_torch_is_for() -> None:
    """With GPUs of both vendors an engine's torch decides."""
    probe = PlainBox(answers=(NVIDIA, AMD), torch=ROCM_TORCH)
    assert accepted("engine", probe).platform == "rocm"
    assert accepted("broker", probe).platform == "cuda"


def test_steps_for_a_person() -> None:
    """`doctor` gets every step, each with what was found, and no canary is left."""
    files = {"/proc/sys/kernel/osrelease": "6.8.0-generic\n"}
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - names only
    steps = platform_steps("broker", "cuda:0", NvidiaBox(files=files))
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    assert [step.name for step in steps] == [
        "operating system",
        "device asked for",
        "not under Windows",
        "not a Tegra",
        "GPU driver",
        "visible devices",
        "driver release",
        "devices meant",
        "memory export",
        "compute mode",
        "round trip",
    ]
    assert all(step.ok for step in steps)
    assert [step.sentence for step in steps[:-1]] == [
        "Linux",
        "cuda:0 means a GPU",
        "kernel 6.8.0-generic",
        "no sign of one",
        "the NVIDIA driver for CUDA 12.8 (libcuda.so.1)",
        "2 NVIDIA devices",
        "new enough",
        "GPU-0100",
        "virtual memory management and POSIX descriptors",
        "shared",
    ]
    assert re.fullmatch(
        r"a process read what another had written, after \d\.\d s", steps[-1].sentence
    )
    amd = platform_steps("engine", probe=AmdBox())
    assert amd[4].sentence == "the AMD driver for HIP 7.1 (libamdhip64.so.7)"
    assert [step.name for step in amd[-3:]] == ["torch", "driver release", "devices meant"]


def test_result_is_kept_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drivers are asked once a process, and again when the variables that hide GPUs change."""
    boxes = []

    class CountedBox(PlainBox):
        def __init__(self) -> None:
            super().__init__(variables=dict(os.environ))
            boxes.append(self)

    monkeypatch.setattr(platform, "Probe", CountedBox)
    monkeypatch.setattr(platform, "_cache", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def asked() -> int:
        with pytest.raises(UnsupportedPlatformForIPCError):
            check_ipc_platform_support(where="broker")
        return sum(len(box.looked) for box in boxes)

    assert [asked(), asked()] == [1, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [asked(), asked()] == [2, 2]


def test_kept_refusals_are_fresh_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls never raise the same exception object: its traceback would grow."""
    monkeypatch.setattr(platform, "Probe", PlainBox)
    monkeypatch.setattr(platform, "_cache", {})
    errors = []
    for _ in range(2):
        with pytest.raises(UnsupportedPlatformForIPCError) as caught:
            check_ipc_platform_support(where="engine")
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])


def test_on_this_machine(tmp_path: Path) -> None:
    """Here, without doubles: a refusal that needed no torch, unless there is a GPU."""
    if any(answer.library for answer in Probe().ask_drivers(os.environ)):
        pytest.skip("this machine has a GPU driver")
    program = (
        "import sys\n"
        "from broker.platform import check_ipc_platform_support\n"
        "check_ipc_platform_support(where='engine', device='simulated')\n"
        "try:\n"
        "    check_ipc_platform_support(where='engine')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.reason, 'torch' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        cwd=tmp_path,
    )
    words = result.stdout.split()
    assert words[0] == "UnsupportedPlatformForIPCError"
    assert words[1].startswith("no-driver")
    assert words[2] == "False"
    assert list(tmp_path.iterdir()) == []
