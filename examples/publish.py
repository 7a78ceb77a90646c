"""One engine quantises the weights; all others map what it made.

    python examples/publish.py

Two engines start at once and both want the same int8 weights. Each could make them; the broker lets
one, and the other waits for it and maps. A third that comes later finds them there. Real processes:
a broker and three engines.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from _demo import Process, choose_device, run_main, running_broker, say, torch_name, wait_to_go

from engine_client import EngineClient, WeightKey

WIDTH, LAYERS = 512, 12


def network() -> Any:
    """Layers of int8 weights with a scale for each row; nothing in them has a value yet."""
    import torch

    class Int8Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.empty(WIDTH, WIDTH, dtype=torch.int8, device="meta")
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.scale = torch.nn.Parameter(torch.empty(WIDTH, device="meta"))

        def forward(self, inputs: Any) -> Any:
            return torch.tanh(inputs @ self.weight.float().T * self.scale)

    return torch.nn.Sequential(*(Int8Layer() for _ in range(LAYERS)))


def trained(where: str) -> dict[str, Any]:
    """The weights that every engine could quantise. Stands for reading a checkpoint."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape, scale = (WIDTH, WIDTH), WIDTH**-0.5
    return {
        f"{layer}.weight": (torch.randn(shape, generator=generator) * scale).to(where)
        for layer in range(LAYERS)
    }


def quantised(where: str) -> dict[str, Any]:
    """int8 weights, and a scale for each row: what is worth doing once."""
    import torch

    made: dict[str, Any] = {}
    for name, weight in trained(where).items():
        scale = weight.abs().amax(dim=1) / 127
        made[name] = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        made[name.replace("weight", "scale")] = scale
    return made


def engine(name: str, device: str, directory: str) -> None:
    """Ready, then, when it is told: get the weights, say how, and what they answer."""
    import torch

    where = torch_name(device)
    model = network()
    key = WeightKey(name="model-int8", format="example", quantization="int8")
    with EngineClient(device, directory=directory, label=name) as client:
        say(ready=True)
        wait_to_go()
        began = time.perf_counter()
        weights = client.get_or_publish(key, lambda: quantised(where))
        weights.bind(model)
        seconds = time.perf_counter() - began
        with torch.inference_mode():
            answer = float(model(torch.ones(1, WIDTH, device=where)).sum())
        say(seconds=seconds, how=weights.how, nbytes=weights.nbytes, answer=answer)
        wait_to_go()


def demonstrate() -> None:
    device = choose_device()
    with tempfile.TemporaryDirectory(prefix="wb-") as name, running_broker(device, Path(name)):

        def start(names: list[str]) -> list[Process]:
            engines = [Process(each, engine, each, device, name) for each in names]
            for each in engines:
                each.hear()
            return engines

        engines = start(["engine-1", "engine-2"])
        ask(engines)
        late = start(["engine-3"])
        ask(late)
        engines += late
        with EngineClient(device, directory=name, label="onlooker") as client:
            status = client.status()
        for each in engines:
            each.end()
        show(engines, status)


def ask(engines: list[Process]) -> None:
    """Let all of them ask for the weights at the same moment."""
    for each in engines:
        each.go()
    for each in engines:
        each.facts = each.hear()


def show(engines: list[Process], status: dict[str, Any]) -> None:
    """The table. Every figure was measured in this run."""
    words = {
        "published": "quantised them itself",
        "shared": "waited for the one that did",
        "resident": "found them there",
    }
    print(f"\n{'engine':<10}{'time to weights':>16}  how")
    for each in engines:
        seconds = f"{each.facts['seconds'] * 1000:.1f} ms"
        print(f"{each.name:<10}{seconds:>16}  {words[each.facts['how']]}")
    (entry,) = status["sets"]
    print(
        f"\n{4 * LAYERS * WIDTH**2 / 1e6:.1f} MB of float32 became {entry['nbytes'] / 1e6:.1f} MB "
        f"of int8, once: {len(entry['leases'])} engines map one copy"
    )
    builders = [each.name for each in engines if each.facts["how"] == "published"]
    answers = {each.facts["answer"] for each in engines}
    print(f"builds: {len(builders)}, different answers: {len(answers)}")
    if len(builders) != 1 or len(answers) != 1:
        raise SystemExit("that is not as it should be: one build and one answer were expected")


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    demonstrate()


if __name__ == "__main__":
    run_main(main)
