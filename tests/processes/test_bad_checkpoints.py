"""Checkpoints that cannot be served: one sentence, and nothing of them anywhere."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.errors import LoadFailed, NotFound, UnsupportedQuantForIPCError
from engine_client import Checkpoint, EngineClient
from tests.support.clock import eventually
from tests.support.processes import Engine, RunningBroker
from tests.support.stored import cut_short, small_checkpoint

FILE = "model.safetensors"


@pytest.fixture
def client(shared_broker: RunningBroker) -> Iterator[EngineClient]:
    """A client of a broker that holds nothing, and must hold nothing afterwards."""
    with shared_broker.client() as client:
        yield client
        status = shared_broker.status()
        assert status["sets"] == []
        assert status["broker"]["requests_waiting"] == 0
        eventually(lambda: shared_broker.slabs() == 0, 2, "the end of every slab")
        eventually(lambda: shared_broker.loaders() == [], 5, "the end of every loader")
        assert client.ping().pid == shared_broker.server_pid()


def check_refused(client: EngineClient, path: Path, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        client.acquire(Checkpoint(path))
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in (str(path), *words):
        assert word in sentence


def test_unknown_path(client: EngineClient, tmp_path: Path) -> None:
    """A path that is not there is not found."""
    check_refused(client, tmp_path / "nothing here", NotFound, "no such file or folder")
    check_refused(client, Path("/dev/null/x"), NotFound)


def test_unreadable_path(
    shared_broker: RunningBroker, start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """A path the engine may not read is told as such, and the broker is not even asked."""
    checkpoint = small_checkpoint(tmp_path / "private")
    checkpoint.chmod(0)
    engine = start_engine(shared_broker)
    if os.geteuid() == 0:
        engine.ask("become_nobody")  # root may read everything
    engine.tell("acquire", path=str(checkpoint))
    answer = engine.answer()
    checkpoint.chmod(0o700)
    assert answer["error"] == "LoadFailed"
    assert answer["fields"]["reason"] == "unreadable"
    assert str(checkpoint) in answer["sentence"]
    assert "permissions" in answer["sentence"]
    assert shared_broker.counter("loads_started") == 0


@pytest.mark.parametrize("files", [[], ["config.json", "README.md"]], ids=["empty", "no weights"])
def test_folder_without_weights(client: EngineClient, tmp_path: Path, files: list[str]) -> None:
    """A folder without weights is told with what is in it."""
    for name in files:
        (tmp_path / name).write_text("{}")
    found = "no safetensors weights" if files else "it is empty"
    check_refused(client, tmp_path, NotFound, found, *files)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles(client: EngineClient, tmp_path: Path, name: str) -> None:
    """Pickles are refused by folder and by name, and never unpickled, whatever they are called."""
    folder, trace = tmp_path / "pickles", tmp_path / "trace"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    check_refused(client, folder, LoadFailed, name, "safetensors")
    check_refused(client, folder / name, LoadFailed, "safetensors")
    shutil.copy(folder / name, folder / FILE)
    check_refused(client, folder, LoadFailed, FILE)
    assert not trace.exists()


def test_truncated_file(client: EngineClient, tmp_path: Path) -> None:
    """A file that ends early fails in the loader, which names file and tensor."""
    checkpoint = cut_short(small_checkpoint(tmp_path / "cut"))
    check_refused(client, checkpoint, LoadFailed, FILE, "layer.3.weight")


def test_quantisation_that_tensors_do_not_carry(client: EngineClient, tmp_path: Path) -> None:
    """A method whose tensors are not all it needs is refused before anything is loaded."""
    checkpoint = small_checkpoint(tmp_path / "quantised")
    config = '{"quantization_config": {"quant_method": "some-new-method"}}'
    (checkpoint / "config.json").write_text(config)
    with pytest.raises(UnsupportedQuantForIPCError, match="some-new-method"):
        client.acquire(Checkpoint(checkpoint))
