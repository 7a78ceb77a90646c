"""The steps of the platform check that need a driver and devices: every refusal, word by word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from broker import platform
from broker.errors import UnsupportedPlatformForIPCError
from broker.platform import check_ipc_platform_support, platform_steps
from broker.platform_probe import DeviceAnswer, Probe
from tests.support.machines import (
    AMD,
    CUDA_TORCH,
    H100,
    L4,
    NO_NVIDIA,
    NVIDIA,
    LyingDriver,
    MeetingDriver,
    NvidiaBox,
    PlainBox,
)

ELSE = (
    "; only CUDA and ROCm devices can share memory between processes; {fix}load the checkpoint the "
    "ordinary way on this platform, or for a trial ask for the simulated device by name "
    "(--device simulated)"
)
OTHER = "serve other devices by name (--device {}), or "
MIG_A = DeviceAnswer("MIG-a", "NVIDIA H100 MIG 1g.10gb", 10 << 30)


def nvidia(*devices: DeviceAnswer, variables: dict[str, str] | None = None) -> PlainBox:
    answer = replace(NVIDIA, devices=len(devices), described=devices)
    return PlainBox(answers=(answer,), variables=variables or {}, torch=CUDA_TORCH)


def amd(**different: object) -> PlainBox:
    return PlainBox(answers=(NO_NVIDIA, replace(AMD, **different)))  # type: ignore[arg-type]


def refusal(probe: Probe, device: str = "auto") -> UnsupportedPlatformForIPCError:
    with pytest.raises(UnsupportedPlatformForIPCError) as caught:
        check_ipc_platform_support(where="broker", device=device, probe=probe)
    return caught.value


REFUSALS: list[tuple[str, PlainBox, str, str, str, str, str]] = [
    (
        "a runtime before ROCm 6",
        amd(version=50631061),
        "auto",
        "rocm",
        "rocm-too-old",
        (
            "the AMD driver for HIP 5.6 (libamdhip64.so.7) is older than ROCm 6, whose memory "
            "calls are others"
        ),
        "install ROCm 6 or newer, or ",
    ),
    (
        "a driver without the calls",
        amd(described=(), undescribed="hipDeviceGetUuid: the driver is too old"),
        "auto",
        "rocm",
        "not-described",
        (
            "the AMD driver for HIP 7.1 (libamdhip64.so.7) cannot describe its devices: "
            "hipDeviceGetUuid: the driver is too old"
        ),
        "update the driver, or ",
    ),
    (
        "a device that is not there",
        nvidia(H100, L4),
        "GPU-0100,cuda:2",
        "cuda",
        "not-visible",
        "device cuda:2 cannot be seen by this process, which sees GPU-0100, GPU-0004",
        "name one of those, or ",
    ),
    (
        "a second slice",
        nvidia(MIG_A),
        "MIG-b",
        "cuda",
        "not-visible",
        "device MIG-b cannot be seen by this process, which sees MIG-a",
        (
            "name one of those, or, since a process sees one MIG slice, start a broker and its "
            "engines with CUDA_VISIBLE_DEVICES set to that slice, or "
        ),
    ),
    (
        "no virtual memory management",
        nvidia(H100, replace(L4, virtual_memory=False)),
        "auto",
        "cuda",
        "no-vmm",
        "GPU-0004 (NVIDIA L4) has no virtual memory management, without which nothing is shared",
        OTHER.format("GPU-0100"),
    ),
    (
        "no descriptors",
        nvidia(replace(H100, posix_descriptors=False)),
        "auto",
        "cuda",
        "no-descriptors",
        "the memory of GPU-0100 (NVIDIA H100) cannot be exported as POSIX descriptors",
        "",
    ),
    (
        "exclusive",
        nvidia(H100, replace(L4, compute_mode=3)),
        "cuda:1",
        "cuda",
        "exclusive",
        (
            "GPU-0004 (NVIDIA L4) is in compute mode EXCLUSIVE_PROCESS, which admits one process "
            "and not loaders and engines"
        ),
        "set it to DEFAULT (nvidia-smi -i GPU-0004 -c DEFAULT), or ",
    ),
    (
        "prohibited",
        nvidia(replace(L4, compute_mode=2)),
        "auto",
        "cuda",
        "prohibited",
        "GPU-0004 (NVIDIA L4) is in compute mode PROHIBITED, which admits no process",
        "set it to DEFAULT (nvidia-smi -i GPU-0004 -c DEFAULT), or ",
    ),
    (
        "wrong bytes",
        LyingDriver("GPU-0004"),
        "auto",
        "cuda",
        "round-trip-wrong-bytes",
        (
            "memory of GPU-0004 (NVIDIA L4) could not be shared between two processes: these are "
            "the reader's words"
        ),
        OTHER.format("GPU-0100"),
    ),
    (
        "hanging",
        LyingDriver("GPU-0100", "GPU-0004", reason="hung"),
        "auto",
        "cuda",
        "round-trip-hung",
        (
            "memory of GPU-0100 (NVIDIA H100) could not be shared between two processes: these are "
            "the reader's words"
        ),
        OTHER.format("GPU-0004"),
    ),
]


@pytest.mark.parametrize(
    ("probe", "device", "found", "reason", "text", "fix"),
    [pytest.param(*row, id=name) for name, *row in REFUSALS],
)
def test_refusals(
    probe: PlainBox, device: str, found: str, reason: str, text: str, fix: str
) -> None:
    """Each step that fails has its own sentence: what, why, what instead."""
    error = refusal(probe, device)
    assert str(error) == (
        f"[weight-broker:broker] found platform {found}: {text}{ELSE.format(fix=fix)}"
    )
    assert error.fields == {"where": "broker", "platform": found, "reason": reason}


@pytest.mark.parametrize(
    "probe", [nvidia(replace(L4, compute_mode=3), H100), LyingDriver("GPU-0004")]
)
def test_what_is_not_served_need_not_be_able_to(probe: PlainBox) -> None:
    """A device that cannot share is nobody's trouble where another one is named."""
    report = check_ipc_platform_support(where="broker", device="GPU-0100", probe=probe)
    assert list(report.canaries) == ["GPU-0100"]
    os.close(report.canaries["GPU-0100"].descriptor)


def test_a_failed_check_leaves_no_canary() -> None:
    """What the devices that could share have left is closed when one could not."""
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - names only
    refusal(LyingDriver("GPU-0004"))
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_devices_are_proven_at_the_same_time() -> None:
    """Eight devices cost the time of one."""
    assert platform_steps("broker", probe=MeetingDriver())[-1].ok


@pytest.mark.parametrize(
    ("devices", "named", "note"),
    [
        ([MIG_A], "MIG-a", ""),
        ([MIG_A], "MIG-a, MIG-b,MIG-c", (
            ", although CUDA_VISIBLE_DEVICES names 3 MIG slices: a process sees one, so start one "
            "broker for each"
        )),
        ([H100, L4], "GPU-0100,GPU-0004", ""),
    ],
)  # fmt: skip
def test_slices_that_are_not_seen(devices: Sequence[DeviceAnswer], named: str, note: str) -> None:
    """Who names several MIG slices is told that a process sees one of them."""
    box = nvidia(*devices, variables={"CUDA_VISIBLE_DEVICES": named})
    step = next(s for s in platform_steps("broker", probe=box) if s.name == "visible devices")
    plural = "s" if len(devices) > 1 else ""
    assert step.sentence == f"{len(devices)} NVIDIA device{plural}{note}"


def test_the_round_trip_is_made_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again answers from memory, with the canaries of the first time."""
    boxes: list[NvidiaBox] = []

    class CountedBox(NvidiaBox):
        def __init__(self) -> None:
            super().__init__()
            boxes.append(self)

    monkeypatch.setattr(platform, "Probe", CountedBox)
    monkeypatch.setattr(platform, "_cache", {})
    first = check_ipc_platform_support(where="broker", device="cuda:0")
    assert check_ipc_platform_support(where="broker", device="cuda:0") == first
    assert [box.looked for box in boxes] == [["drivers", "round trip GPU-0100"], []]
    os.close(first.canaries["GPU-0100"].descriptor)
