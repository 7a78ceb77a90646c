"""Time-outs: the stage is named, nothing is left at the broker, the client goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import wire
from broker.errors import RequestTimeout
from broker.listeners import LISTEN_BACKLOG
from broker.weights import WeightKey
from engine_client import Checkpoint
from tests.support.clock import SCALE, eventually
from tests.support.processes import LoaderFault, RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint

SHORT = 0.2


@pytest.fixture
def stopped(shared_broker: RunningBroker) -> Iterator[RunningBroker]:
    """A broker that hears nothing for the length of a test."""
    pid = shared_broker.server_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield shared_broker
    finally:
        os.kill(pid, signal.SIGCONT)


def check_nothing_is_left(broker: RunningBroker) -> None:
    """No lease, no waiting request, whatever became of the load. Clients do not wait for it."""

    def nothing_is_left() -> bool:
        status = broker.status()
        entries = [*status["sets"], *status["sessions"]]
        held = [entry for entry in entries if entry.get("leases") or entry["waiting"]]
        return not held and status["broker"]["requests_waiting"] == 0

    eventually(nothing_is_left, 1, "the end of every lease and request")


@pytest.mark.parametrize("fault", [LoaderFault.STOPS_AT_START, LoaderFault.STOPS_WHILE_WRITING])
def test_acquire_during_a_slow_load(
    shared_broker: RunningBroker, tmp_path: Path, fault: LoaderFault
) -> None:
    """A time-out during a load names the stage and withdraws the request; the load goes on."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c", seed=len(fault.value)))
    shared_broker.order_loaders(fault)
    with shared_broker.client() as client:
        began = time.monotonic()
        with pytest.raises(RequestTimeout, match="waiting for") as caught:
            client.acquire(checkpoint, timeout=SHORT)
        assert SHORT <= time.monotonic() - began < SHORT + 2 * SCALE
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.stage[:7], caught.value.seconds) == ("waiting", SHORT)
        check_nothing_is_left(shared_broker)
        assert client.ping().pid == shared_broker.server_pid()
        shared_broker.let_loader_go()
        with client.acquire(checkpoint) as weights:
            assert weights.how in ("shared", "resident")
    check_nothing_is_left(shared_broker)
    assert shared_broker.counter("loads_failed") == 0


def test_stage_tells_how_far_the_load_is(shared_broker: RunningBroker) -> None:
    """Once whoever writes the weights has reported, the time-out says how far that was."""
    directory = shared_broker.directory
    key = WeightKey(device="SIM-0", name="by hand")
    report = wire.Report("c", "copying", 17, 4096)
    with (
        RawSession(directory) as writer,
        RawDealer(directory) as writes,
        shared_broker.client() as client,
    ):
        writer.hello(writes)
        assert writes.ask(b"claim", wire.encode(wire.Claim("c", key)))[0] == b"ok"
        assert writes.ask(b"report", wire.encode(report))[0] == b"ok"
        seen: list[wire.Progress] = []
        with pytest.raises(RequestTimeout, match="copying, 17 of 4096 bytes"):
            client.acquire("by hand", timeout=SHORT, progress=seen.append)
        assert seen == [wire.Progress("copying", 17, 4096)]
        check_nothing_is_left(shared_broker)


def test_calls_to_a_stopped_broker(shared_broker: RunningBroker) -> None:
    """Each call gives up at its time; late answers to earlier ones are never taken for later's."""
    pid = shared_broker.server_pid()
    with shared_broker.client() as client:
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                with pytest.raises(RequestTimeout, match="status"):
                    client.status(timeout=0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
        for _ in range(10):
            assert client.ping().pid == shared_broker.server_pid()


def test_connecting_to_a_stopped_broker(stopped: RunningBroker) -> None:
    """A broker that accepts nobody lets a client wait no longer than it said it would."""
    with pytest.raises(RequestTimeout, match="welcome"):
        stopped.client(timeout=SHORT)


def test_connecting_behind_a_full_backlog(stopped: RunningBroker) -> None:
    """Not even the kernel's queue for new connections makes a client wait longer."""
    with contextlib.ExitStack() as queued:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        queued.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        if not fill_backlog(stopped, queued):
            pytest.skip("the kernel's backlog is larger than the broker asked for")
        with pytest.raises(RequestTimeout, match="connect"):
            stopped.client(timeout=SHORT)


def fill_backlog(broker: RunningBroker, queued: contextlib.ExitStack) -> bool:
    path = str(broker.directory / "default.session")
    for _ in range(LISTEN_BACKLOG + 2):
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        queued.callback(waiting.close)
        waiting.setblocking(False)
        if waiting.connect_ex(path):
            return True
    return False


def test_broker_recovers(shared_broker: RunningBroker) -> None:
    """After all of the above the broker has no session and no descriptor too many."""
    eventually(lambda: shared_broker.status()["sessions"] == [], 10, "the end of all sessions")
    check_nothing_is_left(shared_broker)


def test_sleep_that_a_server_has_not_heard_of(broker: RunningBroker, tmp_path: Path) -> None:
    """The server dies before it has read the release: its successor is told, and the lease ends."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c"))
    with broker.client() as client, client.acquire(checkpoint) as weights:
        server = broker.server_pid()
        os.kill(server, signal.SIGSTOP)
        weights.sleep()
        os.kill(server, signal.SIGKILL)

        def is_given_back() -> bool:
            return [entry["leases"] for entry in client.status()["sets"]] == [[]]

        eventually(is_given_back, 10, "the end of the lease")
        weights.wake()
        assert broker.leases() == 1
