"""Peers that never finish, never read, or do not run for a while: others notice nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from broker import wire
from broker.limits import DEFAULTS
from engine_client import Checkpoint
from tests.support.clock import SCALE, eventually
from tests.support.processes import Engine, LoaderFault, RunningBroker, resident_bytes
from tests.support.raw import RawDealer, RawSession, percentile
from tests.support.stored import small_checkpoint
from tests.support.streams import EndlessRequest, connect_raw, cut_conversation, frame

StartEngine = Callable[..., Engine]

DEVICE = "SIM-0"
STREAM_SECONDS = 1.0
GROWTH_BYTES = 192 << 20
"""The stated bound: `stream_bytes`, what arrives in a tenth of a second, and slack."""
PARTIAL_BYTES = 1 << 20
NAMES = 60


@pytest.fixture
def counted(shared_broker: RunningBroker) -> Callable[[str], int]:
    """How much a counter of the shared broker, which is empty now, has grown during the test."""
    shared_broker.evict_all()
    before = shared_broker.status()["counters"]
    return lambda name: shared_broker.counter(name) - before.get(name, 0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(small_checkpoint(tmp_path / "checkpoint"))


# --- requests that never end --------------------------------------------------------------------


@pytest.mark.parametrize("frame_bytes", [1, 200_000])
def test_endless_request(
    shared_broker: RunningBroker,
    counted: Callable[[str], int],
    checkpoint: Checkpoint,
    frame_bytes: int,
) -> None:
    """Who streams frames without end is cut off; memory stays bounded, others are answered."""
    broker, server = shared_broker, shared_broker.server_pid()
    before = resident_bytes(server)
    with broker.client() as client, RawDealer(broker.directory) as other:
        weights = client.acquire(checkpoint)
        pings, peak = [other.ping_seconds()], before
        streaming = EndlessRequest(broker.directory, frame_bytes, STREAM_SECONDS)
        while streaming.is_running:
            pings.append(other.ping_seconds())
            peak = max(peak, resident_bytes(server))
        said = streaming.result()
        assert said["cuts"] > 2, said
        assert counted("connections_cut") >= 2
        assert counted("connections_refused") >= 1
        assert peak - before < GROWTH_BYTES
        assert percentile(pings, 0.99) < 0.1 * SCALE, sorted(pings)[-10:]
        assert client.acquire(checkpoint).how == "resident"
        assert bytes(weights.slab_memory()[:1])
    assert broker.server_pid() == server
    assert counted("conversations_lost") == 0
    print(
        f"frames of {frame_bytes} bytes: {said['sent'] >> 20} MiB sent, cut {said['cuts']} times; "
        f"ping p99 {percentile(pings, 0.99) * 1e3:.1f} ms; grown by {(peak - before) >> 20} MiB"
    )


def test_many_unfinished_requests(broker: RunningBroker) -> None:
    """Requests that stop half-way cost no more than the limit together, however many they are."""
    server = broker.server_pid()
    before = resident_bytes(server)
    half = frame(bytes(PARTIAL_BYTES // 4), more=True) * 4
    with contextlib.ExitStack() as held:
        for _ in range(GROWTH_BYTES // PARTIAL_BYTES):
            try:
                connection = held.enter_context(connect_raw(broker.directory))
                connection.sendall(half)
            except OSError:  # cut off, or refused since: what is meant to happen
                continue
        eventually(lambda: broker.counter("connections_cut") > 0, 5, "the first cut")
        eventually(
            lambda: resident_bytes(server) - before < GROWTH_BYTES // 2, 5, "the end of the growth"
        )


def test_honest_large_requests(shared_broker: RunningBroker, counted: Callable[[str], int]) -> None:
    """Requests as large as they may be are no stream: none of 200 is cut off."""
    payload = b"x" * (DEFAULTS.frame_bytes + 1)
    with RawDealer(shared_broker.directory) as dealer:
        for _ in range(200):
            dealer.send(b"evict", payload)
        for _ in range(200):
            status, sentence = dealer.receive(20)
            assert status == b"bad-request"
            assert b"limit frame_bytes=262144" in sentence
    assert counted("connections_cut") == 0


def test_endless_small_mistakes(broker: RunningBroker) -> None:
    """Requests of far too many frames are answered, until it is clear that they are no mistake."""
    with RawDealer(broker.directory) as dealer:
        assert dealer.ask(*[b"frame"] * 10_000)[0] == b"bad-request"
        dealer.send(*[b"frame"] * 10_000)
        eventually(lambda: broker.counter("connections_cut") == 1, 10, "the cut")
    with RawDealer(broker.directory) as other:
        assert other.ping_seconds() < 1 * SCALE


# --- conversations that are lost ----------------------------------------------------------------


def test_deaf_peer_comes_back(broker: RunningBroker, checkpoint: Checkpoint) -> None:
    """Who never reads loses its conversation, not its leases, and gets another by `hello`."""
    with broker.client() as client:
        weights = client.acquire(checkpoint)
        demand = wire.Demand(device=DEVICE, checkpoint=weights.key.checkpoint)
        with RawSession(broker.directory) as session:
            acquire = wire.encode(wire.Acquire("mine", demand))
            with RawDealer(broker.directory) as deaf:
                session.hello(deaf)
                assert deaf.ask(b"1", b"", b"acquire", acquire)[2] == b"ok"
                deaf.socket.setsockopt(24, 1)  # ZMQ_RCVHWM: for connections from now on
                flood_until_cut(broker, deaf)
            assert isinstance(session.receive(), wire.Welcome)
            assert broker.leases() == 2
            with RawDealer(broker.directory) as again:
                assert session.hello(again)[0] == b"ok"
                status, payload = again.ask(b"1", b"", b"acquire", acquire)[2:]
                assert (status, wire.decode_reply(wire.Granted, payload).lease) == (b"ok", "mine")
                assert broker.leases() == 2
                assert again.ask(b"release", wire.encode(wire.Release("mine")))[0] == b"ok"


def flood_until_cut(broker: RunningBroker, deaf: RawDealer) -> None:
    def is_cut() -> bool:
        for _ in range(200):
            if deaf.socket.poll(0, 2):
                deaf.send(b"ping", b"")
        return broker.counter("conversations_lost") > 0

    eventually(is_cut, 20, "the end of the deaf peer's conversation")


def test_waiting_call_survives_its_conversation(
    shared_broker: RunningBroker,
    counted: Callable[[str], int],
    start_engine: StartEngine,
    tmp_path: Path,
) -> None:
    """A client whose connection breaks while it waits gets its answer on the next, once."""
    broker = shared_broker
    broker.order_loaders(LoaderFault.STOPS_AT_START)
    path = str(small_checkpoint(tmp_path / "slow"))
    engine = start_engine(broker)
    engine.tell("acquire", path=path)
    broker.stopped_loader()
    eventually(lambda: broker.waiting() == 1, 10, "the waiting request")
    assert break_conversations_of(broker, engine) > 0
    eventually(lambda: counted("requests_repeated") == 1, 5, "the repeated request")
    broker.let_loader_go()
    assert engine.answer()["ok"]["how"] == "loaded"
    assert broker.leases() == 1
    assert counted("loads_started") == 1
    assert broker.waiting() == 0
    engine.ask("release")
    eventually(lambda: broker.leases() == 0, 5, "the end of the lease")


def break_conversations_of(broker: RunningBroker, engine: Engine) -> int:
    """Shut down the engine's connections from outside, by a descriptor that is theirs too."""
    count = 0
    pidfd = os.pidfd_open(engine.pid)
    try:
        for link in Path(f"/proc/{engine.pid}/fd").iterdir():
            count += shut_down(pidfd, int(link.name), broker.directory / "default.zmq")
    finally:
        os.close(pidfd)
    return count


def shut_down(pidfd: int, number: int, path: Path) -> int:
    import ctypes

    pidfd_getfd = 438  # asm-generic/unistd.h, Linux 5.6
    copy = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, pidfd, number, 0)
    if copy < 0:
        return 0
    try:
        with socket.socket(fileno=copy) as connection:
            if connection.getpeername() != str(path):
                return 0
            connection.shutdown(socket.SHUT_RDWR)
            return 1
    except OSError:  # no socket, or not connected
        with contextlib.suppress(OSError):
            os.close(copy)
        return 0


def test_client_whose_conversation_breaks(
    shared_broker: RunningBroker, checkpoint: Checkpoint
) -> None:
    """A client notices nothing of a broken connection: its leases and watches go on."""
    broker = shared_broker
    with broker.client() as client:
        weights = client.acquire(Checkpoint(checkpoint.path, "m"))
        with client.watch("m") as watch:
            for _ in range(3):
                assert cut_conversation(broker.directory) > 0
                assert client.ping(timeout=10).pid == broker.server_pid()
            broker.evict_all()
            assert watch.next(10).set == weights.set_id  # type: ignore[union-attr]
        weights.release()
        eventually(lambda: broker.leases() == 0, 5, "the end of the lease")


# --- engines that do not run --------------------------------------------------------------------


def test_engine_that_does_not_run_for_a_while(
    shared_broker: RunningBroker,
    counted: Callable[[str], int],
    start_engine: StartEngine,
    tmp_path: Path,
) -> None:
    """An engine that is stopped while it waits misses events, never its answer, nor anything of it.

    More events come meanwhile than all queues on the way to it hold, as in minutes without its GIL.
    """
    broker = shared_broker
    broker.order_loaders(LoaderFault.STOPS_AT_START)
    engine = start_engine(broker)
    engine.ask("have_events", name="")
    engine.tell("acquire", path=str(small_checkpoint(tmp_path / "slow")))
    loader = broker.stopped_loader()
    eventually(lambda: broker.waiting() == 1, 10, "the waiting request")
    broker.order_loaders(None)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        make_events(broker, tmp_path, lambda: counted("notices_dropped") > 0)
        os.kill(loader, signal.SIGCONT)
        eventually(lambda: broker.leases() == 1, 20, "the grant")
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert engine.answer()["ok"]["how"] == "loaded"
    assert engine.ask("touch") >= 0
    for name in ("conversations_lost", "replies_dropped", "connections_cut"):
        assert counted(name) == 0


def make_events(broker: RunningBroker, tmp_path: Path, enough: Callable[[], bool]) -> None:
    """Evict a set of many names again and again while it is leased: an event for each name."""
    path = small_checkpoint(tmp_path / "named", tensors=1)
    with broker.client() as client:
        held = [client.acquire(Checkpoint(path, f"name {number}")) for number in range(NAMES)]
        while not enough():
            client.evict(str(held[0].set_id))
