"""The examples that need no packages of their own run as they are, and show what they promise.

`examples/two_engines.py` needs transformers and real weights: `make example` runs it.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.__main__ import EXIT_INTERRUPTED
from broker.errors import BrokerNotFound, NotFound
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE, eventually
from tests.support.processes import processes_of
from tests.support.stored import small_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120.0


def run(name: str) -> str:
    """What an example prints, told to see no GPU: it says so and goes on with the simulated one."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS * SCALE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "only CUDA and ROCm devices can share memory" in done.stderr
    assert "goes on with\nthe simulated device" in done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.timeout(150 * SCALE)
def test_hot_swap() -> None:
    """A trainer and two engines: no pass with a mixture, one generation left in the end."""
    said = run("hot_swap.py")
    assert len(re.findall(r"^trainer +published generation \d in ", said, re.MULTILINE)) == 6
    for engine in ("engine-1", "engine-2"):
        (passes,) = re.findall(rf"^{engine} +(\d+) passes, 0 of them with a mixture$", said, re.M)
        assert int(passes) > 1
    assert said.endswith("resident in the end: generation 6 of 6\n")


@pytest.mark.timeout(150 * SCALE)
def test_publish() -> None:
    """Three engines: one quantises, one waits for it, one comes later; one copy, one answer."""
    said = run("publish.py")
    how = [line.split(" ms  ")[1] for line in said.splitlines() if " ms  " in line]
    assert sorted(how[:2]) == ["quantised them itself", "waited for the one that did"]
    assert how[2] == "found them there"
    assert "3 engines map one copy" in said
    assert said.endswith("builds: 1, different answers: 1\n")


def test_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine against a broker that runs already says what it has mapped, and gives it back."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    main = importlib.import_module("one_engine").main
    tmp_path.chmod(0o700)
    model = small_checkpoint(tmp_path / "model")
    where = ["--device", "simulated", "--directory", str(tmp_path), "--model", str(model)]
    with brokers(tmp_path) as start:
        broker = start()
        for how in ("loaded", "resident"):
            assert main([*where, "--once"]) == 0
            said, gave_back = capsys.readouterr().out.splitlines()
            assert f"4 tensors, 0.3 MB, {how}, mapped in " in said
            assert gave_back.endswith("gave them back")
        wrong = [*where[:-1], str(tmp_path / "none"), "--once"]
        assert main(wrong) == NotFound.exit_code
        assert "there is no checkpoint" in capsys.readouterr().err
        eventually(lambda: not broker.leases(), 5, "the end of the last lease")
    assert main(where) == BrokerNotFound.exit_code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("no broker named 'default' is running")


@pytest.mark.parametrize(
    ("interrupt", "begun"),
    [(os.kill, "weight-broker ready"), (os.killpg, "trainer ")],
    ids=["alone, when the broker is ready", "with its children, in the midst"],
)
def test_interrupt(interrupt: Callable[[int, int], None], begun: str) -> None:
    """Ctrl-C ends an example with a word; no process and no file is left."""
    with private_directory() as folder:
        example = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "hot_swap.py")],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "HIP_VISIBLE_DEVICES": "",
                "TMPDIR": str(folder),
                "WEIGHT_BROKER_TEST_LOADER": f"{folder}/",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert example.stdout is not None
        try:
            assert any(line.startswith(begun) for line in example.stdout)
            interrupt(example.pid, signal.SIGINT)
            _said, complaints = example.communicate(timeout=20 * SCALE)
        finally:
            example.kill()
        assert example.returncode == EXIT_INTERRUPTED, complaints
        assert re.search(r"\(--device simulated\)\ninterrupted\n$", complaints)
        assert "Traceback" not in complaints
        assert list(folder.glob("wb-*")) == []  # torch leaves a folder of its own
        eventually(lambda: not processes_of(folder), 5, "the end of every process")


@pytest.mark.timeout(150 * SCALE)
def test_tiny_engine() -> None:
    """Two engines at once, one killed and started again: one load, and the words they say alone."""
    said = run("tiny_engine.py")
    engines = re.findall(r"^(engine-\S+(?: again)?) +\d+ ms  (\w+)$", said, re.MULTILINE)
    assert [name for name, _how in engines] == ["engine-1", "engine-2", "engine-2 again"]
    first = sorted(how for _name, how in engines[:2])
    assert first in (["loaded", "shared"], ["loaded", "resident"])  # as close as the machine lets
    assert engines[2][1] == "resident"
    (tokens,) = re.findall(r"^The capital of France is -> ([\d ]+)$", said, re.MULTILINE)
    assert len(set(tokens.split())) > 1
    assert said.endswith("loads: 1, different answers: 1\n")
