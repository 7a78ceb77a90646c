"""Everything that only a machine with a GPU can show, in one run: prints a table for docs/gpu.md.

    python scripts/gpu_check.py [--budget SECONDS]

Needs Linux, one GPU with its driver, torch built for it, this package's other dependencies, pytest,
pytest-timeout and hypothesis; installs and changes nothing. A step that fails does not stop the
others. Exit status: 0 if no step failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from broker.devices.base import PIECE_BYTES, DeviceError, Segment  # noqa: E402
from broker.devices.cuda import CudaDevice  # noqa: E402
from broker.devices.discovery import open_devices, open_driver  # noqa: E402
from broker.devices.roundtrip import prove_sharing  # noqa: E402

BUDGET_SECONDS = 330.0
"""For all steps: the whole run must end within six minutes."""

FILL_BYTES = 4 << 30


class StepSkipped(Exception):
    """What a step needs is not here; the message says what."""


class StepFailed(Exception):
    """A step's finding is not what it should be; the message is what the table says."""


@dataclass
class Row:
    step: str
    result: str
    """"ok", "skipped" or "FAILED"."""
    finding: str
    seconds: float


def describe(device: CudaDevice) -> str:
    """What the driver says about itself and the device."""
    properties, can = device.properties, device.capabilities
    return (
        f"{properties.name}, {properties.uuid}, {properties.platform} driver "
        f"{device.driver.version()}, {properties.total_bytes >> 20} MiB, of which "
        f"{device.free_bytes() >> 20} free, granularity {properties.granularity >> 10} KiB, "
        f"VMM {can.virtual_memory}, descriptors {can.posix_descriptors}, RDMA {can.rdma}, "
        f"compute mode {can.compute_mode}, integrated {can.integrated}"
    )


def round_trip(device: CudaDevice) -> str:
    """Two child processes share memory, as in the platform check."""
    start = time.monotonic()
    canary = prove_sharing(device.properties.uuid)
    os.close(canary.descriptor)
    return f"pattern written, writer gone, pattern read: {time.monotonic() - start:.1f} s"


def run_pytest(*arguments: str) -> str:
    """Its closing line, and with -rA what became of each test; all its output if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise StepFailed(lines[-1])
    if " passed" not in lines[-1]:
        raise StepSkipped(lines[-1])
    each = [line.replace(" ", ": ", 1) for line in lines if line.startswith("PASSED ")]
    return "; ".join([lines[-1], *(line.partition("::")[2].replace("_", " ") for line in each)])


def fill_rate(device: CudaDevice) -> str:
    """The staging ring against one pinned copy of the same size over and over by torch."""
    nbytes = min(FILL_BYTES, device.free_bytes() // 4)
    nbytes -= nbytes % max(device.properties.granularity, PIECE_BYTES)
    ours = nbytes / ring_seconds(device, nbytes) / 1e9
    theirs = nbytes / plain_seconds(device, nbytes) / 1e9
    return f"ring of 8 buffers {ours:.1f} GB/s, plain pinned copies by torch {theirs:.1f} GB/s"


def ring_seconds(device: CudaDevice, nbytes: int) -> float:
    slab = device.create(nbytes)
    with device.open_writer(slab, nbytes, buffers=8) as writer:
        start = time.monotonic()
        for offset in range(0, nbytes, PIECE_BYTES):
            writer.submit(writer.buffer(), [Segment(0, PIECE_BYTES, offset)])
    seconds = time.monotonic() - start
    os.close(slab)
    return seconds


def plain_seconds(device: CudaDevice, nbytes: int) -> float:
    import torch

    where = f"cuda:{device.ordinal}"
    source = torch.zeros(8 * PIECE_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(8 * PIECE_BYTES, dtype=torch.uint8, device=where)
    torch.cuda.synchronize(where)
    start = time.monotonic()
    for _ in range(nbytes // len(source)):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(where)
    return time.monotonic() - start


def doctor(device: CudaDevice) -> str:
    """The product's own check, as a user runs it; its last line is the device's."""
    done = run_program("-m", "broker", "doctor", "--device", device.properties.uuid)
    steps = done.splitlines()
    return f"{len(steps) - 1} steps passed; {steps[-1]}"


def example(_device: CudaDevice) -> str:
    """Three engines with transformers: one load, equal outputs, one copy of device memory."""
    if importlib.util.find_spec("transformers") is None:
        raise StepSkipped("transformers is not installed")
    said = run_program("examples/two_engines.py").splitlines()
    return "; ".join(
        line for line in said if line.startswith(("together", "checkpoint", "largest"))
    )


def speed(what: str) -> Callable[[CudaDevice], str]:
    return lambda device: run_program("scripts/gpu_speed.py", what, f"cuda:{device.ordinal}")


def run_program(*arguments: str) -> str:
    """What a program of ours prints; its errors go to standard error if it fails."""
    command = [sys.executable, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise StepFailed(f"exit code {done.returncode}: {last}")
    return done.stdout.strip()


STEPS: list[tuple[str, Callable[[CudaDevice], str]]] = [
    ("driver and device", describe),
    ("doctor", doctor),
    ("round trip", round_trip),
    ("device contract", lambda _: run_pytest("tests/devices/test_contract.py", "-m", "gpu")),
    ("device tests", lambda _: run_pytest("tests/gpu/test_gpu_device.py")),
    ("engines and broker", lambda _: run_pytest("-rA", "tests/gpu/test_gpu_engines.py")),
    ("example", example),
    ("attach", speed("attach")),
    ("load rate", speed("load")),
    ("fill rate", fill_rate),
]
"""In this order; each returns what it found, or raises."""


def run_step(name: str, step: Callable[[CudaDevice], str], device: CudaDevice) -> Row:
    start = time.monotonic()
    try:
        passed, finding = "ok", step(device)
    except StepSkipped as error:
        passed, finding = "skipped", str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is belongs in the table
        passed, finding = "FAILED", f"{type(error).__name__}: {error}"
    return Row(name, passed, " ".join(finding.split()), time.monotonic() - start)


def table(rows: list[Row]) -> str:
    lines = ["| step | | finding | s |", "| --- | --- | --- | --- |"]
    lines += [f"| {r.step} | {r.result} | {r.finding} | {r.seconds:.1f} |" for r in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all")
    budget = parser.parse_args().budget
    try:
        device = open_devices(open_driver())[0]
    except (DeviceError, IndexError) as error:
        sys.stderr.write(f"no GPU to check: {error}\n")
        return 2
    end = time.monotonic() + budget
    rows = []
    for name, step in STEPS:
        if time.monotonic() > end:
            rows.append(Row(name, "FAILED", "no time left", 0.0))
        else:
            rows.append(run_step(name, step, device))
    sys.stdout.write(f"Python {platform.python_version()}, Linux {platform.release()}\n\n")
    sys.stdout.write(table(rows) + "\n")
    return 1 if any(row.result == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
