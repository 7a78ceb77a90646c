from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import pytest
from torch import Tensor

from engine_client import EngineClient
from tests.engine_client.slabs import Slab, slab_of
from tests.processes.conftest import brokers, private_directory
from tests.support.nursery import BornEngine, Nursery
from tests.support.processes import RunningBroker


class MakeSlab(Protocol):
    def __call__(self, tensors: Mapping[str, Tensor], kinds: Mapping[str, str] = ...) -> Slab: ...


@pytest.fixture
def make_slab() -> Iterator[MakeSlab]:
    made: list[Slab] = []

    def make(tensors: Mapping[str, Tensor], kinds: Mapping[str, str] | None = None) -> Slab:
        made.append(slab_of(tensors, kinds or {}))
        return made[-1]

    yield make
    for slab in made:
        slab.close()


@pytest.fixture(scope="module")
def live_broker() -> Iterator[RunningBroker]:
    """One broker for all tests of a file."""
    with private_directory() as directory, brokers(directory) as start:
        yield start()


@pytest.fixture
def client(live_broker: RunningBroker) -> Iterator[EngineClient]:
    """A client of this process; what it leaves on the broker is evicted."""
    with live_broker.client(label="the test") as client:
        yield client
    live_broker.evict_all()


@pytest.fixture(scope="module")
def onlooker(live_broker: RunningBroker, nursery: Nursery) -> Iterator[BornEngine]:
    """Another engine, in a process of its own, that knows torch."""
    engine = nursery.engine(live_broker)
    yield engine
    engine.close()
