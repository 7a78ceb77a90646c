"""An engine that may open few files, or start few threads: it is told so before libzmq would end
it."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from broker.checkpoints.faults import system_refused
from broker.errors import UsageError
from tests.support.processes import RunningBroker

CLIENT_NEEDS = 16

ENGINE = """
import os, resource, sys
from pathlib import Path
from broker.errors import UsageError
from engine_client import EngineClient
from engine_client.pinging import ping_broker

directory, most = Path(sys.argv[1]), int(sys.argv[2])

def connect():
    EngineClient("simulated", directory=directory).close()

def opened():
    return sum(os.path.lexists(f"/proc/self/fd/{number}") for number in range(200))

connect()
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
for make in (connect, lambda: ping_broker(directory=directory)):
    for free in range(most + 1):
        filled = []
        try:
            while True:
                filled.append(os.eventfd(0))
        except OSError:
            pass
        for _ in range(free):
            os.close(filled.pop())
        before = opened()
        try:
            make()
            print("made with", free)
        except UsageError as error:
            assert "needs more file descriptors than this process has left of its 200" in str(error)
            assert "RLIMIT_NOFILE" in str(error) and error.limit == 200
        assert opened() == before, (free, opened(), before)
        for number in filled:
            os.close(number)
"""


def test_too_few_descriptors_for_a_client(shared_broker: RunningBroker) -> None:
    """With enough free descriptors there is a client, with fewer a sentence; nothing is left."""
    engine = subprocess.run(
        [sys.executable, "-c", ENGINE, shared_broker.directory, str(CLIENT_NEEDS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (engine.returncode, engine.stderr) == (0, "")
    assert engine.stdout.splitlines()[0] == f"made with {CLIENT_NEEDS}"
    assert len(engine.stdout.splitlines()) > 1  # and a ping needs no more


def test_checkpoint_that_the_limit_keeps_closed() -> None:
    """The advice is about the limit, not about the disk."""
    error = system_refused(OSError(24, "Too many open files"), "model", "opening")
    assert "limit of open files" in error.sentence
    assert "file system" not in error.sentence


def no_thread(*_arguments: object) -> int:
    raise RuntimeError("can't start new thread")


def opened() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_too_few_threads_for_a_client(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence, before anything is opened."""
    monkeypatch.setattr("engine_client.room._thread.start_new_thread", no_thread)
    before = opened()
    with pytest.raises(UsageError, match="a client needs 6 threads, and this process or its user"):
        shared_broker.client()
    assert opened() == before


def test_client_whose_own_thread_does_not_start(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had opened is closed at once: a collection of garbage would wait for ever."""
    gc.collect()
    before = opened()
    with monkeypatch.context() as patch:
        patch.setattr("engine_client.channel.threading.Thread.start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            shared_broker.client()
        assert opened() <= before
    gc.collect()
