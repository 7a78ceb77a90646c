"""The session socket with peers that send what they should not, or do not read what they get."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.limits import DEFAULTS
from broker.memfd import sealed_memfd
from broker.packets import MAX_DESCRIPTORS
from broker.weights import WeightKey, align_up
from engine_client import Checkpoint
from tests.support.clock import SCALE, eventually
from tests.support.processes import RIGHT_SECONDS, RunningBroker
from tests.support.raw import RawDealer, RawSession, percentile
from tests.support.stored import small_checkpoint

DEVICE = "SIM-0"
PINGS = 150
GROWTH_BYTES = 32 << 20
SLAB_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def leaves_nothing(shared_broker: RunningBroker) -> Iterator[None]:
    """After each test the same broker serves, without a descriptor or session of that test."""
    shared_broker.status()
    before = shared_broker.open_descriptors()
    yield
    shared_broker.evict_all()
    eventually(lambda: shared_broker.status()["sessions"] == [], 2, "the end of every session")
    eventually(lambda: shared_broker.open_descriptors() <= before, 2, "closed descriptors")
    with RawDealer(shared_broker.directory) as other:
        assert other.ping_seconds() < 1 * SCALE


@pytest.fixture
def session(shared_broker: RunningBroker) -> Iterator[RawSession]:
    with RawSession(shared_broker.directory) as session:
        yield session


@pytest.fixture
def dealer(shared_broker: RunningBroker) -> Iterator[RawDealer]:
    with RawDealer(shared_broker.directory) as dealer:
        yield dealer


@pytest.fixture
def spare() -> Iterator[int]:
    """A descriptor to send along."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def check_refused(packet: object, status: str, *words: str) -> None:
    assert isinstance(packet, wire.Refused)
    assert packet.status == status
    for word in words:
        assert word in packet.payload


# --- packets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [
        b"garbage",
        b"\xc1",
        b"\x91" * 3000,
        b"x" * (wire.MAX_SESSION_PACKET_BYTES + 1),
        msgspec.msgpack.encode({"type": "welcome", "session": 1, "token": b"", "epoch": "e"}),
        msgspec.msgpack.encode({"type": "attach", "lease": 7}),
        msgspec.msgpack.encode({"type": "attach", "lease": "1", "more": 1}),
    ],
    ids=["garbage", "no msgpack", "deep", "too long", "ours", "wrong type", "unknown field"],
)
def test_malformed_packet(session: RawSession, packet: bytes) -> None:
    """A malformed packet is refused with a sentence; the session goes on."""
    session.send(packet)
    check_refused(session.receive(), "bad-request")
    session.send(wire.encode(wire.Attach("nothing")))
    check_refused(session.receive(), "bad-request", "'nothing'")


def test_empty_packet_ends_the_session(session: RawSession) -> None:
    """An empty packet cannot be told from end-of-file: it is the end of that session."""
    session.send(b"")
    assert session.receive() is None


def test_half_closed_session_ends(session: RawSession) -> None:
    """A peer that will never send again has ended its session."""
    session.socket.shutdown(socket.SHUT_WR)
    assert session.receive() is None


def test_too_many_descriptors(session: RawSession, spare: int) -> None:
    """More descriptors than a packet may have are refused and closed; the session goes on."""
    packet = wire.encode(wire.Deliver(b"1", "source"))
    for count in (0, 2, MAX_DESCRIPTORS, MAX_DESCRIPTORS + 1, 200):
        session.send(packet, [spare] * count)
        check_refused(session.receive(), "bad-request", "descriptor")
    session.send(wire.encode(wire.Attach("nothing")), [spare] * 3)
    check_refused(session.receive(), "bad-request", "'nothing'")


def test_too_many_deliveries(session: RawSession, spare: int) -> None:
    """Descriptors may wait for their requests up to a bound; one request has one of them."""
    for number in range(DEFAULTS.descriptors):
        for _ in range(2):
            session.send(wire.encode(wire.Deliver(str(number).encode(), "source")), [spare])
    session.send(wire.encode(wire.Deliver(b"one more", "source")), [spare])
    check_refused(session.receive(), "busy", str(DEFAULTS.descriptors))


# --- leases -------------------------------------------------------------------------------------


def test_attach_of_anothers_lease(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer, tmp_path: Path
) -> None:
    """Only the session that was granted a lease can attach it, and no longer than it holds it."""
    checkpoint = small_checkpoint(tmp_path / "c")
    session.hello(dealer)
    with shared_broker.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        session.send(wire.encode(wire.Attach("1")))
        check_refused(session.receive(), "bad-request", "'1'")
        demand = wire.Demand(device=DEVICE, checkpoint=weights.key.checkpoint)
        assert dealer.ask(b"acquire", wire.encode(wire.Acquire("mine", demand)))[0] == b"ok"
        session.send(wire.encode(wire.Attach("mine")))
        attached = session.receive()
        assert isinstance(attached, wire.Attached)
        assert (attached.nbytes, len(session.delivered)) == (weights.nbytes, 2)
        assert dealer.ask(b"release", wire.encode(wire.Release("mine")))[0] == b"ok"
        session.send(wire.encode(wire.Attach("mine")))
        check_refused(session.receive(), "bad-request", "'mine'")
        assert dealer.ask(b"release", wire.encode(wire.Release("mine")))[0] == b"bad-request"


def test_attached_slab_cannot_be_written(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer, tmp_path: Path
) -> None:
    """What a reader is given it cannot change, by no call and however it reopens it."""
    checkpoint = small_checkpoint(tmp_path / "c")
    session.hello(dealer)
    with shared_broker.client() as client, client.acquire(Checkpoint(checkpoint)) as weights:
        demand = wire.Demand(device=DEVICE, checkpoint=weights.key.checkpoint)
        assert dealer.ask(b"acquire", wire.encode(wire.Acquire("1", demand)))[0] == b"ok"
        session.send(wire.encode(wire.Attach("1")))
        session.receive()
        for descriptor in session.delivered:
            for attempt in (os.O_RDONLY, os.O_RDWR):
                again = os.open(f"/proc/self/fd/{descriptor}", attempt)
                with pytest.raises(OSError, match=r"Operation not permitted|Bad file descriptor"):
                    os.pwrite(again, b"x", 0)
                with pytest.raises(OSError, match=r"Operation not permitted|Invalid argument"):
                    os.truncate(again, 0)
                os.close(again)


# --- descriptors that are not what they should be -----------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "file", "socket", "another folder"])
def test_source_that_is_no_folder(
    shared_broker: RunningBroker,
    session: RawSession,
    dealer: RawDealer,
    tmp_path: Path,
    kind: str,
) -> None:
    """A load from a descriptor that is not the checkpoint's folder fails with a sentence."""
    with open_checkpoint(small_checkpoint(tmp_path / kind, seed=len(kind))) as opened:
        source = describe_source(opened)
    session.hello(dealer)
    sent = wrong_descriptors(kind, tmp_path)
    session.send(wire.encode(wire.Deliver(b"id", "source")), sent[:1])
    for descriptor in sent:
        os.close(descriptor)
    acquire = wire.Acquire("1", wire.Demand(device=DEVICE), source)
    dealer.send(b"id", b"acquire", wire.encode(acquire))
    request, status, payload = dealer.receive(20)
    assert (request, status) == (b"id", b"load-failed")
    assert str(tmp_path / kind) in payload.decode()
    assert shared_broker.status()["sets"] == [] or shared_broker.waiting() == 0


def wrong_descriptors(kind: str, tmp_path: Path) -> list[int]:
    if kind == "pipe":
        return list(os.pipe())
    if kind == "file":
        return [os.open(os.devnull, os.O_RDONLY)]
    if kind == "socket":
        return [end.detach() for end in socket.socketpair()]
    return [os.open(tmp_path, os.O_RDONLY)]


def test_request_without_its_descriptor(
    session: RawSession, dealer: RawDealer, tmp_path: Path
) -> None:
    """A request whose descriptor has not come first is refused; so is one without a request id."""
    with open_checkpoint(small_checkpoint(tmp_path / "c")) as opened:
        acquire = wire.Acquire("1", wire.Demand(device=DEVICE), describe_source(opened))
    session.hello(dealer)
    for envelope in ([b"id"], []):
        reply = dealer.ask(*envelope, b"acquire", wire.encode(acquire))
        assert reply[-2] == b"bad-request"


@pytest.mark.parametrize("kind", ["pipe", "file", "unsealed", "empty"])
def test_manifest_that_is_none(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer, kind: str
) -> None:
    """A manifest that somebody could still change is refused, and no memory is reserved."""
    session.hello(dealer)
    claim(dealer)
    sent = wrong_manifests(kind)
    session.send(wire.encode(wire.Deliver(b"id", "manifest")), sent[:1])
    for descriptor in sent:
        os.close(descriptor)
    reply = dealer.ask(b"id", b"reserve", wire.encode(wire.Reserve("c", SLAB_BYTES, 1, "float32")))
    assert reply[1] == b"bad-request"
    assert shared_broker.slabs() == 0


def wrong_manifests(kind: str) -> list[int]:
    if kind == "pipe":
        return list(os.pipe())
    if kind == "file":
        return [os.open(os.devnull, os.O_RDONLY)]
    if kind == "empty":
        return [sealed_memfd("test", b"")]
    return [os.memfd_create("test", os.MFD_ALLOW_SEALING)]


# --- writers ------------------------------------------------------------------------------------


def claim(dealer: RawDealer) -> None:
    key = WeightKey(device=DEVICE, name="by hand")
    assert dealer.ask(b"claim", wire.encode(wire.Claim("c", key)))[0] == b"ok"


def reserve(session: RawSession, dealer: RawDealer) -> int:
    """Claim and reserve by hand; the slab's descriptor, which the session closes."""
    claim(dealer)
    manifest = sealed_memfd("test", b"whatever: the broker never decodes it")
    session.send(wire.encode(wire.Deliver(b"id", "manifest")), [manifest])
    os.close(manifest)
    reply = dealer.ask(b"id", b"reserve", wire.encode(wire.Reserve("c", SLAB_BYTES, 1, "float32")))
    assert reply[1] == b"ok", reply
    session.send(wire.encode(wire.Attach("c")))
    assert isinstance(session.receive(), wire.Attached)
    (slab,) = session.delivered
    return slab


def test_writer_that_dies_half_way(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer
) -> None:
    """Nobody ever sees a half-written set: who waits is told of its writer's end."""
    session.hello(dealer)
    slab = reserve(session, dealer)
    os.pwrite(slab, b"half", 0)
    with (
        RawSession(shared_broker.directory) as waiting,
        RawDealer(shared_broker.directory) as waits,
    ):
        waiting.hello(waits)
        demand = wire.Demand(device=DEVICE, name="by hand")
        waits.send(b"w", b"acquire", wire.encode(wire.Acquire("1", demand)))
        eventually(lambda: shared_broker.waiting() == 1, 5, "the waiting request")
        session.close()
        request, status, payload = waits.receive(RIGHT_SECONDS)
    assert (request, status) == (b"w", b"load-failed")
    assert "writing" in payload.decode()
    eventually(lambda: shared_broker.slabs() == 0, RIGHT_SECONDS, "the end of the slab")
    assert shared_broker.status()["sets"] == []


def test_writer_that_keeps_its_mapping(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer
) -> None:
    """A slab that is still mapped writable is not sealed: the set ends and its memory is free."""
    session.hello(dealer)
    slab = reserve(session, dealer)
    with mmap.mmap(slab, SLAB_BYTES):
        reply = dealer.ask(b"s", b"seal", wire.encode(wire.Seal("c", "mine:1")))
    assert reply[1] == b"bad-request"
    assert "mapped writable" in reply[2].decode()
    eventually(lambda: shared_broker.slabs() == 0, RIGHT_SECONDS, "the end of the slab")
    assert shared_broker.status()["sets"] == []


def test_writer_that_wants_everything(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer
) -> None:
    """A reservation beyond the limit is over-budget with its numbers; the claim can be given up."""
    session.hello(dealer)
    claim(dealer)
    too_much = shared_broker.free_bytes() + mmap.PAGESIZE
    for number, nbytes in enumerate((1 << 62, too_much)):
        manifest = sealed_memfd("test", b"m")
        session.send(wire.encode(wire.Deliver(str(number).encode(), "manifest")), [manifest])
        os.close(manifest)
        message = wire.encode(wire.Reserve("c", nbytes, 1, "float32"))
        reply = dealer.ask(str(number).encode(), b"reserve", message)
        assert reply[1] == b"over-budget"
        assert str(align_up(nbytes, mmap.PAGESIZE)) in reply[2].decode()
    abandon = wire.encode(wire.Abandon("c", "cancelled", "enough"))
    assert dealer.ask(b"abandon", abandon)[0] == b"ok"
    assert shared_broker.status()["sets"] == []


# --- peers that do not read ---------------------------------------------------------------------


def test_endless_attaches_that_nobody_reads(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer, tmp_path: Path
) -> None:
    """A peer that asks for descriptors without end and reads none stops itself, nobody else."""
    session.hello(dealer)
    with shared_broker.client() as client:
        weights = client.acquire(Checkpoint(small_checkpoint(tmp_path / "c")))
        demand = wire.Demand(device=DEVICE, checkpoint=weights.key.checkpoint)
        assert dealer.ask(b"acquire", wire.encode(wire.Acquire("1", demand)))[0] == b"ok"
        before = shared_broker.resident_bytes()
        fill(session, wire.encode(wire.Attach("1")))
        with RawDealer(shared_broker.directory) as other:
            pings = [other.ping_seconds() for _ in range(PINGS)]
        assert percentile(pings, 0.99) < 0.1 * SCALE
        assert shared_broker.resident_bytes() - before < GROWTH_BYTES
        assert len(weights.slab_memory()) == weights.nbytes


def fill(session: RawSession, packet: bytes) -> None:
    """Send it again and again until the socket takes no more for a while."""
    session.socket.settimeout(0.2)
    with contextlib.suppress(BlockingIOError, TimeoutError):
        for _ in range(1_000_000):
            session.send(packet)
        raise AssertionError("the socket takes packets without end")


def test_endless_attaches_that_are_read(
    shared_broker: RunningBroker, session: RawSession, dealer: RawDealer
) -> None:
    """A peer that streams packets and reads every answer does not keep others from theirs."""
    enough = threading.Event()
    attach = wire.encode(wire.Attach("nothing"))

    def stream() -> None:
        while not enough.is_set():
            session.send(attach)

    def drain() -> None:
        while session.receive() is not None:
            pass

    threads = [threading.Thread(target=stream), threading.Thread(target=drain)]
    for thread in threads:
        thread.start()
    try:
        pings = [dealer.ping_seconds() for _ in range(PINGS)]
    finally:
        enough.set()
        threads[0].join()
        session.socket.shutdown(socket.SHUT_WR)
        threads[1].join()
    assert percentile(pings, 0.99) < 0.1 * SCALE, sorted(pings)[-10:]


def test_silent_peers(shared_broker: RunningBroker) -> None:
    """Peers that connect and say nothing are sessions like others and cost nobody anything."""
    silent = [RawSession(shared_broker.directory) for _ in range(20)]
    try:
        assert len(shared_broker.status()["sessions"]) == len(silent)
        with shared_broker.client() as client:
            assert client.ping().pid == shared_broker.server_pid()
    finally:
        for session in silent:
            session.close()
