"""Brokers and engines for process tests; whatever a test starts is ended and looked at here."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_client import Checkpoint
from tests.support.clock import eventually
from tests.support.nursery import BornEngine, Nursery
from tests.support.processes import Engine, RunningBroker, processes_of
from tests.support.stored import small_checkpoint


@contextmanager
def private_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wb-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def brokers(
    directory: Path, *, loaders_may_raise: bool = False
) -> Iterator[Callable[..., RunningBroker]]:
    """Starts brokers; each must end in order with code 0 unless the test ended it.

    Nothing of theirs may be left then: no process, no socket, no unforeseen exception in the log.

    Args:
        loaders_may_raise: code that engines ship raises, and the log passes its traceback on.
    """
    started: list[RunningBroker] = []

    def start(*options: str, **settings: Any) -> RunningBroker:
        started.append(RunningBroker(directory, *options, **settings))
        return started[-1]

    try:
        yield start
        running = [broker for broker in started if broker.process.poll() is None]
        codes = [broker.stop() for broker in running]
        logs = "".join({broker.log: broker.log.read_text() for broker in started}.values())
        assert not any(codes), f"brokers ended with {codes}:\n{logs}"
        assert loaders_may_raise or "Traceback" not in logs, logs
        if running:
            left = [*directory.glob("*.zmq"), *directory.glob("*.session")]
            assert not left, f"sockets are left: {left}"
        eventually(lambda: not processes_of(directory), 5, "the end of every process")
    finally:
        for broker in started:
            broker.kill()
        for pid in processes_of(directory):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def broker_dir() -> Iterator[Path]:
    """A private directory with a path short enough for sockets."""
    with private_directory() as path:
        yield path


@pytest.fixture
def start_broker(broker_dir: Path) -> Iterator[Callable[..., RunningBroker]]:
    with brokers(broker_dir) as start:
        yield start


@pytest.fixture
def broker(start_broker: Callable[..., RunningBroker]) -> RunningBroker:
    """A broker of its own for a test that disturbs it or counts what it does."""
    return start_broker()


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[RunningBroker]:
    """One broker for all tests of a file: each finds it as the ones before have left it."""
    with private_directory() as directory, brokers(directory) as start:
        yield start()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One checkpoint for all tests of a file that have none of their own: their shared broker loads
    it once."""
    return Checkpoint(small_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def start_torch_engine(nursery: Nursery) -> Iterator[Callable[[RunningBroker], BornEngine]]:
    """Engines that know torch, ended after the test."""
    started: list[BornEngine] = []

    def start(broker: RunningBroker) -> BornEngine:
        started.append(nursery.engine(broker))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def slabs_in_maps() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "weight-broker-slab" in line}


@pytest.fixture
def slab_mappings() -> Callable[[], int]:
    """How many slabs this process maps that it did not map before the test."""
    gc.collect()
    before = slabs_in_maps()
    return lambda: len(slabs_in_maps() - before)


@pytest.fixture
def empty_broker(shared_broker: RunningBroker) -> RunningBroker:
    """The file's broker without any set, and loaders that do nothing wrong."""
    shared_broker.order_loaders(None)
    shared_broker.evict_all()
    eventually(lambda: shared_broker.status()["sets"] == [], 5, "the end of earlier sets")
    eventually(lambda: shared_broker.slabs() == 0, 5, "the end of earlier slabs")
    return shared_broker


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(broker: RunningBroker, *options: str, **settings: Any) -> Engine:
        started.append(Engine(broker, *options, **settings))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
