"""A request that comes again under its id is done once and answered as often as it is asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker import wire
from broker.weights import WeightKey
from tests.support.clock import eventually
from tests.support.processes import RunningBroker
from tests.support.raw import RawDealer, RawSession

DEVICE = "SIM-0"


class Peer:
    """A session by hand."""

    def __init__(self, broker: RunningBroker) -> None:
        self.broker = broker
        self.session = RawSession(broker.directory)
        self.dealer = RawDealer(broker.directory)
        self.session.hello(self.dealer)

    def ask(self, request: bytes, operation: str, message: wire.Message) -> list[bytes]:
        return self.dealer.ask(request, b"", operation.encode(), wire.encode(message))

    def converse_anew(self) -> RawDealer:
        """Leave the conversation as it is, and say hello on another; the former one."""
        former, self.dealer = self.dealer, RawDealer(self.broker.directory)
        self.session.hello(self.dealer)
        return former

    def close(self) -> None:
        self.dealer.close()
        self.session.close()


@pytest.fixture
def peer(empty_broker: RunningBroker) -> Iterator[Peer]:
    made = Peer(empty_broker)
    yield made
    made.close()


def claim(name: str, lease: str = "c") -> wire.Claim:
    return wire.Claim(lease, WeightKey(device=DEVICE, name=name))


def test_answered_request(peer: Peer) -> None:
    """The same request again, also from another conversation: the same answer, nothing more."""
    counts = peer.broker.counts()
    first = peer.ask(b"one", "claim", claim("twice"))
    assert first[:3] == [b"one", b"", b"ok"]
    assert peer.ask(b"one", "claim", claim("twice")) == first
    former = peer.converse_anew()
    assert peer.ask(b"one", "claim", claim("twice")) == first
    former.close()
    assert counts.added("requests_repeated") == 2
    assert [entry["state"] for entry in peer.broker.status()["sets"]] == ["claimed"]


def test_refused_request(peer: Peer) -> None:
    """A refusal is an answer like any other."""
    release = wire.Release("no such lease")
    first = peer.ask(b"one", "release", release)
    assert first[2] == b"bad-request"
    assert peer.ask(b"one", "release", release) == first


def test_waiting_request(peer: Peer) -> None:
    """Asked again while it waits, it waits once; its answer goes where it was asked last."""
    writer = Peer(peer.broker)
    try:
        writer.ask(b"w", "claim", claim("awaited"))
        peer.dealer.send(b"one", b"", b"claim", wire.encode(claim("awaited")))
        eventually(lambda: peer.broker.waiting() == 1, 5, "the waiting request")
        former = peer.converse_anew()
        peer.dealer.send(b"one", b"", b"claim", wire.encode(claim("awaited")))
        peer.dealer.ask(b"ping", b"")  # in order: the repetition has been seen
        assert peer.broker.waiting() == 1
    finally:
        writer.close()  # its claim is inherited
    assert peer.dealer.receive()[:3] == [b"one", b"", b"ok"]
    assert not former.socket.poll(0)
    former.close()


def test_answer_that_was_due_to_a_former_conversation(peer: Peer) -> None:
    """What is answered after a new hello goes to the new conversation, also if not asked again."""
    writer = Peer(peer.broker)
    try:
        writer.ask(b"w", "claim", claim("awaited"))
        peer.dealer.send(b"one", b"", b"claim", wire.encode(claim("awaited")))
        eventually(lambda: peer.broker.waiting() == 1, 5, "the waiting request")
        former = peer.converse_anew()
    finally:
        writer.close()
    assert peer.dealer.receive()[:3] == [b"one", b"", b"ok"]
    former.close()


def test_one_id_for_two_requests(peer: Peer) -> None:
    """Requests that say different things are two, whatever their ids; so are two sessions'."""
    assert peer.ask(b"one", "claim", claim("a", "a"))[2] == b"ok"
    assert peer.ask(b"one", "claim", claim("b", "b"))[2] == b"ok"
    other = Peer(peer.broker)
    assert other.ask(b"one", "claim", claim("c", "a"))[2] == b"ok"
    assert len(peer.broker.status()["sets"]) == 3
    other.close()
