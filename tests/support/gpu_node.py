"""A machine with fake GPUs, on which real brokers and engines run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from broker.devices.libraries import OVERRIDES, Vendor
from tests.fake_driver.build import FakeDriver
from tests.support.processes import ROOT, Engine, Lines, RunningBroker

SETTINGS = "devices=2"
TOTAL = 4 << 30
"""Bytes of a fake device that is not told otherwise."""
CANARY = 2 << 20
"""What the platform check leaves on each device: one granule."""
BUILT_FOR = {"nvidia": "cuda = '12.8'", "amd": "hip = '7.1.25424'"}


class FakeNode:
    """GPUs of one vendor, as every process with `environ()` sees them.

    Engines find a torch that says it is built for them, which is never imported.
    """

    def __init__(self, vendor: Vendor, library: Path, folder: Path) -> None:
        self.vendor = vendor
        self.fake = FakeDriver(vendor, library, folder / "fake-driver.log", folder / "sys")
        self.prefix = "cu" if vendor == "nvidia" else "hip"
        self.site = folder / "site"
        (self.site / "torch").mkdir(parents=True)
        (self.site / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
        version = f"__version__ = '2.13.0'\n{BUILT_FOR[vendor]}\n"
        (self.site / "torch" / "version.py").write_text(version)

    def environ(
        self, settings: str = SETTINGS, faults: str = "", **variables: str
    ) -> dict[str, str]:
        """What is different in the environment of a process on this machine."""
        others = dict.fromkeys(OVERRIDES.values(), "")
        return {**others, **self.fake.environment(settings, faults), **variables}

    def call(self, nvidia: str, amd: str | None = None) -> str:
        """The vendor's name for a driver's function, given without its prefix."""
        name = nvidia if self.vendor == "nvidia" or amd is None else amd
        return f"{self.prefix}{name}"


class GpuEngine(Engine):
    """An engine process on a fake node; connected unless `connect` is false.

    Args:
        device: as `EngineClient` takes it.
        environ: what is different in its environment; None: as `FakeNode.environ` gives it.
    """

    def __init__(
        self,
        node: FakeNode,
        broker: RunningBroker,
        device: str | None = None,
        *,
        connect: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gpu_engine", str(broker.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(node.site),
                **(node.environ() if environ is None else environ),
            },
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input = self.process.stdin
        self._lines = Lines(self.process.stdout)
        self.device: dict[str, object] = {}
        if connect:
            self.device = self.ask("connect", device=device)

    def __enter__(self) -> GpuEngine:
        return self
