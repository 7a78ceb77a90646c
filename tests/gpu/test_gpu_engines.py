"""What only a GPU can show of broker and engines together: torch over the weights.

`WEIGHT_BROKER_REHEARSAL=simulated pytest tests/gpu/test_gpu_engines.py` runs what needs no GPU of
it on the simulated device, to see that the tests themselves work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from broker.devices.cuda import PATIENCE_SECONDS
from tests.gpu.engine import model
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import eventually
from tests.support.processes import ROOT, Engine, Lines, RunningBroker

pytestmark = pytest.mark.gpu

REHEARSAL = "WEIGHT_BROKER_REHEARSAL"
SLACK = 24 << 20
"""What an engine's allocator may take for activations and small buffers while it binds."""


class TorchEngine(Engine):
    """A process of tests/gpu/engine.py."""

    def __init__(self, broker: RunningBroker, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.engine", str(broker.directory), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input = self.process.stdin
        self._lines = Lines(self.process.stdout)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """What engines ask for: the first GPU that torch sees too."""
    rehearsal = os.environ.get(REHEARSAL)
    if rehearsal:
        return rehearsal
    gpu = request.getfixturevalue("gpu")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch sees none")
    return f"cuda:{gpu.ordinal}"


@pytest.fixture
def on_gpu(device: str) -> None:
    """For what cannot be rehearsed."""
    if device == "simulated":
        pytest.skip("no GPU: this is a rehearsal")


@pytest.fixture(scope="module")
def broker(device: str) -> Iterator[RunningBroker]:
    with private_directory() as directory, brokers(directory) as start:
        yield start(device=device)


StartEngine = Callable[[], TorchEngine]


@pytest.fixture
def start(broker: RunningBroker, device: str) -> Iterator[StartEngine]:
    started: list[TorchEngine] = []

    def start() -> TorchEngine:
        started.append(TorchEngine(broker, device))
        started[-1].ask("status")  # torch is imported and the device is ready
        return started[-1]

    yield start
    for engine in started:
        engine.close()
    if broker.process.poll() is None:
        broker.evict_all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    save_file(model().state_dict(), folder / "model.safetensors")
    return str(folder)


def test_outputs_are_bit_equal_to_an_ordinary_load(start: StartEngine, checkpoint: str) -> None:
    """Two engines over one copy compute what an engine with a copy of its own computes."""
    one, other = start(), start()
    expected = one.ask("load_ordinarily", path=checkpoint)
    assert one.ask("bind", path=checkpoint)["how"] == "loaded"
    assert other.ask("bind", path=checkpoint)["how"] == "resident"
    assert one.ask("run") == other.ask("run") == expected


def test_three_engines_use_one_copy(start: StartEngine, checkpoint: str, on_gpu: None) -> None:
    """Device memory grows by one slab when three engines bind it."""
    engines = [start() for _ in range(3)]
    before = engines[0].ask("free_bytes")
    nbytes = 0
    for engine in engines:
        nbytes = engine.ask("bind", path=checkpoint)["nbytes"]
    taken = before - engines[0].ask("free_bytes")
    assert nbytes <= taken < nbytes + SLACK


def test_a_write_fails_in_the_writer_only(start: StartEngine, checkpoint: str) -> None:
    """Writing to a bound parameter is the end of that engine's weights, and of nobody else's."""
    writer, reader = start(), start()
    for engine in (writer, reader):
        engine.ask("bind", path=checkpoint)
    expected = reader.ask("run")
    writer.tell("write")
    try:
        assert "illegal" in writer.answer()["sentence"].lower()
    except EOFError:
        assert writer.process.wait() < 0  # on the host: SIGSEGV
    assert reader.ask("run") == expected


def test_a_killed_engine_leaves_nothing(
    broker: RunningBroker, start: StartEngine, checkpoint: str, on_gpu: None
) -> None:
    """Its lease is back at once, and after an eviction the memory too."""
    onlooker = start()
    before = onlooker.ask("free_bytes")
    engine = start()
    engine.ask("bind", path=checkpoint)
    engine.ask("run")
    engine.kill()
    eventually(lambda: not broker.status()["sets"][0]["leases"], 5, "the end of the lease")
    broker.evict_all()
    eventually(
        lambda: onlooker.ask("free_bytes") > before - SLACK, 2 * PATIENCE_SECONDS, "the memory"
    )


def test_a_graph_replays_while_others_come_and_go(
    start: StartEngine, checkpoint: str, on_gpu: None
) -> None:
    """A CUDA graph over bound weights gives the same bits while another engine maps and unmaps."""
    engine, other = start(), start()
    engine.ask("bind", path=checkpoint)
    expected = engine.ask("run")
    assert engine.ask("capture") == expected
    for _ in range(3):
        engine.tell("replay", times=200)
        other.ask("bind", path=checkpoint)
        other.ask("drop")
        assert engine.answer()["ok"] == expected


def test_a_graph_survives_sleep(start: StartEngine, checkpoint: str, on_gpu: None) -> None:
    """Awake again, the weights are where the graph expects them."""
    keeper, engine = start(), start()
    for one in (keeper, engine):
        one.ask("bind", path=checkpoint)
    expected = engine.ask("capture")
    engine.ask("sleep")
    engine.ask("wake")
    assert engine.ask("replay", times=3) == expected
    assert engine.ask("run") == expected


def test_published_weights_are_the_same(start: StartEngine) -> None:
    """What an engine publishes from the device is what it and others compute with afterwards."""
    publisher, reader = start(), start()
    expected = publisher.ask("publish", name="policy", seed=7)
    reader.ask("bind_name", name="policy")
    assert reader.ask("run") == publisher.ask("run") == expected


def test_engines_go_on_without_their_broker(
    broker: RunningBroker, start: StartEngine, checkpoint: str
) -> None:
    """The broker is killed, keeper and all: mapped weights go on giving the right results."""
    engine = start()
    engine.ask("bind", path=checkpoint)
    expected = engine.ask("run")
    broker.kill()
    assert engine.ask("run") == expected
