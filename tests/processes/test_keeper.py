"""Servers that die: engines go on, nothing is loaded again, whoever waited gets its answer."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker import wire
from broker.errors import BrokerNotFound
from engine_client import Checkpoint
from engine_client.watching import NewGeneration
from tests.campaign import kernel
from tests.campaign.asking import ask_status
from tests.campaign.content import write_checkpoint
from tests.campaign.engines import Engine, Outcome, nursery
from tests.support.clock import SCALE, eventually
from tests.support.fake_keeper import READY
from tests.support.processes import ROOT, LoaderFault, RunningBroker, is_alive, wait_until_gone

BACK_SECONDS = 2.0
"""Within this everybody has a server again (issue of the whole)."""
AT_ONCE_SECONDS = 1.0
FIRST_ROUTING_ID = 0x6B8B4567
"""What rand() gives first if nobody seeds it: where libzmq's automatic routing ids begin."""

StartEngines = Callable[[RunningBroker, int], list[Engine]]


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return nursery()


@pytest.fixture
def start_engines(context: ForkServerContext) -> Iterator[StartEngines]:
    started: list[Engine] = []

    def start(broker: RunningBroker, number: int = 1) -> list[Engine]:
        new = [Engine(context, str(broker.directory)) for _ in range(number)]
        started.extend(new)
        for engine in new:
            engine.session = engine.ask("connect")
        return new

    yield start
    for engine in started:
        if engine.is_alive:
            engine.kill()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(write_checkpoint(tmp_path / "checkpoint", "the weights", 1 << 20))


def server_of(broker: RunningBroker) -> int:
    """The server's pid, by the kernel's word; 0 between two."""
    return next(iter(kernel.children(broker.pid)), 0)


def replace_server(broker: RunningBroker, number: signal.Signals = signal.SIGKILL) -> int:
    """Kill the server; the next one's pid, once it answers."""
    killed = server_of(broker)
    os.kill(killed, number)
    wait_until_gone(killed)
    successor: int = ask_status(broker.directory)["broker"]["pid"]
    assert successor != killed
    return successor


def leases(broker: RunningBroker) -> set[tuple[int, int, str]]:
    """(set, session, lease) of every lease on the books."""
    return {
        (entry["id"], lease["session"], lease["lease"])
        for entry in ask_status(broker.directory)["sets"]
        for lease in entry["leases"]
    }


def outcome_of(engine: Engine, seconds: float = 30.0) -> Outcome:
    """What became of the one thing the engine was asked for."""
    found: list[Outcome] = []

    def arrived() -> bool:
        found.extend(engine.pump())
        return bool(found)

    eventually(arrived, seconds, f"the answer of engine {engine.pid}")
    return found[0]


def stopped(pid: int) -> bool:
    return kernel.state(pid) == "T"


# --- engines that read meanwhile ----------------------------------------------------------------


def kill_it(broker: RunningBroker) -> None:
    os.kill(server_of(broker), signal.SIGKILL)


def abort_it(broker: RunningBroker) -> None:
    """As an assertion of libzmq does, e.g. when a routing id is taken twice."""
    os.kill(server_of(broker), signal.SIGABRT)


@pytest.mark.parametrize("harm", [kill_it, abort_it])
def test_server_dies_while_engines_read(
    broker: RunningBroker,
    start_engines: StartEngines,
    checkpoint: str,
    harm: Callable[[RunningBroker], None],
) -> None:
    """Eight engines read on, are served again within 2 s, and keep leases and addresses."""
    engines = start_engines(broker, 8)
    held = {e: e.ask("acquire", slot=1, path=checkpoint) for e in engines}
    loads = broker.counter("loads_started")
    before = leases(broker)
    assert (loads, len(before)) == (1, 8)
    for engine in engines:
        engine.ask("read_on")
    passes = [engine.ask("readings")["passes"] for engine in engines]

    harm(broker)
    died = time.monotonic()
    for engine in engines:
        engine.tell("ping")
    for engine in engines:
        assert outcome_of(engine, BACK_SECONDS).kind == "ok"
    assert time.monotonic() - died < BACK_SECONDS * SCALE

    assert leases(broker) == before
    report = ask_status(broker.directory)
    assert report["broker"]["restarts"] == 1
    assert report["counters"].get("loads_started", 0) == 0
    for engine, read_before in zip(engines, passes, strict=True):
        readings = engine.ask("readings")
        assert readings["passes"] > read_before
        assert readings["damage"] == []
        (weights,) = engine.ask("check").values()
        assert (weights["set"], weights["address"]) == (
            held[engine]["set"],
            held[engine]["address"],
        )
        assert engine.ask("lost_at") is None
        assert engine.ask("acquire", slot=2, path=checkpoint)["how"] == "resident"


def test_engines_outlive_a_server_without_descriptors(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str
) -> None:
    """Whether libzmq ends that server or the connections are cut first, engines are served."""
    server = server_of(broker)
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    held = leases(broker)
    _soft, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (kernel.descriptors(server), hard))
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for peer in peers:
        peer.connect(str(broker.directory / "default.zmq"))
    engine.ask("ping")
    for peer in peers:
        peer.close()
    if server_of(broker) == server:
        resource.prlimit(server, resource.RLIMIT_NOFILE, (hard, hard))
    assert leases(broker) == held


def test_forged_routing_ids(broker: RunningBroker, start_engines: StartEngines) -> None:
    """A peer that takes the ids libzmq would give to the next connections harms nobody."""
    server = server_of(broker)
    (engine,) = start_engines(broker, 1)
    context = zmq.Context()
    forgers = []
    for number in range(FIRST_ROUTING_ID, FIRST_ROUTING_ID + 40):
        forger = context.socket(zmq.DEALER)
        forger.set(zmq.LINGER, 0)
        forger.set(zmq.ROUTING_ID, b"\0" + number.to_bytes(4, "big"))
        forger.connect(f"ipc://{broker.directory}/default.zmq")
        forger.send_multipart([b"ping", b""])
        forgers.append(forger)
    for forger in forgers:
        assert forger.poll(int(10_000 * SCALE))
    newcomers = start_engines(broker, 3)
    assert {newcomer.ask("ping") < BACK_SECONDS for newcomer in [engine, *newcomers]} == {True}
    assert server_of(broker) == server
    for forger in forgers:
        forger.close()
    context.term()


def test_more_connections_than_descriptors(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str
) -> None:
    """A peer that opens more conversations than there can be takes nothing from an engine."""
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    before = leases(broker)
    for pid in (broker.pid, server_of(broker)):
        _soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, hard))
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(600)]
    for peer in peers:
        peer.connect(str(broker.directory / "default.zmq"))
    for peer in peers:
        peer.close()
    assert engine.ask("ping") < 10 * SCALE
    assert leases(broker) == before
    assert engine.ask("acquire", slot=2, path=checkpoint)["how"] == "resident"


# --- what happens while there is no server ------------------------------------------------------


@pytest.fixture
def without_server(broker: RunningBroker) -> Iterator[Callable[[], None]]:
    """Called, it ends the server; the next one starts only after it is called again."""
    is_down = False

    def toggle() -> None:
        nonlocal is_down
        if is_down:
            os.kill(broker.pid, signal.SIGCONT)
        else:
            os.kill(broker.pid, signal.SIGSTOP)
            os.kill(server_of(broker), signal.SIGKILL)
        is_down = not is_down

    yield toggle
    if is_down:
        toggle()


def test_death_and_release_while_there_is_no_server(
    broker: RunningBroker,
    start_engines: StartEngines,
    without_server: Callable[[], None],
    checkpoint: str,
) -> None:
    """An engine that dies meanwhile loses its lease at once, and what is released is released."""
    dying, releasing, staying = start_engines(broker, 3)
    for engine in (dying, releasing, staying):
        engine.ask("acquire", slot=1, path=checkpoint)
    without_server()
    dying.kill()
    releasing.ask("release", slot=1)
    assert kernel.mapped(releasing.pid) == {}
    without_server()
    eventually(
        lambda: {session for _set, session, _lease in leases(broker)} == {staying.session},
        10,
        "the end of two leases",
    )
    assert [weights["tag"] for weights in staying.ask("check").values()] == ["the weights"]
    assert releasing.ask("acquire", slot=2, path=checkpoint)["how"] == "resident"


def test_last_lease_ends_while_there_is_no_server(
    broker: RunningBroker,
    start_engines: StartEngines,
    without_server: Callable[[], None],
    checkpoint: str,
) -> None:
    """A set that was evicted while leased is freed by the next server if its engine has died."""
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    engine.ask("evict", which="1")
    assert broker.slabs() == 1
    without_server()
    engine.kill()
    without_server()
    eventually(lambda: ask_status(broker.directory)["sets"] == [], 10, "the end of the set")
    eventually(lambda: broker.slabs() == 0, AT_ONCE_SECONDS, "the end of the slab")


def test_withdrawal_while_there_is_no_server(
    broker: RunningBroker,
    without_server: Callable[[], None],
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that gave a request up and could not say so leaves no lease at the next server."""
    monkeypatch.setattr("engine_client.client.CANCEL_SECONDS", 0.1)
    with broker.client() as client:
        client.acquire(Checkpoint(checkpoint)).release()
        (entry,) = ask_status(broker.directory)["sets"]
        demand = wire.Demand(entry["key"]["device"], checkpoint=entry["key"]["checkpoint"])
        client._session.call("acquire", wire.Acquire("given up", demand), wire.Granted)
        eventually(lambda: len(leases(broker)) == 1, 5, "the release")
        without_server()
        client._withdraw("given up")
        without_server()
        eventually(lambda: leases(broker) == set(), 10, "the end of the lease")


# --- requests under way -------------------------------------------------------------------------


def test_load_starts_again(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str
) -> None:
    """Engines that waited for a load get their weights; the old loader is gone, though stopped."""
    broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
    engines = start_engines(broker, 2)
    for engine in engines:
        engine.tell("acquire", slot=1, path=checkpoint)
    loader = broker.stopped_loader()
    eventually(lambda: broker.waiting() == 2, 10, "two waiting requests")
    broker.order_loaders(None)
    kill_it(broker)
    outcomes = [outcome_of(engine) for engine in engines]
    assert [outcome.value["tag"] for outcome in outcomes] == ["the weights"] * 2
    assert sorted(outcome.value["how"] for outcome in outcomes) == ["loaded", "shared"]
    wait_until_gone(loader, AT_ONCE_SECONDS)
    eventually(lambda: broker.loaders() == [], 5, "the end of the second loader")
    assert broker.slabs() == 1


def test_publisher_is_told_to_publish_again(
    broker: RunningBroker, start_engines: StartEngines
) -> None:
    """A claim ends with its server: a clear error, nothing is left, the next publish works."""
    (engine,) = start_engines(broker, 1)
    engine.tell("publish", slot=1, name="made", tag="made", nbytes=1 << 16, pause="stop")
    eventually(lambda: stopped(engine.pid), 10, "the publisher's stop")
    assert broker.slabs() == 1
    replace_server(broker)
    engine.signal(signal.SIGCONT)
    outcome = outcome_of(engine)
    assert outcome.kind == "StaleEpoch"
    assert "the broker's server was replaced" in outcome.sentence
    assert "publish again" in outcome.sentence
    assert ask_status(broker.directory)["sets"] == []
    eventually(lambda: broker.slabs() == 0, AT_ONCE_SECONDS, "the end of the slab")
    again = engine.ask("publish", slot=1, name="made", tag="made", nbytes=1 << 16)
    assert (again["tag"], again["generation"]) == ("made", "1")


def test_get_or_publish_asks_again_by_itself(
    broker: RunningBroker, start_engines: StartEngines
) -> None:
    """One engine built and one waited: both have the same weights in the end, and there is one
    set."""
    builder, waiter = start_engines(broker, 2)
    builder.tell("get_or_publish", slot=1, name="built", tag="first", nbytes=1 << 16, pause="stop")
    eventually(lambda: stopped(builder.pid), 10, "the builder's stop")
    waiter.tell("get_or_publish", slot=1, name="built", tag="second", nbytes=1 << 16)
    eventually(lambda: broker.waiting() == 1, 10, "the waiting engine")
    kill_it(broker)
    theirs = outcome_of(waiter)
    assert theirs.value["tag"] == "second"
    builder.signal(signal.SIGCONT)
    ours = outcome_of(builder)
    assert (ours.kind, ours.value["set"]) == ("ok", theirs.value["set"])
    assert ours.value["tag"] == "second"
    assert broker.slabs() == 1


# --- what a successor knows ---------------------------------------------------------------------


def books(broker: RunningBroker) -> list[dict[str, Any]]:
    """All sets, without what only the server knows that was there at the time."""
    sets: list[dict[str, Any]] = ask_status(broker.directory)["sets"]
    for entry in sets:
        for key in ("progress", "begun", "used"):
            del entry[key]
        for lease in entry["leases"]:
            del lease["since"]
    return sets


def ages(broker: RunningBroker) -> tuple[float, float]:
    """When the broker started, and when the server that answers did."""
    facts = ask_status(broker.directory)["broker"]
    return facts["started"], facts["server_started"]


def test_books_survive(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str, tmp_path: Path
) -> None:
    """Generations with their labels, draining and pinned sets, whose files they are; and since when
    there is a broker, whichever server answers."""
    (engine,) = start_engines(broker, 1)
    other = str(write_checkpoint(tmp_path / "other", "others", 1 << 16))
    for number, label in enumerate([None, "second", None], start=1):
        tag = f"line {number}"
        engine.ask("publish", slot=number, name="line", tag=tag, nbytes=4096, generation=label)
    engine.ask("acquire", slot=8, path=checkpoint)
    engine.ask("acquire", slot=9, path=other, name="named")
    engine.ask("release", slot=8)
    engine.ask("release", slot=3)
    engine.ask("pin", which="named")
    eventually(lambda: len(leases(broker)) == 3, 5, "the releases")
    before = books(broker)
    assert sorted(entry["state"] for entry in before) == ["draining"] * 2 + ["sealed"] * 3
    device = ask_status(broker.directory)["devices"]
    age = ages(broker)

    for number in (signal.SIGKILL, signal.SIGHUP):
        replace_server(broker, number)
        assert books(broker) == before
        assert ages(broker)[0] == age[0]
        assert ages(broker)[1] > age[1]
        assert ask_status(broker.directory)["devices"] == device
        assert engine.ask("acquire", slot=8, path=checkpoint)["how"] == "resident"
        engine.ask("release", slot=8)
        assert engine.ask("acquire_name", slot=7, name="line")["tag"] == "line 3"
        engine.ask("release", slot=7)
        eventually(lambda: len(leases(broker)) == 3, 5, "the releases")

    engine.ask("release", slot=1)
    eventually(lambda: broker.slabs() == 4, 5, "the end of the oldest generation")
    newest = engine.ask("publish", slot=4, name="line", tag="line 4", nbytes=4096)
    assert newest["generation"] == "3"


def test_watch_survives(broker: RunningBroker) -> None:
    """An engine that watches a name hears of its next generation from the next server."""
    with broker.client() as watcher, broker.client() as publisher:
        with watcher.watch("line") as watch:
            replace_server(broker)
            claim = publisher._session.call(
                "claim",
                wire.Claim("c", publisher._own_key("line"), fresh=True),
                wire.Claimed,
            )
            assert claim.claim == "c"
            publish_nothing(publisher, claim.claim)
            event = watch.next(10 * SCALE)
        assert isinstance(event, NewGeneration)
        assert (event.name, event.generation) == ("line", "1")


def publish_nothing(client: Any, claim: str) -> None:
    """Seal a set without tensors."""
    from broker.weights import Manifest
    from engine_client.claim import HeldClaim

    held = HeldClaim(client._session, claim)
    with held.reserve(Manifest(nbytes=1, groups=[]), "uint8"):
        pass
    held.seal()


def test_upgrade_under_load(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str
) -> None:
    """`upgrade` three times while engines acquire and release: no request fails, nothing is loaded
    again."""
    engines = start_engines(broker, 3)
    for engine in engines:
        engine.ask("acquire", slot=0, path=checkpoint)
        engine.tell("acquire_and_release", path=checkpoint, seconds=2.0)
    with broker.observer() as observer:
        pids = [observer.status()["broker"]["pid"]]
        for _ in range(3):
            observer.upgrade(10 * SCALE)
            pids.append(observer.status()["broker"]["pid"])
    assert len(set(pids)) == 4
    for engine in engines:
        outcome = outcome_of(engine)
        assert outcome.kind == "ok", outcome
        assert outcome.value > 0
    eventually(lambda: len(leases(broker)) == 3, 5, "the last releases")
    assert ask_status(broker.directory)["counters"].get("loads_started", 0) == 0


def test_upgrade_that_was_not_answered(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies before it answers `upgrade` is replaced, and its successor is not."""
    with broker.observer() as observer, ThreadPoolExecutor(1) as pool:
        session, server = observer._session, server_of(broker)
        call = session.call

        def kill_it_once_asked() -> None:
            entered = session._channel._entered
            eventually(lambda: any(asked.is_sent for asked in entered()), 5, "the request")
            os.kill(server, signal.SIGKILL)

        def ask(operation: str, *given: Any, **options: Any) -> Any:
            if operation == "upgrade":
                os.kill(server, signal.SIGSTOP)
                pool.submit(kill_it_once_asked)
            return call(operation, *given, **options)

        monkeypatch.setattr(session, "call", ask)
        observer.upgrade(10 * SCALE)
        monkeypatch.undo()
        observer.upgrade(10 * SCALE)
        assert observer.status()["broker"]["restarts"] == 2


# --- the keeper itself --------------------------------------------------------------------------


def test_keeper_killed(
    start_broker: Callable[..., RunningBroker], start_engines: StartEngines, checkpoint: str
) -> None:
    """Engines hear of it within a second and keep their weights; server and old sockets are no
    obstacle to a new broker, which starts empty."""
    broker = start_broker()
    server = server_of(broker)
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    killed = time.time()
    broker.kill()
    lost = eventually(lambda: engine.ask("lost_at"), AT_ONCE_SECONDS, "the engine's callback")
    assert lost - killed < AT_ONCE_SECONDS * SCALE
    assert [weights["tag"] for weights in engine.ask("check").values()] == ["the weights"]
    wait_until_gone(server)
    successor = start_broker()
    assert ask_status(successor.directory)["sets"] == []
    engine.ask("release", slot=1)
    engine.ask("connect")
    assert engine.ask("acquire", slot=2, path=checkpoint)["how"] == "loaded"


def test_keeper_stopped(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str
) -> None:
    """While the keeper does not run, engines are served as ever; afterwards it knows all."""
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        for slot in range(2, 20):
            engine.ask("acquire", slot=slot, path=checkpoint)
        for slot in range(2, 10):
            engine.ask("release", slot=slot)
        assert engine.ask("ping") < BACK_SECONDS * SCALE
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    eventually(lambda: len(leases(broker)) == 11, 5, "the releases")
    before = leases(broker)
    replace_server(broker)
    assert leases(broker) == before


def test_removed_sockets_come_back(
    broker: RunningBroker, start_engines: StartEngines, checkpoint: str
) -> None:
    """Whoever tidies up the directory keeps nobody out for long, and disturbs no engine."""
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    for name in ("default.zmq", "default.session", "default.lock"):
        (broker.directory / name).unlink()
    with pytest.raises(BrokerNotFound):
        broker.client()
    engine.ask("ping")

    def connects() -> bool:
        try:
            broker.client().close()
        except BrokerNotFound:
            return False
        return True

    eventually(connects, 5, "the sockets' return")
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "broker",
            "serve",
            "--device",
            "simulated",
            "--dir",
            str(broker.directory),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30 * SCALE,
        check=False,
    )
    assert second.returncode == 7, second.stderr
    assert str(broker.pid) in second.stderr
    assert engine.ask("acquire", slot=2, path=checkpoint)["how"] == "resident"
    assert engine.ask("lost_at") is None


def test_server_that_cannot_start_for_a_while(
    start_broker: Callable[..., RunningBroker], start_engines: StartEngines, checkpoint: str
) -> None:
    """A keeper without descriptors tries again, later and later, and says so; then all is well."""
    broker = start_broker("--limit", "restart_seconds=1")
    (engine,) = start_engines(broker, 1)
    engine.ask("acquire", slot=1, path=checkpoint)
    before = leases(broker)
    # The keeper reads records in its own time, and one that comes without room is lost.
    eventually(lambda: kernel.slabs(broker.pid), 5, "the keeper's copy of the weights")
    soft, hard = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (kernel.descriptors(broker.pid), hard))
    kill_it(broker)
    eventually(lambda: "deaths_in_a_row=4" in broker.log.read_text(), 10, "several tries")
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: server_of(broker), 5, "another server")
    assert leases(broker) == before, broker.log.read_text()
    log = broker.log.read_text()
    assert "server-not-started" in log
    delays = [float(delay) for delay in re.findall(r"next_start_in=([0-9.]+)", log)]
    assert delays == sorted(delays)
    assert delays[0] == 0


# --- keepers of fake servers --------------------------------------------------------------------


@pytest.fixture
def keep(broker_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a keeper whose servers run a script (tests/support/fake_keeper.py)."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, longest_delay: float = 0.0) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.fake_keeper",
                    str(broker_dir),
                    str(longest_delay),
                    script,
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        for pid in [*kernel.children(process.pid), process.pid]:
            if process.poll() is None:
                os.kill(pid, signal.SIGKILL)  # servers too: they hold the pipes
        process.communicate()


def nothing_is_left(directory: Path) -> bool:
    return not [*directory.glob("*.zmq"), *directory.glob("*.session")]


def test_server_that_never_comes_up(
    broker_dir: Path, keep: Callable[..., subprocess.Popen[str]]
) -> None:
    """The keeper ends with the first server's code and words, and leaves nothing."""
    keeper = keep("import sys; print('no such device', file=sys.stderr); sys.exit(3)")
    _out, said = keeper.communicate(timeout=20 * SCALE)
    assert keeper.returncode == 3
    assert said == "no such device\n"
    assert nothing_is_left(broker_dir)


def test_crash_loop_backs_off(broker_dir: Path, keep: Callable[..., subprocess.Popen[str]]) -> None:
    """Each death makes the next pause twice as long, up to the limit; the log counts them."""
    script = f"{READY}\nsys.exit(0 if restarts == 6 else 9)"
    keeper = keep(script, longest_delay=0.15)
    _out, said = keeper.communicate(timeout=30 * SCALE)
    assert keeper.returncode == 0
    deaths = re.findall(r"server-died exit=9 .*deaths_in_a_row=(\d+) next_start_in=([0-9.]+)", said)
    assert [int(count) for count, _delay in deaths] == [1, 2, 3, 4, 5, 6]
    assert [float(delay) for _count, delay in deaths] == [0.0, 0.05, 0.1, 0.15, 0.15, 0.15]
    assert nothing_is_left(broker_dir)


def test_stop_while_backing_off(
    broker_dir: Path, keep: Callable[..., subprocess.Popen[str]]
) -> None:
    """SIGTERM ends a keeper at once, also while it waits before it starts another server."""
    keeper = keep(f"{READY}\nsys.exit(9)", longest_delay=1000.0)
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    assert keeper.stdout.readline() == "the fake server is ready\n"
    while "next_start_in=3.2" not in keeper.stderr.readline():
        pass
    keeper.terminate()
    assert keeper.wait(AT_ONCE_SECONDS * SCALE) == 0
    assert nothing_is_left(broker_dir)


def test_orphans_are_reaped(keep: Callable[..., subprocess.Popen[str]]) -> None:
    """As the first process of a container a keeper leaves no zombie of what servers have started,
    and keeps the server."""
    script = f"""{READY}
import os, signal
if os.fork() == 0:
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        os.read(0, 1)
    os._exit(0)
signal.pause()
"""
    keeper = keep(script)
    assert keeper.stdout is not None
    said = [keeper.stdout.readline() for _ in range(2)]
    (orphan,) = [int(line) for line in said if line.strip().isdecimal()]
    eventually(lambda: kernel.state(orphan) == "", 5, "the orphan's end")
    (server,) = [pid for pid in kernel.children(keeper.pid) if is_alive(pid)]
    keeper.terminate()
    assert keeper.wait(10 * SCALE) == 1  # a fake server has no orderly end
    assert not is_alive(server)


def test_server_killed_before_it_is_up(
    broker_dir: Path, keep: Callable[..., subprocess.Popen[str]]
) -> None:
    """A first server that a signal ends leaves no words of its own: the keeper says so."""
    keeper = keep("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    _out, said = keeper.communicate(timeout=20 * SCALE)
    assert keeper.returncode == 1
    assert 'server-died exit=-9 cause="it never came up"' in said
    assert nothing_is_left(broker_dir)


def test_stop_between_two_servers(keep: Callable[..., subprocess.Popen[str]]) -> None:
    """A server that hands over while it is told to stop gets no successor; that is no failure."""
    script = f"{READY}\nimport os, signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    script += "os.write(1, b'waits\\n')\nsignal.pause()"
    keeper = keep(script)
    assert keeper.stdout is not None
    assert {keeper.stdout.readline() for _ in range(2)} == {"the fake server is ready\n", "waits\n"}
    keeper.terminate()
    assert keeper.wait(10 * SCALE) == 0


LOSES_A_RECORD = r"""
import os, resource
if restarts == 0:
    keeper = os.getppid()
    limits = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{keeper}/fd"))
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (used, limits[1]))
    socket.send_fds(link, [b"keep session 1\nlost"], [0])
    link.send(b"keep lease 1/a\ntold before the end was seen")
    assert link.recv(65536) == b"end - -\n", "nothing was kept yet"
    assert link.recv(65536) == b"", "the end of the link"
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, limits)
    link.send(b"keep lease 1/b\ntold after it")
    sys.exit(1)
while (item := link.recv(65536)) != b"end - -\n":
    os.write(1, item.split(b"\n")[0] + b"\n")
link.send(b"ready - -\nagain")
sys.exit(0)
"""
"""A server whose keeper has no descriptor left for a record; its successor prints what it gets."""


def test_keeper_that_loses_a_record(keep: Callable[..., subprocess.Popen[str]]) -> None:
    """What the server has told before it ends is kept, but the one record that had no room."""
    keeper = keep(READY + LOSES_A_RECORD)
    out, said = keeper.communicate(timeout=20 * SCALE)
    assert keeper.returncode == 0, said
    kept = [line for line in out.splitlines() if line.startswith("item")]
    assert kept == ["item lease 1/a", "item lease 1/b"]
    assert said.count("keeper-link-failed") == 1


def test_stop_while_the_server_starts(
    broker_dir: Path, keep: Callable[..., subprocess.Popen[str]]
) -> None:
    """A keeper told to stop before its first server can take signals ends with 0."""
    keeper = keep("import os, signal\nos.write(1, b'starting\\n')\nsignal.pause()")
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "starting\n"
    keeper.terminate()
    assert keeper.wait(AT_ONCE_SECONDS * SCALE) == 0
    assert nothing_is_left(broker_dir)


def test_server_that_does_not_stop(
    broker_dir: Path, keep: Callable[..., subprocess.Popen[str]]
) -> None:
    """A server that hangs when it is told to stop is killed, and the keeper's exit code is 1."""
    script = f"{READY}\nimport os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += "os.write(1, b'deaf\\n')\nsignal.pause()"
    keeper = keep(script)
    assert keeper.stdout is not None
    said = {keeper.stdout.readline() for _ in range(2)}
    assert said == {"the fake server is ready\n", "deaf\n"}
    (server,) = kernel.children(keeper.pid)
    keeper.terminate()
    assert keeper.wait(10 * SCALE) == 1
    assert not is_alive(server)
    assert nothing_is_left(broker_dir)
