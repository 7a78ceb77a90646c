"""What the kernel says of the process at the other end of a session; packets that have to wait."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from typing_extensions import Buffer

from broker import wire
from broker.errors import Busy
from broker.limits import DEFAULTS
from broker.loop import Loop
from broker.packets import receive_packet
from broker.sessions import (
    MAX_PASSED,
    MAX_UNSENT_AHEAD,
    PAUSE_SECONDS,
    SO_PEERPIDFD,
    Passed,
    PeerIdentity,
    SessionPeer,
    identify,
)
from tests.support.clock import SCALE
from tests.support.processes import descriptors
from tests.support.raw import close_descriptors


class PeerOnKernel(socket.socket):
    """A connection on a kernel that answers the question for a pidfd with this error."""

    def __init__(self, error: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._error = error

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> bytes:  # type: ignore[override]
        if option == SO_PEERPIDFD:
            raise OSError(self._error, os.strerror(self._error))
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())


@pytest.mark.parametrize(
    ("error", "has_ended"),
    [(errno.ENOPROTOOPT, False), (errno.EINVAL, True), (errno.ESRCH, True), (errno.EMFILE, False)],
)
def test_process_without_pidfd(error: int, has_ended: bool) -> None:
    """A kernel without such pidfds says nothing; one that has none of this peer, that it ended."""
    with PeerOnKernel(error) as connection:
        identity = identify(connection)
    assert (identity.pidfd, identity.has_ended) == (None, has_ended)
    assert (identity.pid, identity.uid) == (os.getpid(), os.getuid())


# --- descriptors that cannot be sent yet --------------------------------------------------------

CANNOT_SECONDS = 0.3
ATTACH = wire.encode(wire.Attach("1"))


class CrowdedSocket(socket.socket):
    """A connection of a user who has too many descriptors on their way until some moment."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(fileno=connected.detach())
        self.crowded_until = 0.0
        self.refused = 0

    def sendmsg(  # type: ignore[override]
        self, buffers: Iterable[Buffer], ancillary: Iterable[tuple[int, int, bytes]] = ()
    ) -> int:
        if ancillary and time.monotonic() < self.crowded_until:
            self.refused += 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return super().sendmsg(buffers, ancillary)


class Session:
    """A session whose broker answers every attach with a descriptor, and its engine's socket."""

    def __init__(self, passed: Passed) -> None:
        ours, self.engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.engine.setblocking(False)
        self.socket = CrowdedSocket(ours)
        self.loop = Loop()
        self.counts: list[int] = []
        """Of the descriptors with each packet that the engine has read."""
        self.ends: list[str] = []
        self.delivered_by_process = 0
        self.peer = SessionPeer(
            self.loop,
            1,
            self.socket,
            PeerIdentity(1, 0, "engine", None),
            DEFAULTS,
            passed,
            lambda peer, attach: peer.deliver(attach, wire.Attached(attach.lease, 1, "e"), [0]),
            lambda _peer, how: self.ends.append(how),
            lambda _peer, _error: None,
            _fail,
            lambda _pid: self.delivered_by_process,
        )

    def turn_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Turn the loop until then, or fail."""
        limit = time.monotonic() + seconds * SCALE

        def look() -> None:
            if condition() or time.monotonic() > limit:
                self.loop.stop()
            else:
                self.loop.call_later(0.001, look)

        self.loop.call_later(0, look)
        self.loop.run(lambda: False)
        assert condition(), self.ends

    def read(self) -> int:
        """Have the engine read what is there; how many packets it has read by now."""
        with contextlib.suppress(BlockingIOError):
            while True:
                _packet, descriptors, _cut = receive_packet(self.engine, 1024)
                close_descriptors(descriptors)
                self.counts.append(len(descriptors))
        return len(self.counts)

    def close(self) -> None:
        self.peer.close()
        self.engine.close()
        self.loop.close()


def _fail(error: Exception, _session: int) -> None:
    raise error


@pytest.fixture
def passed() -> Passed:
    return Passed()


@pytest.fixture
def session(passed: Passed) -> Iterator[Session]:
    session = Session(passed)
    yield session
    session.close()


def test_too_many_descriptors_on_their_way(session: Session) -> None:
    """That they cannot be sent now is not the peer's end: they are sent later, in order, and
    meanwhile the loop does not turn in circles."""
    session.socket.crowded_until = time.monotonic() + CANNOT_SECONDS
    for _ in range(3):
        session.engine.send(ATTACH)
    session.turn_until(lambda: session.read() == 3)
    assert 2 < session.socket.refused < 20
    session.engine.send(ATTACH)  # and it is read again
    session.turn_until(lambda: session.read() == 4)
    assert session.counts == [1] * 4
    assert session.ends == []


def test_answers_that_wait_keep_no_descriptors(session: Session) -> None:
    """However many there are: what is sent with them is looked up again when they may go."""
    before = descriptors(os.getpid())
    session.socket.crowded_until = time.monotonic() + CANNOT_SECONDS
    for _ in range(MAX_UNSENT_AHEAD):
        session.engine.send(ATTACH)
    with pytest.raises(Busy, match="is not read while answers wait"):
        session.peer.take(b"another", "source")
    assert descriptors(os.getpid()) == before
    session.turn_until(lambda: session.read() == MAX_UNSENT_AHEAD)
    assert session.counts == [1] * MAX_UNSENT_AHEAD


def test_one_process_in_many_sessions(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """While many descriptors are open a process gets no more than a session's share of them."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))]

    def deliver(request: bytes) -> None:
        session.engine.sendmsg([wire.encode(wire.Deliver(request, "source"))], rights)

    session.delivered_by_process = DEFAULTS.descriptors
    deliver(b"1")
    os.close(session.peer.take(b"1", "source"))
    monkeypatch.setattr("broker.sessions.descriptor_limit", lambda: 2)
    deliver(b"2")
    with pytest.raises(Busy, match=r"^256 descriptors of process 1 wait for their requests alread"):
        session.peer.take(b"2", "source")


def test_descriptors_that_are_not_read_yet(session: Session, passed: Passed) -> None:
    """Threads of an engine may ask for many at once: as long as there is room for all, none waits;
    and when they have been read, it is known."""
    attaches = 5 * MAX_PASSED
    for _ in range(attaches):
        session.engine.send(ATTACH)
    turns = itertools.count()
    session.turn_until(lambda: next(turns) > 2 * attaches)
    assert passed.packets == attaches
    assert session.read() == attaches
    session.engine.send(ATTACH)
    session.turn_until(lambda: session.read() == attaches + 1)
    assert passed.packets == 1
    assert session.ends == []


def test_a_request_whose_descriptor_is_not_read(session: Session, passed: Passed) -> None:
    """It is refused while answers wait; what comes for it later is closed, and takes no room."""
    passed.packets = passed.most
    for _ in range(MAX_UNSENT_AHEAD + 3):
        session.engine.send(ATTACH)
    socket.send_fds(session.engine, [wire.encode(wire.Deliver(b"late", "source"))], [0])
    with pytest.raises(Busy, match="is not read while answers wait"):
        session.peer.take(b"late", "source")
    session.turn_until(lambda: session.read() == MAX_UNSENT_AHEAD + 3)
    socket.send_fds(session.engine, [wire.encode(wire.Deliver(b"next", "source"))], [0])
    close_descriptors([session.peer.take(b"next", "source")])
    assert not session.peer._delivered
    assert not session.peer._late


def test_descriptors_that_many_do_not_read(session: Session, passed: Passed) -> None:
    """Where all sessions together leave too many unread, each may leave one."""
    passed.packets = passed.most
    for _ in range(2 * MAX_PASSED):
        session.engine.send(ATTACH)
    turns = itertools.count()
    session.turn_until(lambda: next(turns) > 4 * MAX_PASSED)
    assert session.read() == 1
    session.turn_until(lambda: session.read() == 2 * MAX_PASSED)
    session.peer.close()
    assert passed.packets == passed.most  # the others': what this one had is forgotten


def test_end_of_a_peer_whose_descriptors_wait(session: Session) -> None:
    """It is seen though nothing can be sent to it."""
    session.socket.crowded_until = time.monotonic() + 3600
    session.engine.send(ATTACH)
    session.turn_until(lambda: session.socket.refused > 1)
    session.engine.close()
    session.turn_until(lambda: bool(session.ends))


def test_a_session_that_ends_while_descriptors_wait(session: Session) -> None:
    """When they would be tried again, it is over."""
    session.socket.crowded_until = time.monotonic() + 3600
    session.engine.send(ATTACH)
    session.turn_until(lambda: session.socket.refused > 0)
    session.peer.close()
    over = time.monotonic() + 10 * PAUSE_SECONDS
    session.turn_until(lambda: time.monotonic() > over)


def test_requests_meanwhile(session: Session) -> None:
    """A request's own descriptor is found behind a few attaches whose answers wait; behind many it
    is `Busy`, which is no mistake of the engine's."""
    session.socket.crowded_until = time.monotonic() + 3600
    for _ in range(3):
        session.engine.send(ATTACH)
    socket.send_fds(session.engine, [wire.encode(wire.Deliver(b"1", "source"))], [0])
    close_descriptors([session.peer.take(b"1", "source")])
    for _ in range(100):
        session.engine.send(ATTACH)
    socket.send_fds(session.engine, [wire.encode(wire.Deliver(b"2", "source"))], [0])
    with pytest.raises(Busy, match="the source's descriptor is not read while answers wait"):
        session.peer.take(b"2", "source")
    assert session.ends == []
