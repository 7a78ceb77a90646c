"""Disks and memory that fail while weights are loaded: a sentence for everybody, nothing left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.errors import BrokerError, LoadFailed, OverBudget
from engine_client import Checkpoint, EngineClient
from tests.support.clock import SCALE, eventually
from tests.support.processes import RIGHT_SECONDS, LoaderFault, RunningBroker
from tests.support.stored import small_checkpoint

TENSOR_BYTES = 2 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Larger than what a loader reads at once."""
    return small_checkpoint(tmp_path / "checkpoint", nbytes=TENSOR_BYTES)


@pytest.fixture
def broker(shared_broker: RunningBroker) -> Iterator[RunningBroker]:
    """One for all: after each test nothing is on its books, and a good load works."""
    yield shared_broker
    shared_broker.order_loaders(None)
    shared_broker.evict_all()
    eventually(lambda: shared_broker.slabs() == 0, RIGHT_SECONDS, "the end of every slab")


def failures(broker: RunningBroker, path: Path, during: Callable[[], None]) -> list[BrokerError]:
    """What two engines are told that wait for the same load; nothing is left of it then."""

    def acquire(client: EngineClient) -> BrokerError:
        with pytest.raises(BrokerError) as caught:
            client.acquire(Checkpoint(path), timeout=30 * SCALE)
        return caught.value

    with broker.client() as one, broker.client() as other, ThreadPoolExecutor(2) as pool:
        errors = [pool.submit(acquire, client) for client in (one, other)]
        during()
        caught = [error.result() for error in errors]
    check_all_is_free(broker)
    broker.order_loaders(None)
    return caught


def check_all_is_free(broker: RunningBroker) -> None:
    """No set, no byte, no slab and no loader."""
    (device,) = broker.status()["devices"].values()
    assert broker.status()["sets"] == []
    assert device["free"] == device["limit"]
    eventually(lambda: broker.slabs() == 0, RIGHT_SECONDS, "the end of the slab")
    eventually(lambda: broker.loaders() == [], 5, "the end of the loader")


def check_loads(broker: RunningBroker, path: Path) -> None:
    with broker.client() as client, client.acquire(Checkpoint(path)) as weights:
        assert weights.how == "loaded"


def nothing() -> None:
    """The fault comes by itself."""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (LoaderFault.FINDS_THE_DISK_BROKEN, "Input/output error"),
        (LoaderFault.FINDS_THE_FILE_SERVER_GONE, "Stale file handle"),
    ],
)
def test_disk_that_fails(
    broker: RunningBroker, checkpoint: Path, fault: LoaderFault, words: str
) -> None:
    """An error of the disk is load-failed, with the file's name and the system's words."""
    broker.order_loaders(fault)
    for error in failures(broker, checkpoint, nothing):
        assert type(error) is LoadFailed, error
        assert words in error.sentence
        assert "model.safetensors" in error.sentence
    check_loads(broker, checkpoint)


@pytest.mark.parametrize(
    "fault", [LoaderFault.FINDS_THE_DEVICE_FULL, LoaderFault.FINDS_NO_MEMORY], ids=str
)
def test_memory_that_is_not_there(
    broker: RunningBroker, checkpoint: Path, fault: LoaderFault
) -> None:
    """Memory that runs out while a slab is filled is over-budget, and the slab is gone."""
    broker.order_loaders(fault)
    for error in failures(broker, checkpoint, nothing):
        assert type(error) is OverBudget, error
    check_loads(broker, checkpoint)


@pytest.mark.parametrize("change", ["cut short", "emptied", "overwritten", "removed"])
def test_file_that_changes_while_it_is_read(
    broker: RunningBroker, checkpoint: Path, change: str
) -> None:
    """A file that is changed under the loader is load-failed, naming it, and never served."""
    file = checkpoint / "model.safetensors"

    def during() -> None:
        loader = broker.stopped_loader()
        eventually(lambda: broker.waiting() == 2, 20, "two waiting requests")
        broker.order_loaders(None)
        spoil(file, change)
        os.kill(loader, signal.SIGCONT)

    broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    for error in failures(broker, checkpoint, during):
        assert type(error) is LoadFailed, error
        assert str(checkpoint) in error.sentence
        assert error.reason in ("truncated", "changed"), error


def spoil(file: Path, change: str) -> None:
    """Change the file under who has it open; its name leads to the same inode, or to none."""
    with file.open("r+b") as opened:
        if change == "cut short":
            opened.truncate(file.stat().st_size - 100)
        elif change == "emptied":
            opened.truncate(0)
        elif change == "overwritten":
            opened.seek(-100, os.SEEK_END)
            opened.write(b"other bytes")
    if change == "removed":
        file.unlink()
