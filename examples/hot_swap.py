"""A trainer publishes weights again and again; two engines move to them between forward passes.

    python examples/hot_swap.py

Real processes: a broker, a trainer that fits a small network, and two engines that answer one
question after the other with whatever is newest. Each generation carries what its network answers,
so an engine can tell that it never answers with a mixture of two.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _demo import Process, choose_device, run_main, running_broker, say, torch_name, wait_to_go

from engine_client import EngineClient
from engine_client.watching import Watch

NAME = "policy"
GENERATIONS = 6
STEPS = 40
"""Of the trainer between two generations."""


def network() -> Any:
    import torch

    layers: list[Any] = [torch.nn.Linear(1, 128), torch.nn.Tanh()]
    for _ in range(2):
        layers += [torch.nn.Linear(128, 128), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 1))


def questions(where: str) -> Any:
    import torch

    return torch.linspace(-3, 3, 64, device=where).unsqueeze(1)


def train(device: str, directory: str) -> None:
    """Fit a sine; publish the state dict, so that the trainer's own weights stay its own."""
    import torch

    where = torch_name(device)
    torch.manual_seed(1)
    model, inputs = network().to(where), questions(where)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    with EngineClient(device, directory=directory, label="trainer") as client:
        say(ready=True)
        wait_to_go()
        for number in range(1, GENERATIONS + 1):
            for _ in range(STEPS):
                optimiser.zero_grad()
                loss = (model(inputs) - torch.sin(2 * inputs)).square().mean()
                loss.backward()
                optimiser.step()
            with torch.inference_mode():
                answer = float(model(inputs).sum())
            facts = {"answer": answer, "loss": loss.item()}
            began = time.perf_counter()
            # Its lease goes back at once: only engines keep a generation.
            client.publish(NAME, model.state_dict(), metadata=facts).release()
            seconds = time.perf_counter() - began
            said = f"published generation {number} in {seconds * 1000:.1f} ms"
            say(what=f"{said}; its loss is {facts['loss']:.4f}")


def serve(name: str, device: str, directory: str) -> None:
    """Answer with the newest weights there are, until the last generation has been served."""
    import torch

    from engine_client import parameters_on_meta

    with parameters_on_meta():
        model = network()
    inputs = questions(torch_name(device))
    with EngineClient(device, directory=directory, label=name) as client:
        newer = threading.Event()
        watch = client.watch(NAME)  # before the first acquire: nothing is missed
        threading.Thread(target=listen, args=(watch, newer), daemon=True).start()
        say(ready=True)
        wait_to_go()
        weights = client.acquire(NAME)
        weights.bind(model)
        passes, mixtures = 0, 0
        while True:
            with torch.inference_mode():
                answer = float(model(inputs).sum())
            passes += 1
            mixtures += answer != weights.metadata["answer"]
            if weights.generation == str(GENERATIONS):
                break
            if newer.is_set():
                newer.clear()
                before, began = weights.generation, time.perf_counter()
                weights = weights.swap(model)
                milliseconds = (time.perf_counter() - began) * 1000
                if weights.generation != before:  # else the hint was of weights it has
                    said = f"is on generation {weights.generation} after {passes} passes"
                    say(what=f"{said}; moving took {milliseconds:.1f} ms")
        say(what=f"{passes} passes, {mixtures} of them with a mixture", mixtures=mixtures)


def listen(watch: Watch, newer: threading.Event) -> None:
    """In a thread of its own: an event is a hint that asking again is worth it."""
    for _event in watch:
        newer.set()


# --- the demonstration --------------------------------------------------------------------------


def tell(process: Process, printing: threading.Lock, heard: dict[str, dict[str, Any]]) -> None:
    """Print what a process says as it says it, until its end."""
    while True:
        try:
            facts = process.hear()
        except (SystemExit, KeyboardInterrupt):
            return
        heard[process.name] = facts
        with printing:
            print(f"{process.name:<9} {facts['what']}", flush=True)


def demonstrate() -> None:
    device = choose_device()
    with tempfile.TemporaryDirectory(prefix="wb-") as name, running_broker(device, Path(name)):
        trainer = Process("trainer", train, device, name)
        names = ("engine-1", "engine-2")
        processes = [trainer, *(Process(each, serve, each, device, name) for each in names)]
        for process in processes:
            process.hear()
        heard: dict[str, dict[str, Any]] = {}
        printing = threading.Lock()
        listeners = [
            threading.Thread(target=tell, args=(process, printing, heard)) for process in processes
        ]
        with EngineClient(device, directory=name, label="onlooker") as client:
            first = client.watch(NAME)
            processes[0].go()
            listeners[0].start()
            first.next(timeout=60)
            for process, listener in zip(processes[1:], listeners[1:], strict=True):
                process.go()
                listener.start()
            for listener in listeners:
                listener.join()
            show(client, heard)


def show(client: EngineClient, heard: dict[str, dict[str, Any]]) -> None:
    """What is left, by the broker's own books."""
    sets = client.status()["sets"]
    labels = [entry["names"][NAME] for entry in sets]
    print(f"resident in the end: generation {', '.join(labels)} of {GENERATIONS}")
    mixtures = sum(facts.get("mixtures", 1) for name, facts in heard.items() if name != "trainer")
    if labels != [str(GENERATIONS)] or mixtures:
        raise SystemExit("that is not as it should be: one generation and no mixture were expected")


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    demonstrate()


if __name__ == "__main__":
    run_main(main)
