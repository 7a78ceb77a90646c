"""Peers that nobody thought of cost themselves something, never the server or another engine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.listeners import SO_PASSRIGHTS
from broker.packets import MOST_SENT
from engine_client import Checkpoint
from tests.processes.conftest import brokers
from tests.support.clock import SCALE, eventually
from tests.support.processes import LOADER_FAULTS, RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint
from tests.support.streams import connect_raw

StartBroker = Callable[..., RunningBroker]

PEERS = 300
_PR_SET_NAME = 15  # linux/prctl.h


def connect(directory: Path) -> socket.socket:
    """A session's socket, with nothing said or read."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(directory / "default.session"))
    return connection


# --- names --------------------------------------------------------------------------------------


@contextmanager
def process_called(name: bytes) -> Iterator[None]:
    """This process has another name meanwhile (prctl(2); of its main thread, as `ps` shows it)."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes().strip()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, before, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"gr\xc3\xb6\xc3\x9fere-gr\xc3\xb6\xc3", "größere-grö\N{REPLACEMENT CHARACTER}"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"a\x1b[2J\nb", r"a\x1b[2J\nb"),
    ],
    ids=["cut", "no text", "control characters"],
)
def test_process_name(broker: RunningBroker, name: bytes, shown: str) -> None:
    """A name of any bytes is shown as printable text, by this server and by its successor."""
    with process_called(name), RawSession(broker.directory) as session:
        (entry,) = broker.status()["sessions"]
        assert entry["command"] == shown
        os.kill(broker.server_pid(), signal.SIGKILL)
        assert isinstance(session.receive(), wire.Welcome)
        (entry,) = broker.status()["sessions"]
        assert entry["command"] == shown
    assert broker.status()["broker"]["restarts"] == 1


# --- mistakes of ours ---------------------------------------------------------------------------

FAULT = """
import os, socket
getsockopt = socket.socket.getsockopt
def faulty(self, level, option, *size):
    if option == 77 and os.path.exists({order!r}):  # SO_PEERPIDFD, asked of every session
        raise RuntimeError("a mistake")
    return getsockopt(self, level, option, *size)
socket.socket.getsockopt = faulty
"""


@pytest.fixture
def order(tmp_path: Path) -> Path:
    """While this file is there, a broker with this PYTHONPATH fails to identify its peers."""
    order = tmp_path / "order"
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(order=str(order)))
    return order


@pytest.fixture
def mistaken(broker_dir: Path, order: Path) -> Iterator[RunningBroker]:
    path = os.pathsep.join([str(order.parent), str(LOADER_FAULTS)])
    with brokers(broker_dir, loaders_may_raise=True) as start:  # its log may have a traceback
        yield start(environ={"PYTHONPATH": path})


def test_mistake_while_accepting(mistaken: RunningBroker, order: Path) -> None:
    """An exception that nobody foresaw costs the peer its connection, and is logged whole."""
    order.touch()
    with connect(mistaken.directory) as refused:
        assert refused.recv(1) == b""
    order.unlink()
    with RawSession(mistaken.directory):
        status = mistaken.status()
        assert len(status["sessions"]) == 1
    assert status["broker"]["restarts"] == 0
    assert status["counters"]["internal_errors"] == 1
    assert "RuntimeError: a mistake" in mistaken.log.read_text()


def test_mistake_while_taking_over(mistaken: RunningBroker, order: Path) -> None:
    """The same of a successor, for which the peer is still there: no server after server dies."""
    with RawSession(mistaken.directory) as lost:
        server = mistaken.server_pid()
        order.touch()
        os.kill(server, signal.SIGKILL)
        assert lost.receive() is None
        order.unlink()
    eventually(lambda: mistaken.status()["sessions"] == [], 2, "the end of that session")
    with RawSession(mistaken.directory) as session, RawDealer(mistaken.directory) as dealer:
        assert session.hello(dealer)[0] == b"ok"
    assert mistaken.status()["broker"]["restarts"] == 1
    assert "RuntimeError: a mistake" in mistaken.log.read_text()


# --- peers that go at once ----------------------------------------------------------------------


def test_refused_peers_that_do_not_wait(start_broker: StartBroker) -> None:
    """Who closes its connection before it can be told that it gets no session misses that only."""
    broker = start_broker("--limit", "process_sessions=1")
    with RawSession(broker.directory):
        for _ in range(PEERS):
            connect(broker.directory).close()
        eventually(lambda: broker.counter("sessions_refused") == PEERS, 5, "every refusal")
        status = broker.status()
    assert status["broker"]["restarts"] == 0
    assert status["counters"].get("internal_errors", 0) == 0


# --- descriptors that are slow to close ---------------------------------------------------------

LINGER_SECONDS = 30
BACK_SECONDS = 4
"""A keeper that is not kept waiting has another server by then."""
DELIVER = wire.encode(wire.Deliver(b"1", "source"))


@pytest.fixture
def lingering() -> Iterator[socket.socket]:
    """A TCP socket whose last close waits that long for somebody who does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _address = listener.accept()
        linger = struct.pack("ii", 1, LINGER_SECONDS)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        sender.setblocking(False)
        with sender, receiver:
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 16))
            yield sender


def send(
    session: socket.socket, packet: bytes, lingering: socket.socket, *, before: int = 0
) -> None:
    """Send the only descriptor of it, behind so many others."""
    socket.send_fds(session, [packet], [0] * before + [lingering.fileno()])
    lingering.close()


def unasked(session: socket.socket, lingering: socket.socket) -> None:
    send(session, wire.encode(wire.Attach("nothing")), lingering)


def too_many(session: socket.socket, lingering: socket.socket) -> None:
    send(session, DELIVER, lingering, before=MOST_SENT - 1)


def never_asked_for(session: socket.socket, lingering: socket.socket) -> None:
    send(session, DELIVER, lingering)
    session.close()


def twice(session: socket.socket, lingering: socket.socket) -> None:
    send(session, DELIVER, lingering)
    socket.send_fds(session, [DELIVER], [0])


def behind_the_end(session: socket.socket, lingering: socket.socket) -> None:
    session.send(b"")  # passes for the end
    send(session, DELIVER, lingering)


@pytest.mark.parametrize("odd", [unasked, too_many, never_asked_for, twice, behind_the_end])
def test_descriptor_that_lingers(
    broker: RunningBroker,
    lingering: socket.socket,
    odd: Callable[[socket.socket, socket.socket], None],
) -> None:
    """However it comes, to close it keeps nobody waiting, the keeper neither, and it is closed."""
    before = broker.open_descriptors()
    with connect(broker.directory) as session, stopped(broker.server_pid()):
        odd(session, lingering)
    eventually(lambda: broker.status()["sessions"] == [], 2, "the end of the session")
    with RawDealer(broker.directory) as dealer:
        assert dealer.ping_seconds() < 1 * SCALE
    eventually(lambda: broker.open_descriptors() <= before, 2, "closed descriptors")
    os.kill(broker.server_pid(), signal.SIGKILL)
    with RawDealer(broker.directory) as dealer:
        assert dealer.ping_seconds() < BACK_SECONDS * SCALE


def test_descriptor_of_a_refused_peer(start_broker: StartBroker, lingering: socket.socket) -> None:
    """The same for what was sent before anybody could say that there is no session."""
    broker = start_broker("--limit", "process_sessions=1")
    with (
        RawSession(broker.directory),
        stopped(broker.server_pid()),
        connect(broker.directory) as refused,
    ):
        send(refused, DELIVER, lingering)
    eventually(lambda: broker.counter("sessions_refused") == 1, 2, "the refusal")
    with RawDealer(broker.directory) as dealer:
        assert dealer.ping_seconds() < 1 * SCALE


def test_descriptor_for_libzmq(broker: RunningBroker, lingering: socket.socket) -> None:
    """A conversation takes none, so that libzmq's thread closes none."""
    with connect_raw(broker.directory) as connection, RawDealer(broker.directory) as dealer:
        try:
            connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            pytest.skip("the kernel cannot refuse descriptors: Linux 6.16 can")
        with pytest.raises(PermissionError):
            send(connection, b"x", lingering)
        assert dealer.ping_seconds() < 1 * SCALE


def test_source_that_lingers(
    broker: RunningBroker, lingering: socket.socket, tmp_path: Path
) -> None:
    """A request's own descriptor too, if it is no folder; for what is resident nobody looks."""
    checkpoint = small_checkpoint(tmp_path / "c")
    with open_checkpoint(checkpoint) as opened:
        acquire = wire.Acquire("1", wire.Demand(device="SIM-0"), describe_source(opened))
    with (
        broker.client() as client,
        client.acquire(Checkpoint(checkpoint)),
        RawSession(broker.directory) as session,
        RawDealer(broker.directory) as dealer,
    ):
        session.hello(dealer)
        send(session.socket, DELIVER, lingering)
        assert dealer.ask(b"1", b"acquire", wire.encode(acquire))[1] == b"ok"
        assert dealer.ping_seconds() < 1 * SCALE


# --- descriptors that are on their way ----------------------------------------------------------

FILES = 512
"""That a broker may have open, and that may be on their way before it can send no more."""
LIMITED = ("prlimit", f"--nofile={FILES}:{FILES}")
UNPRIVILEGED = ("setpriv", "--bounding-set", "-sys_resource,-sys_admin")
"""Root is not limited."""
WATCHED_SECONDS = 0.4
"""That the use of the processor is looked at."""


@pytest.fixture
def limited(start_broker: StartBroker) -> RunningBroker:
    within = (*UNPRIVILEGED, *LIMITED) if os.geteuid() == 0 else LIMITED
    if not all(map(shutil.which, ("setpriv", "prlimit"))):
        pytest.skip("no setpriv, no prlimit (util-linux)")
    return start_broker(within=within)


@contextmanager
def crowd() -> Iterator[None]:
    """This user has more descriptors on their way than that meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for _ in range(FILES // MOST_SENT + 1):
            try:
                socket.send_fds(theirs, [b"x"], [0] * MOST_SENT)
            except OSError as error:
                pytest.skip(f"cannot have so many on their way: {error}")
        yield


def test_too_many_descriptors_on_their_way(limited: RunningBroker, tmp_path: Path) -> None:
    """That descriptors cannot be sent for a while ends no session and keeps no processor busy."""
    checkpoint = Checkpoint(small_checkpoint(tmp_path / "c"), "named")
    with limited.client() as client, ThreadPoolExecutor(1) as pool:
        first = client.acquire(checkpoint)
        with crowd():
            again = pool.submit(client.acquire, "named")
            granted = limited.counter
            eventually(lambda: granted("leases_granted") == 2, 2, "the second lease")
            keeper, server = (processor_seconds(pid) for pid in limited.processes())
            began = time.monotonic()
            with RawDealer(limited.directory) as dealer, connect(limited.directory):
                eventually(lambda: time.monotonic() > began + WATCHED_SECONDS, 5, "some time")
                assert dealer.ping_seconds() < 1 * SCALE
            assert processor_seconds(limited.pid) - keeper < WATCHED_SECONDS / 8
            assert processor_seconds(limited.server_pid()) - server < WATCHED_SECONDS / 8
            assert not again.done()
        assert again.result(5 * SCALE).set_id == first.set_id
        assert client.is_connected


def test_server_that_dies_meanwhile(limited: RunningBroker) -> None:
    """Its successor gets the sessions as soon as they can be sent; the keeper waits in peace."""
    with limited.client() as client:
        with crowd():
            os.kill(limited.server_pid(), signal.SIGKILL)
            eventually(lambda: "server-died" in limited.log.read_text(), 5, "the server's end")
            before, began = processor_seconds(limited.pid), time.monotonic()
            eventually(lambda: time.monotonic() > began + WATCHED_SECONDS, 5, "some time")
            assert processor_seconds(limited.pid) - before < WATCHED_SECONDS / 8
        assert client.ping().pid == limited.server_pid()


def processor_seconds(pid: int) -> float:
    """That the process has used so far (proc(5), stat: utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does not run meanwhile: all of it is there when it does again."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
