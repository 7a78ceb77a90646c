"""What is asked for in one turn of the server's loop: recorded together, then told, all of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker import wire
from engine_client import Checkpoint
from tests.campaign import kernel
from tests.campaign.asking import ask_status
from tests.support.clock import eventually
from tests.support.processes import RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint

DEVICE = "SIM-0"
WAITING = 2


class Peer:
    """An engine by hand, whose requests the server finds all at once."""

    def __init__(self, broker: RunningBroker) -> None:
        self.session = RawSession(broker.directory)
        self.dealer = RawDealer(broker.directory)
        self.session.hello(self.dealer)

    def acquire(self, lease: str, set_id: int) -> None:
        message = wire.Acquire(lease, wire.Demand(DEVICE, set=set_id))
        self.dealer.send(lease.encode(), b"", b"acquire", wire.encode(message))

    def release(self, lease: str) -> None:
        message = wire.encode(wire.Release(lease))
        self.dealer.send(f"release {lease}".encode(), b"", b"release", message)

    def answers(self, number: int) -> dict[bytes, bytes]:
        """Status by request."""
        replies = [self.dealer.receive() for _ in range(number)]
        return {reply[0]: reply[-2] for reply in replies}

    def close(self) -> None:
        self.dealer.close()
        self.session.close()


@pytest.fixture
def broker(start_broker: Callable[..., RunningBroker]) -> RunningBroker:
    return start_broker("--limit", f"waiting={WAITING}")


@pytest.fixture
def resident(broker: RunningBroker, tmp_path: Path) -> int:
    """A set that is there already."""
    with broker.client() as client:
        client.acquire(Checkpoint(small_checkpoint(tmp_path))).release()
        (entry,) = client.status()["sets"]
    assert entry["leases"] == []
    return int(entry["id"])


@pytest.fixture
def peer(broker: RunningBroker) -> Iterator[Peer]:
    made = Peer(broker)
    yield made
    made.close()


@contextlib.contextmanager
def unheard(pid: int) -> Iterator[None]:
    """What is sent meanwhile is all there when the process goes on."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: kernel.state(pid) == "T", 5, "the stop")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_every_request_is_answered(broker: RunningBroker, peer: Peer, resident: int) -> None:
    """More than a turn takes, granted at once: none counts as one that waits, none is lost."""
    leases = [str(number) for number in range(100)]
    with unheard(broker.server_pid()):
        for lease in leases:
            peer.acquire(lease, resident)
    assert peer.answers(len(leases)) == dict.fromkeys(map(str.encode, leases), b"ok")
    for lease in leases:
        peer.release(lease)
    assert set(peer.answers(len(leases)).values()) == {b"ok"}
    (entry,) = broker.status()["sets"]
    assert entry["leases"] == []


def test_answers_come_in_order(broker: RunningBroker, peer: Peer, resident: int) -> None:
    """A refusal, or an answer that needs no record, does not overtake what was asked before."""
    with unheard(broker.server_pid()):
        peer.acquire("a", resident)
        peer.release("none")
        peer.acquire("b", resident)
        peer.dealer.send(b"ping", b"", b"ping", b"")
        peer.release("a")
        peer.dealer.send(b"nonsense", b"", b"nonsense", b"")
        peer.acquire("c", resident)
        report = wire.encode(wire.Report("none", "copying", 0, 0))
        peer.dealer.send(b"report", b"", b"report", report)
    answers = [peer.dealer.receive()[0] for _ in range(8)]
    asked = [b"a", b"release none", b"b", b"ping", b"release a", b"nonsense", b"c", b"report"]
    assert answers == asked


def test_status_in_the_same_turn(broker: RunningBroker, peer: Peer, resident: int) -> None:
    """A request that is decided is answered before `status` tells of the rest."""
    with RawDealer(broker.directory) as asking:
        asking.ping_seconds()
        with unheard(broker.server_pid()):
            peer.acquire("a", resident)
            asking.send(b"status", b"")
        assert peer.answers(1) == {b"a": b"ok"}
        _status, payload = asking.receive()
    assert wire.decode_reply(wire.StatusReport, payload).broker["requests_waiting"] == 0


def test_status_between_other_requests(broker: RunningBroker, peer: Peer, resident: int) -> None:
    """Who asks after another request sees it done, though others have just asked."""
    with unheard(broker.server_pid()):
        peer.dealer.send(b"status", b"", b"status", b"")
        peer.acquire("a", resident)
        peer.dealer.send(b"status", b"", b"status", b"")
    before, granted, after = (peer.dealer.receive() for _ in range(3))
    assert granted[0] == b"a"
    reports = [wire.decode_reply(wire.StatusReport, reply[-1]) for reply in (before, after)]
    assert [len(report.sets[0]["leases"]) for report in reports] == [0, 1]


def test_what_was_told_is_recorded(broker: RunningBroker, peer: Peer, resident: int) -> None:
    """A server killed right after its answer: the successor has the lease."""
    server = broker.server_pid()
    peer.acquire("kept", resident)
    assert peer.answers(1) == {b"kept": b"ok"}
    os.kill(server, signal.SIGKILL)
    (entry,) = ask_status(broker.directory)["sets"]
    assert [lease["lease"] for lease in entry["leases"]] == ["kept"]


def test_shutdown_right_after_upgrade(broker: RunningBroker, peer: Peer) -> None:
    """A server that hands over decides nothing more: no answer says that the broker stops."""
    with unheard(broker.server_pid()):
        peer.dealer.send(b"1", b"", b"upgrade", wire.encode(wire.Upgrade()))
        peer.dealer.send(b"2", b"", b"shutdown", wire.encode(wire.Shutdown(force=True)))
    assert peer.answers(1) == {b"1": b"ok"}
    assert ask_status(broker.directory)["broker"]["restarts"] == 1
    assert not peer.dealer.socket.poll(0)
