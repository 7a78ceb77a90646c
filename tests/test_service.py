"""A `Broker` inside a process of one's own: what it has before `run`, and what is left after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker import Broker, BrokerConfig
from broker.errors import Busy, UsageError
from engine_client.observer import Observer
from tests.processes.conftest import private_directory
from tests.support.clock import SCALE

SECONDS = 20.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_directory() as directory:
        yield directory


@pytest.fixture
def make(directory: Path) -> Callable[[], Broker]:
    return lambda: Broker(BrokerConfig(directory=directory, device="simulated"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_one_that_never_runs(make: Callable[[], Broker], directory: Path) -> None:
    """It has the name until it is closed, which leaves neither sockets nor descriptors."""
    with make():
        pass  # what the process has open from its first broker on
    before = names(Path("/proc/self/fd"))
    with make() as broker:
        assert names(directory) == ["default.lock", "default.session", "default.zmq"]
        with pytest.raises(Busy, match="already running"):
            make()
    broker.close()
    assert names(directory) == ["default.lock"]
    assert (directory / "default.lock").read_bytes() == b""
    assert len(names(Path("/proc/self/fd"))) == len(before)
    with pytest.raises(UsageError, match="make another one to serve again"):
        broker.run()


def test_one_that_runs(make: Callable[[], Broker], directory: Path) -> None:
    """It cannot be closed while it does; what has run is closed, and another one can follow."""
    ready, codes = threading.Event(), []
    with make() as broker:
        thread = threading.Thread(
            target=lambda: codes.append(broker.run(lambda _line: ready.set())), daemon=True
        )
        thread.start()
        assert ready.wait(SECONDS * SCALE)
        with pytest.raises(UsageError, match="is running"):
            broker.close()
        with Observer(directory=directory) as observer:
            observer.shutdown()
        thread.join(SECONDS * SCALE)
        assert codes == [0]
        broker.close()
    assert "default.zmq" not in names(directory)
    make().close()
