"""Engines (`tests.vllm.engine`) as the test handles them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.clock import eventually
from tests.support.processes import ROOT
from tests.vllm.extension_names import TIMES, UNPACKED

START_SECONDS = 600.0
END_SECONDS = 60.0
_OURS = re.compile(r"weight broker: (published|mapped) as set (\d+)")
_FALLBACK = re.compile(r"weight broker: fallback \d+ of this process \((\w+)\)")


@dataclass(frozen=True)
class Plan:
    """What an engine is started with.

    Attributes:
        options: of `--model-loader-extra-config`; None: vLLM's own loader.
        arguments: further ones of vLLM's `LLM`.
        unpacked: the CPU build computes with plain weights, as a GPU does.
        external: have it ask what the broker holds for it.
        configure: only read the configuration, and end.
    """

    name: str
    model: Path
    prompt: list[int]
    options: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    tokens: int = 12
    unpacked: bool = False
    external: bool = False
    configure: bool = False

    @property
    def ranks(self) -> int:
        return int(self.arguments.get("tensor_parallel_size", 1))

    def all_arguments(self) -> dict[str, Any]:
        if self.options is None:
            return self.arguments
        ours = {"load_format": "weight_broker", "model_loader_extra_config": self.options}
        return {**ours, **self.arguments}


@dataclass
class Report:
    """What a started engine says of itself.

    Attributes:
        start: seconds from the end of the imports until it could answer.
        load: seconds of loading the model; of the slowest rank.
        came: for each rank "published" or "mapped" and the set's number; none without the broker.
    """

    start: float
    load: float
    tokens: list[int]
    external: int | None
    came: list[tuple[str, int]]
    fallbacks: list[str]


class VllmEngine:
    """A started engine. Always `end` or `kill` it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self._times = folder / f"{plan.name}-times"
        self._times.mkdir()
        self.log = folder / f"{plan.name}.log"
        self._report = folder / f"{plan.name}.json"
        told = {
            "model": str(plan.model),
            "report": str(self._report),
            "arguments": plan.all_arguments(),
            "tokens": plan.tokens,
            "prompt": plan.prompt,
            "external": plan.external,
            "configure": plan.configure,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine", json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=_environment(plan, self._times),
                start_new_session=True,  # its workers end with it
            )

    def report(self) -> Report:
        """Wait until it has answered, and read what it says.

        Raises:
            AssertionError: it ended, or took too long.
        """
        eventually(self._is_over, START_SECONDS, f"{self.plan.name}: an answer, see {self.log}")
        if not self._report.exists():
            raise AssertionError(f"{self.plan.name} ended:\n{self.output()[-4000:]}")
        said = json.loads(self._report.read_text())
        output = self.output()
        return Report(
            start=said["start"],
            load=max(json.loads(path.read_text())["seconds"] for path in self._times.iterdir()),
            tokens=said["tokens"],
            external=said["external"],
            came=[(how, int(number)) for how, number in _OURS.findall(output)],
            fallbacks=_FALLBACK.findall(output),
        )

    def refusal(self) -> str:
        """Wait until it has given up, and return all it printed.

        Raises:
            AssertionError: it runs, or ended as if nothing was wrong.
        """
        eventually(self._is_over, START_SECONDS, f"{self.plan.name}: an end, see {self.log}")
        if self.process.poll() in (None, 0):
            self.kill()
            raise AssertionError(f"{self.plan.name} was to refuse, and runs")
        self.kill()
        return self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def _is_over(self) -> bool:
        return self._report.exists() or self.process.poll() is not None

    def end(self) -> None:
        """Let it end, and whatever it started."""
        if self.process.stdin is not None and self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, to its workers too."""
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_SECONDS)
        if self.process.stdin is not None:
            self.process.stdin.close()


def _environment(plan: Plan, times: Path) -> dict[str, str]:
    environment = {
        **os.environ,
        TIMES: str(times),
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    if plan.ranks > 1:
        # vLLM wants a NUMA node for each rank, or to be told where each one's threads run.
        cores = sorted(os.sched_getaffinity(0))
        places = [str(cores[rank % len(cores)]) for rank in range(plan.ranks)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(places)
    if plan.unpacked:
        environment[UNPACKED] = "1"
    return environment
