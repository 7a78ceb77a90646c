"""Limits of a running broker: each one that is met is a sentence with its name, and nobody else's
trouble."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker import wire
from broker.errors import BadRequest, BrokerError, Busy, Cancelled, LoadFailed
from broker.memfd import sealed_memfd
from broker.weights import WeightKey
from engine_client import Checkpoint, EngineClient
from engine_client.session import connect
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE, eventually
from tests.support.processes import Engine, LoaderFault, RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint

StartBroker = Callable[..., RunningBroker]
StartEngine = Callable[..., Engine]

DEVICE = "SIM-0"
SLAB_BYTES = 1 << 20
MANY = 500
"""Conversations; one process may have 512."""
TIGHT = {
    "sessions": 4,
    "connections": 12,
    "requests": 3,
    "request_bytes": 8000,
    "all_request_bytes": 20_000,
    "waiting": 2,
    "claims": 2,
    "all_claims": 4,
    "names": 3,
    "set_names": 2,
    "watches": 2,
    "tensors": 1000,
    "manifest_bytes": 500,
    "frames": 5,
    "frame_bytes": 4096,
    "descriptors": 2,
    "seal_seconds": 1,
    "loaders": 1,
}


@pytest.fixture(scope="module")
def tight() -> Iterator[RunningBroker]:
    """A broker that allows next to nothing."""
    options = [part for name, value in TIGHT.items() for part in ("--limit", f"{name}={value}")]
    with private_directory() as directory, brokers(directory) as start:
        yield start(*options)


@pytest.fixture(autouse=True)
def leaves_nothing(tight: RunningBroker) -> Iterator[None]:
    """After each test nothing is left of it on the books."""
    yield
    tight.evict_all()
    eventually(lambda: tight.status()["sessions"] == [], 5, "the end of every session")
    assert tight.status()["sets"] == []


@pytest.fixture
def session(tight: RunningBroker) -> Iterator[RawSession]:
    with RawSession(tight.directory) as session:
        yield session


@pytest.fixture
def dealer(tight: RunningBroker, session: RawSession) -> Iterator[RawDealer]:
    with RawDealer(tight.directory) as dealer:
        assert session.hello(dealer)[0] == b"ok"
        yield dealer


def check_met(reply: list[bytes] | Any, status: str, limit: str) -> None:
    """The reply has the status, and a sentence with the limit's name, value and option."""
    word, payload = reply[-2:]
    assert word == status.encode(), (word, payload)
    assert re.search(rf"\(limit {limit}={TIGHT[limit]}[; ]", payload.decode())
    assert f"--limit {limit}=" in payload.decode()


def claim(name: str, lease: str) -> bytes:
    return wire.encode(wire.Claim(lease, WeightKey(device=DEVICE, name=name)))


# --- sessions and connections -------------------------------------------------------------------


def test_sessions(tight: RunningBroker) -> None:
    """One session more is refused with a sentence; it is welcome when another has ended."""
    before = tight.counter("sessions_refused")
    held = [RawSession(tight.directory) for _ in range(TIGHT["sessions"])]
    try:
        with pytest.raises(Busy, match=r"4 processes have a session .*\(limit sessions=4;"):
            connect("default", tight.directory, platform="simulated")
        assert tight.counter("sessions_refused") == before + 1
        held.pop().close()
        eventually(lambda: len(tight.status()["sessions"]) == 3, 2, "the end of a session")
        connect("default", tight.directory, platform="simulated").close()
    finally:
        for session in held:
            session.close()
    assert "session-refused" in tight.log.read_text()


def test_connections(tight: RunningBroker) -> None:
    """Conversations beyond the limit are cut off before anything is read; earlier ones go on."""
    tight.status()
    with contextlib.ExitStack() as opened:
        dealers = [opened.enter_context(RawDealer(tight.directory)) for _ in range(30)]
        refused = tight.counter("connections_refused")
        eventually(lambda: tight.counter("connections_refused") > refused, 5, "a refusal")
        assert tight.status()["broker"]["connections"] <= TIGHT["connections"]
        for dealer in dealers:
            dealer.send(b"ping", b"")
        eventually(lambda: sum(bool(d.socket.poll(0)) for d in dealers) > 8, 5, "answers")
    eventually(lambda: tight.status()["broker"]["connections"] < 5, 5, "their end")


def test_many_honest_conversations_at_once(
    start_broker: StartBroker,
) -> None:
    """What their connections cost is not held against them: each is answered, none is cut off."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * MANY:
        pytest.skip(f"a process may have {hard} descriptors here, {MANY} conversations need more")
    broker = start_broker()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * MANY)
    dealers = [context.socket(zmq.DEALER) for _ in range(MANY)]
    try:
        for dealer in dealers:
            dealer.connect(f"ipc://{broker.directory}/default.zmq")
            dealer.send_multipart([b"ping", b""])
        eventually(lambda: all(dealer.poll(0) for dealer in dealers), 10, "every answer")
    finally:
        context.destroy(linger=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert broker.counter("connections_cut") == 0


def test_what_one_process_may_have(start_broker: StartBroker, start_engine: StartEngine) -> None:
    """A process that opens too many sessions and conversations leaves room for others."""
    options = ("--limit", "process_sessions=2", "--limit", "process_connections=5")
    broker = start_broker(*options)
    with contextlib.ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(RawSession(broker.directory))
        words = rf"your process {os.getpid()} has 2 sessions .*\(limit process_sessions=2;"
        with pytest.raises(Busy, match=words):
            connect("default", broker.directory, platform="simulated")
        broker.status()
        for _ in range(10):
            opened.enter_context(RawDealer(broker.directory))
        eventually(lambda: broker.counter("connections_refused") >= 5, 5, "refusals")
        assert start_engine(broker).ask("status")["broker"]["restarts"] == 0


def test_descriptors_of_the_process(start_broker: StartBroker) -> None:
    """A broker with hardly any descriptors left refuses sessions and conversations, and lives."""
    broker = start_broker()
    server = broker.server_pid()
    resource.prlimit(server, resource.RLIMIT_NOFILE, (200, 200))
    with contextlib.ExitStack() as opened:
        refusal = connect_until_refused(broker, opened)
        assert isinstance(refusal, Busy)
        assert "descriptors open and may have 200" in refusal.sentence
        assert "ulimit -Hn" in refusal.sentence
        while broker.counter("connections_refused") == 0:
            dealer = opened.enter_context(RawDealer(broker.directory))
            dealer.send(b"ping", b"")
            eventually(
                lambda d=dealer: d.socket.poll(0) or broker.counter("connections_refused"),  # type: ignore[misc]
                5,
                "an answer or a refusal",
            )
        assert broker.server_pid() == server
    assert broker.counter("server_restarts") == 0


def test_no_descriptor_for_a_checkpoint(start_broker: StartBroker, tmp_path: Path) -> None:
    """A checkpoint whose folder's descriptor the kernel keeps back is `busy`, then served."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c"))
    broker = start_broker()
    server = broker.server_pid()
    with broker.client() as client:
        _soft, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
        resource.prlimit(server, resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(Busy, match="no room for another descriptor: it may have 3 open"):
            client.acquire(checkpoint)
        resource.prlimit(server, resource.RLIMIT_NOFILE, (hard, hard))
        client.acquire(checkpoint).release()


def test_no_memory_for_threads(start_broker: StartBroker, tmp_path: Path) -> None:
    """Whatever a server without address space answers, nothing is left half done in it."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c"))
    broker = start_broker()
    server = broker.server_pid()
    with broker.client() as client:
        _soft, hard = resource.prlimit(server, resource.RLIMIT_AS)
        resource.prlimit(server, resource.RLIMIT_AS, (virtual_bytes(server) + (1 << 20), hard))
        with contextlib.suppress(BrokerError):
            client.acquire(checkpoint).release()
        resource.prlimit(server, resource.RLIMIT_AS, (hard, hard))
        client.acquire(checkpoint, timeout=20 * SCALE).release()
    assert broker.server_pid() == server


def virtual_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def connect_until_refused(broker: RunningBroker, opened: contextlib.ExitStack) -> BrokerError:
    for _ in range(200):
        try:
            session = connect("default", broker.directory, platform="simulated")
        except BrokerError as error:
            return error
        opened.callback(session.close)
    raise AssertionError("200 sessions in 200 descriptors")


# --- requests -----------------------------------------------------------------------------------


def test_frames(dealer: RawDealer) -> None:
    """A request of too many frames is refused."""
    check_met(dealer.ask(*[b"x"] * 4, b"ping", b""), "bad-request", "frames")


def test_frame_bytes(dealer: RawDealer) -> None:
    """A payload that is too large is refused; one as large as allowed is not."""
    check_met(dealer.ask(b"evict", b"x" * 4097), "bad-request", "frame_bytes")
    assert b"cannot be decoded" in dealer.ask(b"evict", b"x" * 4096)[1]


def test_waiting_requests(tight: RunningBroker, dealer: RawDealer) -> None:
    """Requests of one session that wait are limited; the others still wait and are answered."""
    with RawSession(tight.directory) as writer, RawDealer(tight.directory) as writes:
        writer.hello(writes)
        assert writes.ask(b"claim", claim("m", "c"))[0] == b"ok"
        for number in range(3):
            dealer.send(str(number).encode(), b"claim", claim("m", str(number)))
        check_met(dealer.receive(), "busy", "waiting")
        cancel = wire.encode(wire.Cancel("0"))
        assert dealer.ask(b"c", b"cancel", cancel)[1] == b"cancelled"
        assert dealer.receive() == [b"c", b"ok", wire.encode(wire.Done())]
        dealer.send(b"3", b"claim", claim("m", "3"))
        eventually(lambda: tight.waiting() == 2, 2, "two waiting requests")


def test_bytes_of_waiting_requests(tight: RunningBroker, dealer: RawDealer) -> None:
    """What one session's requests hold in memory is limited, however few they are."""
    with RawSession(tight.directory) as writer, RawDealer(tight.directory) as writes:
        writer.hello(writes)
        assert writes.ask(b"claim", claim("m", "c"))[0] == b"ok"
        layout = {f"{number}" + "x" * 200: 1 for number in range(15)}
        key = WeightKey(device=DEVICE, name="m", layout=layout)
        big = [wire.encode(wire.Claim(str(number), key)) for number in range(4)]
        assert 3000 < len(big[0]) < 4096
        writes.send(b"0", b"claim", big[0])
        assert writes.receive()[1] == b"ok"
        for number in (1, 2):
            dealer.send(str(number).encode(), b"claim", big[number])
        acquire = wire.Acquire("a", wire.Demand(device=DEVICE, name="m", layout=layout))
        check_met(dealer.ask(b"3", b"acquire", wire.encode(acquire)), "busy", "request_bytes")


def test_claims(tight: RunningBroker, dealer: RawDealer) -> None:
    """What one session, and all together, may write at once is limited."""
    for number in range(2):
        assert dealer.ask(b"claim", claim(f"m{number}", f"c{number}"))[0] == b"ok"
    check_met(dealer.ask(b"claim", claim("another", "c")), "busy", "claims")
    with RawSession(tight.directory) as second, RawDealer(tight.directory) as other:
        second.hello(other)
        for number in range(2):
            assert other.ask(b"claim", claim(f"n{number}", f"c{number}"))[0] == b"ok"
        with RawSession(tight.directory) as third, RawDealer(tight.directory) as full:
            third.hello(full)
            check_met(full.ask(b"claim", claim("another", "c")), "busy", "all_claims")
    abandon = wire.encode(wire.Abandon("c0", "cancelled", "enough"))
    assert dealer.ask(b"abandon", abandon)[0] == b"ok"
    eventually(
        lambda: dealer.ask(b"claim", claim("another", "c"))[0] == b"ok", 2, "room for a claim"
    )


def test_watches(dealer: RawDealer) -> None:
    """A session watches so many names and no more."""
    for number in range(2):
        assert dealer.ask(b"watch", wire.encode(wire.Watch(str(number))))[0] == b"ok"
    check_met(dealer.ask(b"watch", wire.encode(wire.Watch("another"))), "busy", "watches")


def test_names(tight: RunningBroker, tmp_path: Path) -> None:
    """Names, of one set and of all, are limited; asking by a name that is there is not."""
    paths = [small_checkpoint(tmp_path / str(seed), seed, tensors=seed + 1) for seed in range(3)]
    with tight.client() as client:
        held = [client.acquire(Checkpoint(paths[0], name)) for name in ("a", "b")]
        with pytest.raises(Busy, match=r"'c' cannot become a name.*\(limit set_names=2;"):
            client.acquire(Checkpoint(paths[0], "c"))
        held.append(client.acquire(Checkpoint(paths[1], "d")))
        with pytest.raises(Busy, match=r"'e' cannot become a name.*\(limit names=3;"):
            client.acquire(Checkpoint(paths[2], "e"))
        held.append(client.acquire("a"))
        for weights in held:
            weights.release()


# --- writers ------------------------------------------------------------------------------------


def reserve(
    session: RawSession, dealer: RawDealer, manifest: bytes = b"m", tensors: int = 1
) -> list[bytes]:
    blob = sealed_memfd("test", manifest)
    session.send(wire.encode(wire.Deliver(b"id", "manifest")), [blob])
    os.close(blob)
    message = wire.encode(wire.Reserve("c", SLAB_BYTES, tensors, "float32"))
    return dealer.ask(b"id", b"reserve", message)


def test_tensors_and_manifest(session: RawSession, dealer: RawDealer) -> None:
    """A set of too many tensors, or with too long a description, is refused; the claim stays."""
    assert dealer.ask(b"claim", claim("m", "c"))[0] == b"ok"
    check_met(reserve(session, dealer, tensors=1001), "bad-request", "tensors")
    check_met(reserve(session, dealer, manifest=b"m" * 501), "bad-request", "manifest_bytes")
    assert reserve(session, dealer, tensors=1000)[1] == b"ok"


def test_delivered_descriptors(session: RawSession) -> None:
    """Descriptors that no request has asked for are limited."""
    for number in range(3):
        session.send(wire.encode(wire.Deliver(str(number).encode(), "source")), [0])
    refused = session.receive()
    check_met([refused.status.encode(), refused.payload.encode()], "busy", "descriptors")


def test_writer_that_stalls(tight: RunningBroker, session: RawSession, dealer: RawDealer) -> None:
    """Who reserves and does not seal in time loses its claim; who waits is told, or may write."""
    stalled = tight.counter("writers_stalled")
    assert dealer.ask(b"claim", claim("m", "c"))[0] == b"ok"
    with RawSession(tight.directory) as second, RawDealer(tight.directory) as waits:
        second.hello(waits)
        assert reserve(session, dealer)[1] == b"ok"
        demand = wire.Demand(device=DEVICE, name="m")
        waits.send(b"w", b"acquire", wire.encode(wire.Acquire("1", demand)))
        eventually(lambda: tight.slabs() == 1, 1, "the slab")
        reply = waits.receive(5)
        assert reply[0] == b"w"
        check_met(reply, "load-failed", "seal_seconds")
        assert f"pid {os.getpid()}".encode() in reply[2]
    eventually(lambda: tight.slabs() == 0, 2, "the end of the slab")
    late = dealer.ask(b"seal", wire.encode(wire.Seal("c", "mine:1")))
    check_met(late, "load-failed", "seal_seconds")
    assert tight.counter("writers_stalled") == stalled + 1
    assert "writer-stalled" in tight.log.read_text()


def test_writer_that_seals_in_time(
    tight: RunningBroker, session: RawSession, dealer: RawDealer
) -> None:
    """A sealed set is not touched when the time of its writer is over."""
    stalled = tight.counter("writers_stalled")
    assert dealer.ask(b"claim", claim("m", "c"))[0] == b"ok"
    assert reserve(session, dealer)[1] == b"ok"
    seal = wire.encode(wire.Seal("c", "mine:1", keep=True))
    assert dealer.ask(b"s", b"seal", seal)[1] == b"ok"
    assert dealer.ask(b"claim", claim("n", "c2"))[0] == b"ok"
    eventually(lambda: len(tight.status()["sets"]) == 2, 1, "both sets")
    with RawSession(tight.directory) as second, RawDealer(tight.directory) as other:
        # A second writer's time ends after the first one's would have.
        second.hello(other)
        assert other.ask(b"claim", claim("o", "c"))[0] == b"ok"
        assert reserve(second, other)[1] == b"ok"
        eventually(lambda: tight.counter("writers_stalled") == stalled + 1, 5, "its end")
    states = {entry["id"]: entry["state"] for entry in tight.status()["sets"]}
    assert sorted(states.values()) == ["claimed", "sealed"]


def test_stalled_loader(tight: RunningBroker, tmp_path: Path) -> None:
    """A loader that stalls is killed, and who waits for it is told why."""
    tight.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    try:
        with tight.client() as client, pytest.raises(LoadFailed) as caught:
            client.acquire(Checkpoint(small_checkpoint(tmp_path / "c")), timeout=20)
    finally:
        tight.order_loaders(None)
    assert caught.value.reason == "writer-stalled"
    eventually(lambda: tight.loaders() == [], 5, "the end of the loader")


# --- loads --------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def load(client: EngineClient, path: Path) -> str:
    """How the weights came about."""
    with client.acquire(Checkpoint(path), timeout=20 * SCALE) as weights:
        return weights.how


def test_loads_wait_for_their_turn(
    tight: RunningBroker, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Loads beyond the limit are queued, say so as their progress, and then happen."""
    queued = tight.counter("loads_queued")
    tight.order_loaders(LoaderFault.STOPS_AT_START)
    second = Checkpoint(small_checkpoint(tmp_path / "second", tensors=2))
    stages: list[str] = []

    def on_progress(progress: wire.Progress) -> None:
        stages.append(progress.stage)
        if len(stages) == 1:
            assert tight.status()["broker"]["loads_queued"] == 1
            assert len(tight.loaders()) == 1
            tight.let_loader_go()

    with tight.client() as client:
        first = pool.submit(load, client, small_checkpoint(tmp_path / "first"))
        tight.stopped_loader()
        with client.acquire(second, timeout=20 * SCALE, progress=on_progress) as weights:
            assert weights.how == "loaded"
        assert first.result() == "loaded"
    assert stages[0] == "waiting for one of 1 loaders to end"
    assert tight.counter("loads_queued") == queued + 1


def test_queued_load_that_nobody_wants(
    tight: RunningBroker, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A load that is evicted before its turn never starts, and leaves no descriptor."""
    tight.order_loaders(LoaderFault.STOPS_AT_START)
    with tight.client() as client:
        first = pool.submit(load, client, small_checkpoint(tmp_path / "first"))
        tight.stopped_loader()
        started = tight.counter("loads_started")
        before = tight.open_descriptors()
        second = pool.submit(load, client, small_checkpoint(tmp_path / "second", tensors=2))
        eventually(lambda: tight.status()["broker"]["loads_queued"] == 1, 5, "the queue")
        newest = max(entry["id"] for entry in tight.status()["sets"])
        client.evict(str(newest))
        with pytest.raises(Cancelled, match="evicted"):
            second.result()
        assert tight.status()["broker"]["loads_queued"] == 0
        eventually(lambda: tight.open_descriptors() <= before, 5, "closed descriptors")
        tight.let_loader_go()
        assert first.result() == "loaded"
    assert tight.counter("loads_started") == started + 1
    lines = tight.log_lines()
    assert not any("loader-started" in line and f"set={newest} " in line for line in lines)


def test_unknown_limit_is_refused_at_start(start_broker: StartBroker) -> None:
    """A limit that is none ends `serve` at once, with the name that was probably meant."""
    with pytest.raises(AssertionError, match="did you mean sessions"):
        start_broker("--limit", "sesions=1")


def test_errors_carry_the_limit(tight: RunningBroker) -> None:
    """Programs find the limit's name as a field of the error."""
    with tight.client() as client:
        watches = [client.watch(str(number)) for number in range(2)]
        with pytest.raises(BrokerError) as caught:
            client.watch("another")
        for watch in watches:
            watch.close()
    assert type(caught.value) is Busy
    assert (caught.value.limit, caught.value.value) == ("watches", 2)
    assert issubclass(BadRequest, BrokerError)
