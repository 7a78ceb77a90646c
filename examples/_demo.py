"""What the examples have in common: a broker, processes that do one step at a time, the device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker import UnsupportedPlatformForIPCError, check_ipc_platform_support
from broker.checkpoints.files import open_checkpoint
from engine_client import BrokerError


def choose_device() -> str:
    """A GPU if there is one; else show the refusal as a user gets it, and simulate."""
    try:
        check_ipc_platform_support(where="broker")
        return "auto"
    except UnsupportedPlatformForIPCError:
        print("$ weight-broker serve", flush=True)
        refused = subprocess.run([sys.executable, "-m", "broker", "serve"], check=False)
        print(f"(exit code {refused.returncode})")
        print(
            "\nThat is what the product does on this machine. This is a demonstration, so it goes "
            "on with\nthe simulated device: host memory in place of a GPU's, everything else real."
            "\n",
            flush=True,
        )
        return "simulated"


def check_model(path: str) -> None:
    """End with a sentence unless there is a checkpoint that can be shared and built."""
    try:
        open_checkpoint(path).close()
    except BrokerError as error:
        sys.exit(f"--model {path}: {error.sentence}")
    if not (Path(path) / "config.json").exists():
        sys.exit(f"--model {path}: there is no config.json that says which model to build")


def torch_name(device: str) -> str:
    """What torch calls the device, made ready for work: on a GPU that costs time and memory.

    One thread for each process, for there are several.
    """
    import torch

    torch.set_num_threads(1)
    name = "cpu" if device == "simulated" else "cuda"
    torch.zeros(1, device=name)
    return name


@contextmanager
def running_broker(device: str, folder: Path, *options: str) -> Iterator[None]:
    """`weight-broker serve`, stopped in order at the end."""
    log = folder / "broker.log"
    where = ("--device", device, "--dir", str(folder))
    with log.open("w") as stderr:
        broker = subprocess.Popen(
            [sys.executable, "-m", "broker", "serve", *where, *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert broker.stdout is not None  # noqa: S101 - it is a pipe
    ready = broker.stdout.readline()
    if not ready:
        raise SystemExit(log.read_text())
    print(ready.strip(), flush=True)
    try:
        yield
    finally:
        broker.terminate()
        broker.wait()


class Process:
    """A process of an example, by itself: `script` with arguments of its own."""

    def __init__(self, script: str, name: str, *arguments: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, Any] = {}

    def hear(self) -> dict[str, Any]:
        """Wait for the next line it says with `say`."""
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def go(self) -> None:
        """Let it do the next step: it waits for a line."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Let it end by itself."""
        self.process.communicate()


def say(**facts: Any) -> None:
    """One line of JSON to whoever started this process."""
    print(json.dumps(facts), flush=True)
