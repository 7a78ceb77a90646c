"""An engine that may open few files: it is told so before libzmq would end it."""

from __future__ import annotations

import subprocess
import sys

from broker.checkpoints.faults import system_refused
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
