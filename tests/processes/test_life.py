"""A broker's life: one of a name, ready when it says so, its orderly end, its successor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from broker.errors import (
    BadRequest,
    BrokerLost,
    BrokerNotFound,
    Busy,
    ProtocolMismatch,
    ShuttingDown,
)
from broker.platform import platform_steps
from engine_client import Checkpoint, EngineClient
from engine_client.session import connect
from tests.processes.conftest import brokers
from tests.support.clock import SCALE, eventually
from tests.support.processes import (
    ROOT,
    Engine,
    LoaderFault,
    RunningBroker,
    is_alive,
    processes_of,
    wait_until_gone,
)
from tests.support.raw import RawDealer
from tests.support.stored import big_checkpoint, cut_short, small_checkpoint

AT_ONCE_SECONDS = 1.0
STOP_SECONDS = 5.0
NO_PLATFORM_EXIT = 3

StartBroker = Callable[..., RunningBroker]
StartEngine = Callable[..., Engine]
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def start_broker(broker_dir: Path) -> Iterator[StartBroker]:
    """Brokers that start as a user's do: with an interpreter of their own."""
    with brokers(broker_dir) as start:
        yield partial(start, cold=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(small_checkpoint(tmp_path / "checkpoint"))


def stop_in_time(broker: RunningBroker, number: signal.Signals) -> None:
    """An orderly end: in time, exit code 0, no socket and no process left."""
    began = time.monotonic()
    assert broker.stop(number) == 0
    assert f'stopping cause="received {number.name}"' in broker.log.read_text()
    assert time.monotonic() - began < STOP_SECONDS * SCALE
    assert {path.name for path in broker.directory.iterdir()} <= {
        "default.journal",
        "default.lock",
        "broker.log",
        "loader-order",
    }
    assert processes_of(broker.directory) == []


# --- beginning ----------------------------------------------------------------------------------


def test_ready_line_means_ready(broker: RunningBroker) -> None:
    """The first ping after the ready line is answered; the line says where and what."""
    with RawDealer(broker.directory) as dealer:
        assert dealer.ping_seconds() < AT_ONCE_SECONDS * SCALE
    assert broker.ready_line.startswith("weight-broker ready: name=default device=SIM-0 ")
    for word in ("platform=simulated", f"pid={broker.pid}", str(broker.directory / "default.zmq")):
        assert word in broker.ready_line


def test_second_broker_of_the_name(broker: RunningBroker) -> None:
    """A second broker of the same name is refused, naming the first, which goes on."""
    second = serve("--device", "simulated", "--dir", str(broker.directory))
    assert second.returncode == Busy.exit_code
    assert f"process {broker.pid}" in second.stderr
    assert second.stderr.count("\n") == 1
    with broker.client() as client:
        assert client.ping().pid == broker.server_pid()


def test_two_names_in_one_directory(start_broker: StartBroker, checkpoint: str) -> None:
    """Brokers of two names in one directory know nothing of each other."""
    first, second = start_broker("--name", "a"), start_broker("--name", "b")
    with first.client(broker="a") as a, second.client(broker="b") as b:
        assert a.ping().pid != b.ping().pid
        a.acquire(Checkpoint(checkpoint)).release()
        assert len(a.status()["sets"]) == 1
        assert b.status()["sets"] == []


def serve(*options: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `serve` to its end, which the caller expects to come soon."""
    return subprocess.run(
        [sys.executable, "-m", "broker", "serve", *options],
        capture_output=True,
        text=True,
        timeout=30 * SCALE,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        check=False,
    )


def skip_where_there_is_a_gpu() -> None:
    if platform_steps("broker")[-1].ok:
        pytest.skip("a GPU that can share memory is here: this is for machines without one")


def test_serve_without_a_gpu_leaves_nothing(broker_dir: Path) -> None:
    """Without --device on a machine without GPU: the documented exit code, no file, no folder."""
    skip_where_there_is_a_gpu()
    directory = broker_dir / "not there yet"
    ended = serve(environ={"WEIGHT_BROKER_DIR": str(directory)})
    assert ended.returncode == NO_PLATFORM_EXIT
    assert ended.stderr.startswith("[weight-broker:broker] ")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""
    assert list(broker_dir.iterdir()) == []


CLIENT_WITHOUT_GPU = """
import os, sys, threading
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event.startswith("socket.") else None)
from broker.errors import UnsupportedPlatformForIPCError
from engine_client import EngineClient
try:
    EngineClient()
except UnsupportedPlatformForIPCError as error:
    print(error)
descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
print(opened, [link for link in descriptors if "socket" in link or "event" in link])
print(threading.active_count(), len(os.listdir("/proc/self/task")))
"""


def test_client_without_a_gpu_opens_no_socket(broker: RunningBroker) -> None:
    """`EngineClient()` without a GPU raises before any socket exists, though a broker is there."""
    skip_where_there_is_a_gpu()
    done = subprocess.run(
        [sys.executable, "-c", CLIENT_WITHOUT_GPU],
        capture_output=True,
        text=True,
        timeout=30 * SCALE,
        cwd=ROOT,
        env={**os.environ, "WEIGHT_BROKER_DIR": str(broker.directory)},
        check=True,
    )
    sentence, opened, threads = done.stdout.splitlines()
    assert sentence.startswith("[weight-broker:engine] ")
    assert opened == "[] []"
    assert threads == "1 1"
    assert "session-opened" not in broker.log.read_text()


def test_clients_that_are_not_served(broker: RunningBroker) -> None:
    """One on another platform is refused by the broker; one that finds the directory open to others
    does not even connect."""
    with pytest.raises(ProtocolMismatch, match=r"simulated.*cuda"):
        connect("default", broker.directory, platform="cuda")
    opened = broker.log.read_text().count("session-opened")
    broker.directory.chmod(0o755)
    with pytest.raises(BadRequest, match="open to others"):
        broker.client()
    broker.directory.chmod(0o700)
    assert broker.log.read_text().count("session-opened") == opened
    broker.client().close()


# --- preload and systemd ------------------------------------------------------------------------


def test_preload(start_broker: StartBroker, checkpoint: str, tmp_path: Path) -> None:
    """What is preloaded is resident and pinned before any engine asks; a bad one is told, and stays
    in the status."""
    broken = cut_short(small_checkpoint(tmp_path / "broken", seed=5))
    broker = start_broker("--preload", checkpoint, "--preload", str(broken))
    eventually(lambda: broker.counter("loads_failed") == 1, 20, "the failure of the bad one")
    eventually(lambda: broker.counter("sets_sealed") == 1, 20, "the preload")
    (entry,) = eventually(
        lambda: [e for e in broker.status()["sets"] if e["pinned"]], 2, "the pinned set"
    )
    assert entry["leases"] == []
    with broker.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        assert weights.how == "resident"
    log = broker.log.read_text()
    assert f" WARNING preload-failed path={broken}" in log  # the checkpoint's trouble, not ours
    loaded, failed = broker.status()["broker"]["preloads"]
    assert (loaded["path"], loaded["state"], loaded["set"]) == (checkpoint, "resident", entry["id"])
    assert (failed["path"], failed["state"]) == (str(broken), "failed")
    assert failed["cause"] in log


# --- orderly end --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_idle(broker: RunningBroker, number: signal.Signals) -> None:
    """An idle broker stops in order at either signal."""
    stop_in_time(broker, number)


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_with_engines(
    broker: RunningBroker, start_engine: StartEngine, checkpoint: str, number: signal.Signals
) -> None:
    """Attached engines are told at once, and what they have mapped stays readable."""
    engine = start_engine(broker)
    granted = engine.ask("acquire", path=checkpoint)
    began = time.time()
    stop_in_time(broker, number)
    lost_at = eventually(lambda: engine.ask("lost"), AT_ONCE_SECONDS, "the engine's callback")
    assert lost_at - began < AT_ONCE_SECONDS * SCALE
    assert engine.ask("identity") == granted["checkpoint"]
    engine.tell("acquire", path=checkpoint)
    assert engine.answer()["error"] == "BrokerLost"
    engine.ask("release")


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (signal.SIGTERM, LoaderFault.STOPS_AT_START),
        (signal.SIGINT, LoaderFault.STOPS_WHILE_WRITING),
    ],
)
def test_stop_in_the_middle_of_a_load(
    broker: RunningBroker,
    start_engine: StartEngine,
    checkpoint: str,
    number: signal.Signals,
    fault: LoaderFault,
) -> None:
    """In the middle of a load: waiting engines get a sentence at once, the loader ends too."""
    broker.order_loaders(fault)
    engine = start_engine(broker)
    engine.tell("acquire", path=checkpoint)
    loader = broker.stopped_loader()
    began = time.time()
    stop_in_time(broker, number)
    answer = engine.answer()
    assert answer["error"] in ("ShuttingDown", "BrokerLost")
    assert answer["sentence"]
    assert answer["at"] - began < AT_ONCE_SECONDS * SCALE
    assert not is_alive(loader)
    eventually(lambda: engine.ask("lost"), AT_ONCE_SECONDS, "the engine's callback")


def test_stop_in_the_middle_of_a_running_load(
    broker: RunningBroker, start_engine: StartEngine, tmp_path: Path
) -> None:
    """A loader that is hard at work does not hold the end up either."""
    large = big_checkpoint(tmp_path / "large", shards=1, shard_bytes=256 << 20)
    engine = start_engine(broker)
    engine.tell("acquire", path=str(large))
    eventually(lambda: broker.slabs() > 0, 10, "the beginning of the load")
    stop_in_time(broker, signal.SIGTERM)
    assert "error" in engine.answer() or engine.ask("identity")


def test_closed_terminal(broker: RunningBroker) -> None:
    """SIGHUP, which a terminal sends when it closes, is an orderly end too."""
    with broker.client():
        assert broker.stop(signal.SIGHUP) == 0
    assert not list(broker.directory.glob("*.zmq"))


def test_impatient_signals(broker: RunningBroker, checkpoint: str) -> None:
    """Signals without end during the end change nothing about it."""
    with broker.client() as client:
        client.acquire(Checkpoint(checkpoint)).release()
        while broker.process.poll() is None:
            broker.process.send_signal(signal.SIGINT)
            broker.process.send_signal(signal.SIGTERM)
    assert broker.stop() == 0, broker.log.read_text()
    assert not list(broker.directory.glob("*.zmq"))


# --- sudden end and successor -------------------------------------------------------------------


def test_killed_broker(
    broker: RunningBroker, start_engine: StartEngine, start_broker: StartBroker, checkpoint: str
) -> None:
    """After SIGKILL engines keep their weights; a successor takes the name and new clients."""
    engine = start_engine(broker)
    granted = engine.ask("acquire", path=checkpoint)
    killed_at = time.time()
    broker.kill()
    lost_at = eventually(lambda: engine.ask("lost"), AT_ONCE_SECONDS, "the engine's callback")
    assert lost_at - killed_at < AT_ONCE_SECONDS * SCALE
    assert (broker.directory / "default.session").is_socket()
    with pytest.raises(BrokerNotFound, match=r"default\.session"):
        broker.client()

    successor = start_broker()
    engine.tell("status")
    assert engine.answer()["error"] == "BrokerLost"
    assert engine.ask("identity") == granted["checkpoint"]
    with successor.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        assert client.ping().pid == successor.server_pid()
        assert weights.how == "loaded"
    # The old engine's mapping is no concern of the successor's.
    engine.ask("release")
    assert successor.counter("loads_started") == 1


def test_loader_of_a_killed_broker_ends(broker: RunningBroker, checkpoint: str) -> None:
    """A loader whose broker is gone loads for nobody and ends by itself."""
    broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    with broker.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.acquire, Checkpoint(checkpoint))
        loader = broker.stopped_loader()
        broker.kill()
        with pytest.raises((BrokerLost, ShuttingDown)):
            asked.result(AT_ONCE_SECONDS * SCALE)
    wait_until_gone(loader)


def test_restart_after_an_orderly_end(start_broker: StartBroker, checkpoint: str) -> None:
    """A client of the former broker stays lost; its epoch is not the new one's."""
    first = start_broker()
    old = first.client()
    first.stop()
    second = start_broker()
    with pytest.raises(BrokerLost):
        old.acquire(Checkpoint(checkpoint))
    with second.client() as new:
        assert new.epoch != old.epoch
        new.acquire(Checkpoint(checkpoint)).release()
    old.close()


def test_client_finds_no_broker(broker_dir: Path) -> None:
    """Where no broker is, the sentence names the path that was tried."""
    with pytest.raises(BrokerNotFound) as caught:
        EngineClient("simulated", directory=broker_dir)
    assert caught.value.tried == [str(broker_dir / "default.session")]
    assert str(broker_dir) in caught.value.sentence
