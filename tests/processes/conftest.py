"""Brokers and engines for process tests; whatever a test starts is ended and looked at here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import Engine, RunningBroker


@pytest.fixture
def broker_dir() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="wb-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start_broker(broker_dir: Path) -> Iterator[Callable[..., RunningBroker]]:
    """Starts brokers; each must end in order with code 0 unless the test killed it."""
    started: list[RunningBroker] = []

    def start(*options: str) -> RunningBroker:
        started.append(RunningBroker(broker_dir, *options))
        return started[-1]

    yield start
    for broker in started:
        was_running = broker.process.poll() is None
        code = broker.stop()
        log = broker.log.read_text()
        if was_running:
            assert code == 0, f"the broker ended with {code}:\n{log}"
        assert "Traceback" not in log, log


@pytest.fixture
def broker(start_broker: Callable[..., RunningBroker]) -> RunningBroker:
    return start_broker()


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(broker: RunningBroker, *options: str) -> Engine:
        started.append(Engine(broker, *options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
