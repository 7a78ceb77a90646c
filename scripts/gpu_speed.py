"""Attach time and load rate on one device, each beside what it replaces. Run by gpu_check.py.

    python scripts/gpu_speed.py (attach | load) DEVICE

DEVICE is "cuda:N", or "simulated" to see that this program works. Prints one line.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module, Parameter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from broker.checkpoints.files import open_checkpoint  # noqa: E402
from broker.checkpoints.plan import plan_checkpoint  # noqa: E402
from broker.checkpoints.reading import load_pieces  # noqa: E402
from broker.devices import open_devices  # noqa: E402
from broker.devices.base import PIECE_BYTES, Device  # noqa: E402
from broker.weights import align_up  # noqa: E402
from engine_client import Checkpoint, EngineClient  # noqa: E402
from tests.support.processes import RunningBroker  # noqa: E402

TENSORS = 10_000
SHAPE = (64, 32)
LOAD_BYTES = int(os.environ.get("GPU_SPEED_BYTES", 4 << 30))
THREADS = 4
RING = 2 * THREADS
ROUNDS = 5


def torch_name(device: str) -> str:
    return "cpu" if device == "simulated" else device


def synchronised(work: Callable[[], object], device: str) -> float:
    """Seconds until the work is done, on the device too."""
    began = time.perf_counter()
    kept = work()
    if device != "simulated":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    del kept
    return seconds


def median(work: Callable[[], object], device: str, rounds: int = ROUNDS) -> float:
    return statistics.median(synchronised(work, device) for _ in range(rounds))


# --- attach -------------------------------------------------------------------------------------


class Many(Module):
    """A module of as many parameters as the checkpoint has tensors, on meta."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(TENSORS):
            empty = torch.empty(SHAPE, dtype=torch.float16, device="meta")
            self.register_parameter(f"t{number}", Parameter(empty, requires_grad=False))


def attach(device: str, folder: Path) -> str:
    """A warm engine maps and binds 10,000 tensors; beside it a read of the same file."""
    tensors = {f"t{number}": torch.ones(SHAPE, dtype=torch.float16) for number in range(TENSORS)}
    save_file(tensors, folder / "model.safetensors")
    torch.zeros(1, device=torch_name(device))
    broker = RunningBroker(folder, device=device)
    with EngineClient(device, directory=folder) as client:
        client.acquire(Checkpoint(folder)).release()
        modules = [Many() for _ in range(ROUNDS)]

        def bind() -> None:
            weights = client.acquire(Checkpoint(folder))
            module = modules.pop()
            weights.bind(module)
            kept.append((weights, module))

        kept: list[tuple[object, Module]] = []
        ours = median(bind, device)
    broker.stop()
    read = lambda: load_file(folder / "model.safetensors", device=torch_name(device))  # noqa: E731
    theirs = median(read, device)
    return (
        f"{TENSORS} tensors acquired and bound in {ours * 1e3:.1f} ms; "
        f"load_file of the same file {theirs * 1e3:.1f} ms ({theirs / ours:.1f} x)"
    )


# --- load ---------------------------------------------------------------------------------------


def load(device: str, folder: Path) -> str:
    """A loader's work on one large checkpoint in the page cache, with and beside its parts."""
    part = LOAD_BYTES // 16
    tensors = {f"t{n}": torch.full((part // 2,), n, dtype=torch.float16) for n in range(16)}
    save_file(tensors, folder / "model.safetensors")
    del tensors
    opened = open_devices(device)[0]
    ours = min(load_seconds(opened, folder) for _ in range(3))
    read = lambda: load_file(folder / "model.safetensors", device=torch_name(device))  # noqa: E731
    theirs = min(synchronised(read, device) for _ in range(3))
    copies = synchronised(lambda: pinned_copies(device), device)
    rates = [LOAD_BYTES / seconds / 1e9 for seconds in (ours, theirs, copies)]
    return (
        f"loader with digest, {THREADS} threads {rates[0]:.1f} GB/s; load_file to the device "
        f"{rates[1]:.1f} GB/s ({rates[0] / rates[1]:.2f} x); pinned copies alone {rates[2]:.1f} "
        f"GB/s ({rates[0] / rates[2]:.2f} x)"
    )


def load_seconds(device: Device, folder: Path) -> float:
    with open_checkpoint(str(folder)) as opened:
        plan = plan_checkpoint(opened.folder, None, str(folder))
        nbytes = align_up(plan.manifest.nbytes, device.properties.granularity)
        slab = device.create(nbytes)
        try:
            with device.open_writer(slab, nbytes, buffers=RING) as writer:
                began = time.perf_counter()
                load_pieces(plan, opened.folder, writer, THREADS, lambda _done, _total: None)
            return time.perf_counter() - began
        finally:
            os.close(slab)


def pinned_copies(device: str) -> Tensor:
    """The same bytes out of one pinned ring, over and over: what the bus gives."""
    where = torch_name(device)
    source = torch.zeros(RING * PIECE_BYTES, dtype=torch.uint8)
    source = source if where == "cpu" else source.pin_memory()
    target = torch.empty(RING * PIECE_BYTES, dtype=torch.uint8, device=where)
    for _ in range(LOAD_BYTES // len(source)):
        target.copy_(source, non_blocking=True)
    return target


def main() -> None:
    what, device = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        print({"attach": attach, "load": load}[what](device, Path(name)))


if __name__ == "__main__":
    main()
