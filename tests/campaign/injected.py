"""The faults: each is put into a world, and taken out of it again if it lasts.

A fault names what it excuses: errors that an engine may then be told. Everything else is lost.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker.errors import BadRequest
from broker.rundir import find_brokers
from tests.campaign import kernel
from tests.campaign.engines import Engine
from tests.campaign.world import LINES, SIZES, Lost, World
from tests.support.processes import LoaderFault

REPLACED = frozenset({"StaleEpoch"})
"""A publisher's claim ends with the server it was given by."""
LOAD = frozenset({"LoadFailed"})
ENDED = frozenset({"BrokerLost", "ShuttingDown"})
ANY_CONNECTION = frozenset(
    {"BadRequest", "BrokerNotFound", "BrokerLost", "RequestTimeout", "NoSession"}
)
STOPPED_SECONDS = 0.15
NOFILE = resource.RLIMIT_NOFILE


@dataclass
class Fault:
    """A kind of harm.

    Attributes:
        inject: puts it into the world; false if there was nothing to do it to.
        heal: takes it out again, a moment later.
        excuses: classes of errors that engines may get because of it; connecting, all that are in
            `ANY_CONNECTION`.
        settle: what has to be done once everybody has an answer.
        weight: how often it comes, compared with others.
    """

    name: str
    inject: Callable[[World], bool]
    heal: Callable[[World], None] | None = None
    excuses: frozenset[str] = frozenset()
    settle: Callable[[World], None] | None = None
    weight: int = 10


def _signal(pid: int, number: signal.Signals) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


# --- the server and the keeper ------------------------------------------------------------------


def kill_server(world: World) -> bool:
    return _signal(world.server(), signal.SIGKILL)


def abort_server(world: World) -> bool:
    """As libzmq does."""
    return _signal(world.server(), signal.SIGABRT)


def kill_server_twice(world: World) -> bool:
    first = world.server()
    if not _signal(first, signal.SIGKILL):
        return False
    if kernel.state(world.keeper) == "T":
        return True
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        second = world.server()
        if second not in (0, first):
            time.sleep(world.rng.uniform(0, 0.4))
            return _signal(second, signal.SIGKILL)
        time.sleep(0.002)
    raise Lost("the keeper has started no second server in 10 s")


def hand_over(world: World) -> bool:
    """What `weight-broker upgrade` does."""
    return _signal(world.server(), signal.SIGHUP)


def stop_server(world: World) -> bool:
    world.stopped.append(world.server())
    return _signal(world.stopped[-1], signal.SIGSTOP)


def let_server_go(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    while world.stopped:
        _signal(world.stopped.pop(), signal.SIGCONT)


def stop_keeper(world: World) -> bool:
    return _signal(world.keeper, signal.SIGSTOP)


def stop_keeper_kill_server(world: World) -> bool:
    _signal(world.keeper, signal.SIGSTOP)
    _signal(world.server(), signal.SIGKILL)  # there may be none just now
    return True


def let_keeper_go(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    _signal(world.keeper, signal.SIGCONT)


def kill_keeper(world: World) -> bool:
    world.broker.kill()
    world.broker.wait()
    return True


def new_broker(world: World) -> None:
    """Engines keep what they have mapped, and find the next broker."""
    living = [engine for engine in world.engines if engine.is_alive]
    for engine in living:
        for weights in engine.ask("check").values():
            if sum(kernel.mapped(engine.pid).values()) < weights["nbytes"]:
                raise Lost(f"engine {engine.pid} lost its mapping with its broker")
    world.start_broker()
    world.relay.cut()
    world.relay.refresh()
    for engine in living:
        for slot in list(engine.ask("check")):
            engine.ask("release", slot=slot)
        engine.session = 0  # it connects again


# --- engines and loaders ------------------------------------------------------------------------


def _one_engine(world: World, *, busy: bool) -> Engine | None:
    chosen = [engine for engine in world.engines if engine.is_alive and bool(engine.asked) is busy]
    return world.rng.choice(chosen) if chosen else None


def kill_idle_engine(world: World) -> bool:
    engine = _one_engine(world, busy=False)
    if engine is not None:
        engine.kill()
    return engine is not None


def kill_forked_engine(world: World) -> bool:
    """Its child holds its end of the session, which therefore sees no end-of-file."""
    engine = _one_engine(world, busy=False)
    if engine is None or not world.server():
        return False
    world.children.append(engine.ask("fork_unseen"))
    engine.kill()
    return True


def kill_busy_engine(world: World) -> bool:
    engine = _one_engine(world, busy=True)
    if engine is not None:
        engine.kill()
    return engine is not None


def stop_engine(world: World) -> bool:
    engine = _one_engine(world, busy=True)
    if engine is not None:
        engine.signal(signal.SIGSTOP)
    return engine is not None


def let_engines_go(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    for engine in world.engines:
        if engine.is_alive:
            engine.signal(signal.SIGCONT)


def _loader(world: World, seconds: float = 0.1) -> int:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        for pid in kernel.children(world.server()):
            if "broker.loader" in kernel.command_line(pid) and kernel.state(pid) not in ("Z", ""):
                return pid
        time.sleep(0.002)
    return 0


def kill_loader(world: World) -> bool:
    pid = _loader(world)
    time.sleep(world.rng.uniform(0, 0.3))
    return _signal(pid, signal.SIGKILL)


def stop_loader(world: World) -> bool:
    pid = _loader(world)
    time.sleep(world.rng.uniform(0, 0.3))
    return _signal(pid, signal.SIGSTOP)


def let_loaders_go(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    for pid in kernel.children(world.server()):
        _signal(pid, signal.SIGCONT)


def publisher_dies(world: World) -> bool:
    return _publish(world, "die")


def publisher_stops(world: World) -> bool:
    return _publish(world, "stop")


def _publish(world: World, pause: str) -> bool:
    """An engine publishes, and is struck when it has the memory and has written nothing."""
    engine = _one_engine(world, busy=False)
    if engine is None or not engine.session:
        return False
    name = world.rng.choice(LINES)
    tag = world.new_tag(name)
    world.published[name].add(tag)
    engine.tell("publish", slot=world.new_slot(), name=name, tag=tag, nbytes=SIZES[0], pause=pause)
    return True


def order_loaders(fault: LoaderFault) -> Callable[[World], bool]:
    def inject(world: World) -> bool:
        world.loader_order.write_text(fault.value)
        return True

    return inject


def order_nothing(world: World) -> None:
    world.loader_order.unlink(missing_ok=True)


# --- the directory ------------------------------------------------------------------------------


def remove_sockets(world: World) -> bool:
    """As one who tidies up; whoever connects now finds nobody."""
    removed = world.rng.sample(["default.zmq", "default.session", "default.lock"], 2)
    for name in removed:
        (world.directory / name).unlink(missing_ok=True)
    return True


def remove_sockets_kill_server(world: World) -> bool:
    remove_sockets(world)
    return kill_server(world)


def sockets_are_back(world: World) -> None:
    names = ("default.zmq", "default.session", "default.lock")
    world.wait_until(
        lambda: all((world.directory / name).exists() for name in names), "the sockets' return"
    )
    world.relay.refresh()


def open_directory(world: World) -> bool:
    mode = world.rng.choice([0o755, 0o770, 0o500, 0o000])
    world.directory.chmod(mode)
    if mode & 0o077:
        try:
            find_brokers(directory=world.directory)
        except BadRequest:
            return True
        raise Lost(f"a client accepts a directory of mode {mode:o}")
    return True


def close_directory(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    world.directory.chmod(0o700)


# --- memory and descriptors ---------------------------------------------------------------------


def _limit_server(world: World, which: int, soft: int) -> bool:
    server = world.server()
    if not server:
        return False
    try:
        _soft, hard = resource.prlimit(server, which)
        resource.prlimit(server, which, (soft, hard))
    except ProcessLookupError:
        return False
    return True


def refuse_memory(world: World) -> bool:
    """No file may grow: memory for a slab is refused, and so is the log."""
    return _limit_server(world, resource.RLIMIT_FSIZE, 4096)


def refuse_descriptors(world: World) -> bool:
    return _limit_server(world, NOFILE, kernel.descriptors(world.server()) + world.rng.randrange(8))


def lift_limits(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    server = world.server()
    if server:
        with contextlib.suppress(ProcessLookupError):
            for which in (resource.RLIMIT_FSIZE, NOFILE):
                _soft, hard = resource.prlimit(server, which)
                resource.prlimit(server, which, (hard, hard))


# --- the conversation ---------------------------------------------------------------------------


def delay_requests(world: World) -> bool:
    world.relay.delay = 0.02
    return True


def repeat_requests(world: World) -> bool:
    world.relay.repeat = 0.5
    return True


def relay_again(world: World) -> None:
    time.sleep(world.rng.uniform(0, STOPPED_SECONDS))
    world.relay.delay = world.relay.repeat = 0.0


def cut_conversations(world: World) -> bool:
    return bool(world.relay.cut())


def half_a_message(world: World) -> bool:
    """A peer that greets, begins a request and is gone."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    whole = greeting + b"\x04" + bytes([len(ready)]) + ready + b"\x01\x07acquire\x00\x20half"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(str(world.directory / "default.zmq"))
            peer.sendall(whole[: world.rng.randrange(1, len(whole))])
        except OSError:
            return False
    return True


def noise(world: World) -> bool:
    """Peers that speak neither protocol, on both sockets."""
    data = world.rng.randbytes(world.rng.randrange(1, 5000))
    for name, kind in (("zmq", socket.SOCK_STREAM), ("session", socket.SOCK_SEQPACKET)):
        with socket.socket(socket.AF_UNIX, kind) as peer:
            try:
                peer.connect(str(world.directory / f"default.{name}"))
                peer.sendall(data)
            except OSError:
                return False
    return True


def rewrite_checkpoints(world: World) -> bool:
    """While they may be being read."""
    for path in list(world.tags):
        world.rewrite(path)
    return True


FAULTS = [
    Fault("server killed", kill_server, excuses=REPLACED, weight=30),
    Fault("server aborted", abort_server, excuses=REPLACED),
    Fault("server killed twice", kill_server_twice, excuses=REPLACED, weight=5),
    Fault("server replaced (upgrade)", hand_over, excuses=REPLACED, weight=15),
    Fault("server stopped", stop_server, let_server_go),
    Fault("keeper stopped", stop_keeper, let_keeper_go),
    Fault(
        "keeper stopped, server killed", stop_keeper_kill_server, let_keeper_go, REPLACED, weight=5
    ),
    Fault("keeper killed", kill_keeper, None, ENDED, new_broker, weight=3),
    Fault("engine killed, idle", kill_idle_engine, weight=20),
    Fault("engine killed, its child is not", kill_forked_engine, weight=5),
    Fault("engine killed, busy", kill_busy_engine, excuses=LOAD, weight=30),
    Fault("engine stopped", stop_engine, let_engines_go, weight=20),
    Fault("publisher dies with its claim", publisher_dies, excuses=LOAD, weight=15),
    Fault("publisher stopped with its claim", publisher_stops, let_engines_go),
    Fault("loader killed", kill_loader, excuses=LOAD, weight=20),
    Fault("loader stopped", stop_loader, let_loaders_go),
    Fault(
        "loader dies while writing",
        order_loaders(LoaderFault.DIES_WHILE_WRITING),
        excuses=LOAD,
        settle=order_nothing,
    ),
    Fault(
        "memory refused to a loader",
        order_loaders(LoaderFault.FINDS_THE_DEVICE_FULL),
        settle=order_nothing,
    ),
    Fault(
        "memory refused to the server",
        refuse_memory,
        lift_limits,
        LOAD | {"InternalError"},
        weight=8,
    ),
    Fault(
        "descriptors refused to the server",
        refuse_descriptors,
        lift_limits,
        LOAD | REPLACED | {"InternalError"},
        weight=8,
    ),
    Fault("sockets removed", remove_sockets, None, REPLACED, sockets_are_back, weight=2),
    Fault(
        "sockets removed, server killed",
        remove_sockets_kill_server,
        None,
        REPLACED,
        sockets_are_back,
        weight=4,
    ),
    Fault("directory's mode changed", open_directory, close_directory),
    Fault("requests delayed", delay_requests, relay_again),
    Fault("requests repeated", repeat_requests, relay_again),
    Fault("conversations cut", cut_conversations, weight=20),
    Fault("half a message", half_a_message),
    Fault("noise on both sockets", noise),
    Fault("checkpoints rewritten", rewrite_checkpoints, excuses=LOAD),
]
