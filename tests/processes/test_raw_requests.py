"""The conversation with peers that know nothing of our client, or mean harm by it."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from broker import wire
from broker.errors import ERROR_STATUSES
from broker.limits import DEFAULTS
from broker.weights import WeightKey
from tests.support.clock import SCALE, eventually
from tests.support.processes import RunningBroker
from tests.support.raw import RawDealer, RawSession, percentile

FLOOD_PINGS = 150
GROWTH_BYTES = 32 << 20
DEVICE = "SIM-0"

SAMPLES: dict[object, object] = {
    str: "x",
    int: 1,
    float: 1.0,
    bool: False,
    bytes: b"x",
    wire.Demand: wire.Demand(device="SIM-0", name="x"),
    WeightKey: WeightKey(device="SIM-0", name="x"),
}
"""A value for a field of each type; lists are empty."""


def well_formed(operation: str) -> bytes:
    """A request's payload that says as little as it may."""
    struct = wire.REQUESTS[operation]
    fields = [field for field in msgspec.structs.fields(struct) if field.required]
    return wire.encode(struct(**{field.name: SAMPLES.get(field.type, []) for field in fields}))


@pytest.fixture(autouse=True)
def goes_on_serving(shared_broker: RunningBroker) -> Iterator[None]:
    """After whatever a test does the same broker process still answers others."""
    pid = shared_broker.status()["broker"]["pid"]
    yield
    with RawDealer(shared_broker.directory) as other:
        assert other.ping_seconds() < 1 * SCALE
    assert shared_broker.status()["broker"]["pid"] == pid
    assert shared_broker.process.poll() is None


@pytest.fixture
def dealer(shared_broker: RunningBroker) -> Iterator[RawDealer]:
    with RawDealer(shared_broker.directory) as dealer:
        yield dealer


def check_refusal(reply: list[bytes], status: str, *words: str) -> None:
    """Two frames: the status, and a sentence in UTF-8 that has these words."""
    assert len(reply) == 2
    assert reply[0] == status.encode()
    sentence = reply[1].decode().split("\n")[0]
    assert sentence
    for word in words:
        assert word in sentence


# --- as documented ------------------------------------------------------------------------------


def test_plain_ping(dealer: RawDealer) -> None:
    """`[b"ping", b""]` is answered by exactly `[b"ok", …]`."""
    status, payload = dealer.ask(b"ping", b"")
    assert status == b"ok"
    assert wire.decode_reply(wire.Pong, payload).protocol == wire.PROTOCOL


def test_plain_status(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """`[b"status", b""]` is answered with the books, session or not."""
    status, payload = dealer.ask(b"status", b"")
    assert status == b"ok"
    report = wire.decode_reply(wire.StatusReport, payload)
    assert report.broker["pid"] == shared_broker.server_pid()
    assert report.broker["simulated"] is True


def test_envelope_comes_back_untouched(dealer: RawDealer) -> None:
    """Whatever precedes operation and payload comes back as it was, byte for byte."""
    envelope = [b"\x00\xff", b"", b"a" * wire.MAX_ENVELOPE_FRAME_BYTES]
    reply = dealer.ask(*envelope, b"ping", b"")
    assert (reply[:-2], reply[-2]) == (envelope, b"ok")
    reply = dealer.ask(*envelope, b"nonsense", b"")
    assert (reply[:-2], reply[-2]) == (envelope, b"unknown-operation")


def test_nonsense(dealer: RawDealer) -> None:
    """An unknown operation is answered by a sentence that lists the known ones."""
    check_refusal(dealer.ask(b"nonsense", b""), "unknown-operation", "'nonsense'", "acquire")


# --- not as documented --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "status"),
    [
        ([b"ping"], "bad-request"),
        ([b""], "bad-request"),
        ([b"", b""], "unknown-operation"),
        ([b"ping", b"payload"], "bad-request"),
        ([b"acquire", b""], "bad-request"),
        ([b"acquire", b"\xc1"], "bad-request"),
        ([b"acquire", b"\x91" * 5000], "bad-request"),
        ([b"\xff\xfe", b""], "bad-request"),
        ([b"x" * (wire.MAX_WORD_BYTES + 1), b""], "bad-request"),
        ([b"evict", b"x" * (wire.MAX_FRAME_BYTES + 1)], "bad-request"),
        ([b"y" * (wire.MAX_ENVELOPE_FRAME_BYTES + 1), b"ping", b""], "bad-request"),
        ([b""] * 11, "bad-request"),
        ([b"frame"] * 10_000, "bad-request"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} frames",
)
def test_malformed_request(dealer: RawDealer, frames: list[bytes], status: str) -> None:
    """A malformed request is answered in two frames, and so is the good one after it."""
    check_refusal(dealer.ask(*frames), status)
    assert dealer.ping_seconds() < 1 * SCALE


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickle_is_never_unpickled(
    shared_broker: RunningBroker, dealer: RawDealer, tmp_path: Path
) -> None:
    """A pickle is nonsense in every place where a peer can put one."""
    bomb = pickle.dumps(Bomb(tmp_path / "gone off"))
    with RawSession(shared_broker.directory) as session:
        session.hello(dealer)
        for operation in wire.REQUESTS:
            assert dealer.ask(operation.encode(), bomb)[0] == b"bad-request"
        assert dealer.ask(bomb, bomb)[-2] == b"bad-request"
        assert dealer.ask(b"id", bomb, b"ping", b"")[-2] in (b"ok", b"bad-request")
        session.send(bomb)
        assert session.receive().status == "bad-request"
    assert not (tmp_path / "gone off").exists()


def test_oversize_frame_ends_the_connection(
    shared_broker: RunningBroker, dealer: RawDealer
) -> None:
    """A frame above the transport's limit is never taken in; others do not notice."""
    before = shared_broker.resident_bytes()
    dealer.send(b"evict", b"x" * (64 << 20))
    for _ in range(20):
        with RawDealer(shared_broker.directory) as other:
            assert other.ping_seconds() < 1 * SCALE
    assert not dealer.socket.poll(0)
    assert shared_broker.resident_bytes() - before < GROWTH_BYTES


def test_random_messages(dealer: RawDealer) -> None:
    """Each of 64 random messages has one answer with a documented status."""
    source = random.Random(64)  # noqa: S311 - garbage
    words = [word.encode() for word in wire.REQUESTS]
    for _ in range(64):
        frames = [
            source.randbytes(source.choice((0, 1, 3, 40))) for _ in range(source.randint(1, 12))
        ]
        if len(frames) > 1 and source.random() < 0.7:
            frames[-2] = source.choice(words)
        reply = dealer.ask(*frames)
        assert reply[-2].decode() in {wire.OK, *ERROR_STATUSES}, (frames, reply)


# --- without a session --------------------------------------------------------------------------


@pytest.mark.parametrize("operation", sorted(set(wire.REQUESTS) - wire.SESSIONLESS - {"hello"}))
def test_request_without_hello(dealer: RawDealer, operation: str) -> None:
    """A conversation that is not tied to a session gets `no-session`, whatever it asks."""
    reply = dealer.ask(operation.encode(), well_formed(operation))
    check_refusal(reply, "no-session", operation, "hello")


def test_wrong_token(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """A token that is not of a live session is refused: it may be of a broker that is gone."""
    with RawSession(shared_broker.directory) as session:
        check_refusal(session.hello(dealer, token=bytes(16)), "stale-epoch", "token")
        check_refusal(session.hello(dealer, token=b""), "stale-epoch", "token")
        token = session.welcome.token
        check_refusal(dealer.ask(b"evict", wire.encode(wire.Evict("1"))), "no-session")
    eventually(
        lambda: session.welcome.session not in sessions(shared_broker), 1, "the session's end"
    )
    late = wire.Hello(token, wire.PROTOCOL, "simulated")
    check_refusal(dealer.ask(b"hello", wire.encode(late)), "stale-epoch")


def test_wrong_protocol(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """Another protocol is refused with both numbers."""
    with RawSession(shared_broker.directory) as session:
        reply = session.hello(dealer, protocol=wire.PROTOCOL + 41)
        check_refusal(reply, "protocol-mismatch", str(wire.PROTOCOL), str(wire.PROTOCOL + 41))


def test_wrong_platform(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """An engine on another platform is refused with both named."""
    with RawSession(shared_broker.directory) as session:
        reply = session.hello(dealer, platform="cuda")
        check_refusal(reply, "protocol-mismatch", "simulated", "cuda")


def test_latest_hello_wins(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """A session has one conversation: the one that said hello last."""
    evict = wire.encode(wire.Evict("no such set"))
    with (
        RawSession(shared_broker.directory) as session,
        RawDealer(shared_broker.directory) as second,
    ):
        assert session.hello(dealer)[0] == b"ok"
        assert session.hello(second)[0] == b"ok"
        check_refusal(dealer.ask(b"evict", evict), "no-session")
        check_refusal(second.ask(b"evict", evict), "not-found")


def test_one_conversation_for_two_sessions(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """A conversation that is tied stays with its session, whatever other token it shows."""
    evict = wire.encode(wire.Evict("no such set"))
    with RawSession(shared_broker.directory) as first:
        with RawSession(shared_broker.directory) as second:
            assert first.hello(dealer)[0] == b"ok"
            check_refusal(second.hello(dealer), "bad-request", "session")
        eventually(
            lambda: second.welcome.session not in sessions(shared_broker), 1, "its session's end"
        )
        check_refusal(dealer.ask(b"evict", evict), "not-found")


def sessions(broker: RunningBroker) -> set[int]:
    return {entry["id"] for entry in broker.status()["sessions"]}


def test_conversation_ends_with_its_session(
    shared_broker: RunningBroker, dealer: RawDealer
) -> None:
    """When the session socket is closed, requests on its conversation get `no-session`."""
    with RawSession(shared_broker.directory) as session:
        session.hello(dealer)
    eventually(
        lambda: session.welcome.session not in sessions(shared_broker), 1, "the session's end"
    )
    check_refusal(dealer.ask(b"evict", wire.encode(wire.Evict("1"))), "no-session")


# --- floods -------------------------------------------------------------------------------------


def test_flood_that_reads_no_reply(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """A peer that floods and never reads costs others under 100 ms and the broker little memory."""
    before = shared_broker.resident_bytes()
    enough = threading.Event()
    flood = threading.Thread(target=send_pings_until, args=(dealer, enough))
    flood.start()
    try:
        with RawDealer(shared_broker.directory) as other:
            pings: list[float] = []
            while len(pings) < FLOOD_PINGS or not has_dropped(shared_broker):
                pings.append(other.ping_seconds())
                assert len(pings) < 50 * FLOOD_PINGS, "the flood was too thin to be one"
    finally:
        enough.set()
        flood.join()
    assert percentile(pings, 0.99) < 0.1 * SCALE, sorted(pings)[-10:]
    grown = shared_broker.resident_bytes() - before
    assert grown < GROWTH_BYTES
    print(f"ping p99 {percentile(pings, 0.99) * 1e3:.2f} ms; grown by {grown >> 10} KiB")


def has_dropped(broker: RunningBroker) -> bool:
    return broker.counter("conversations_dropped") > 0


def send_pings_until(dealer: RawDealer, enough: threading.Event) -> None:
    while not enough.is_set():
        if dealer.socket.poll(10, zmq.POLLOUT):
            dealer.socket.send_multipart([b"ping", b""], zmq.DONTWAIT)


def test_too_many_requests_at_once(shared_broker: RunningBroker, dealer: RawDealer) -> None:
    """A session may have so many requests under way; one more is refused, and none is lost."""
    key = WeightKey(device=DEVICE, name="held by another")
    limit = DEFAULTS.waiting
    with (
        RawSession(shared_broker.directory) as writer,
        RawDealer(shared_broker.directory) as writes,
        RawSession(shared_broker.directory) as session,
    ):
        writer.hello(writes)
        session.hello(dealer)
        assert writes.ask(b"claim", wire.encode(wire.Claim("c", key)))[0] == b"ok"
        for number in range(limit + 1):
            dealer.send(str(number).encode(), b"claim", wire.encode(wire.Claim(str(number), key)))
        refused, status, sentence = dealer.receive()
        assert (refused, status) == (str(limit).encode(), b"busy")
        assert str(limit) in sentence.decode()
        abandon = wire.Abandon("c", "internal", "done with it")
        writes.send(b"abandon", wire.encode(abandon))
        assert dealer.receive()[1] == b"ok"  # the first in line may write now
        assert dealer.ask(b"ping", b"")[0] == b"ok"
