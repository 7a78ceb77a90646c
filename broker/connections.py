"""The ROUTER's connections: whose they are, and which of them never finish a request.

libzmq keeps the frames of a request until its last one has come, outside every high-water mark, so
a peer that streams frames without end would fill our memory. What gives it away: data keeps
arriving on its connection, no request ever comes out of it, and meanwhile our memory grows. The
socket monitor tells each connection's descriptor; a copy of it in an epoll set of our own, edge-
triggered, tells that data has arrived, also what libzmq has read already; requests that came out
name their connection. See docs/decisions/0004-endless-requests.md.

All methods belong to the loop's thread. Here, in doorman.py and in conversation.py is all
that touches zmq.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import mmap
import os
import select
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from broker.credentials import Access, Credentials, peer_credentials
from broker.doorman import Doorman
from broker.limits import Limits, descriptor_limit
from broker.logs import log_event
from broker.loop import HUNG_UP, READ, Loop

WINDOW_SECONDS = 0.01
"""How soon after something arrived it is looked at, and how often while something is unfinished."""
REST_SECONDS = 0.04
"""After a look that found everything finished: looking costs processor time."""
PATIENCE_SECONDS = 0.04
"""An honest request, 256 KiB at most, takes a fraction of a millisecond to arrive."""
UNREAD_SECONDS = 1.0
"""What was sent so long ago and has left its queue was read."""
DOUBT_SECONDS = 1.0
"""So long after an event that may have been either is memory watched for what it was."""
DOUBT_FACTOR = 4
"""So much more memory before a peer is cut off that may only have read, as honest ones do."""
CONNECTION_BYTES = 64 << 10
"""What a connection and its session cost themselves, at most."""
STRIKE_SECONDS = 60.0
BAN_SECONDS = 10.0
"""A process that is cut off twice within `STRIKE_SECONDS` may not connect for so long."""
BANNED = "its process was cut off twice"
SPARE_DESCRIPTORS = 64
"""Kept free for all that is not a connection."""

_EVENT = struct.Struct("=Hi")
"""Of a monitor's first frame: event and value (zmq_socket_monitor(3))."""
MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED


class Doubt(msgspec.Struct, frozen=True):
    """An event that was data arriving, read by libzmq before we looked, or the peer reading.

    Attributes:
        since: when it was seen.
        resident, settled: our memory, and how many connections had their memory, when we had looked
            before.
    """

    since: float
    resident: int
    settled: int


class Connection(msgspec.Struct, eq=False):
    """One accepted connection.

    Attributes:
        number: the descriptor by which libzmq knows it.
        copy: a descriptor of our own of the same socket.
        routing: the routing id of its requests, once one has come.
        requests: how many have come out of it.
        surplus: frames above the limit that they had.
        unfinished_since: when data arrived that is no whole request yet; None: there is none.
        doubt: since the last whole request.
    """

    number: int
    copy: socket.socket
    peer: Credentials
    routing: bytes = b""
    requests: int = 0
    surplus: int = 0
    unfinished_since: float | None = None
    doubt: Doubt | None = None
    seen: int = 0
    told_at: float | None = msgspec.field(default_factory=time.monotonic)
    """When something was sent to it (at first libzmq's greeting) that it may not have read yet:
    that it reads looks as if it had sent something."""

    @property
    def address(self) -> str:
        """As libzmq's authentication calls the peer."""
        return f"{self.peer.uid}:{self.peer.gid}:{self.peer.pid}"


class Connections:
    """All connections of a ROUTER whose monitor this is.

    Args:
        on_cut: called with a connection that was just cut off, and why.
    """

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        path: Path,
        access: Access,
        limits: Limits,
        counters: Counter[str],
        on_cut: Callable[[Connection, str], None],
    ) -> None:
        self._loop = loop
        self._router = router
        self._path = str(path)
        self._access = access
        self._limits = limits
        self._counters = counters
        self._on_cut = on_cut
        self._doorman = Doorman(context, router, loop, self._admit)
        self._monitor = router.get_monitor_socket(MONITORED)
        self._by_number: dict[int, Connection] = {}
        self._by_copy: dict[int, Connection] = {}
        self._by_routing: dict[bytes, Connection] = {}
        self._addresses: Counter[str] = Counter()
        self._unfinished: set[Connection] = set()
        self._in_doubt: set[Connection] = set()
        self._strikes: dict[int, tuple[float, float]] = {}
        self._arrivals = select.epoll()
        self._memory = Memory()
        self._usual = self._looked = self._memory.resident()
        self._usual_settled = 0
        self._accepts = 0
        self._silent = 0
        """Of the connections, those that have made no request: they are not all there yet."""
        loop.add(self._monitor_number(), READ, lambda _events: self._listen())
        self._wait_for_arrivals()
        # Its descriptor is edge-triggered, and something may have come before we looked at it.
        loop.call_soon_threadsafe(self._listen)

    def _monitor_number(self) -> int:
        return int(self._monitor.getsockopt(zmq.FD))

    def __len__(self) -> int:
        return len(self._by_copy)

    def close(self) -> None:
        """Let go of every copy; libzmq closes its own."""
        self._loop.remove(self._arrivals.fileno())
        self._loop.remove(self._monitor_number())
        self._doorman.close()
        self._router.disable_monitor()
        self._monitor.close()
        for connection in list(self._by_copy.values()):
            self._forget(connection)
        self._arrivals.close()
        self._memory.close()

    # --- what the conversation says -------------------------------------------------------

    def introduce(self, routing: bytes, number: int) -> Connection | None:
        """The first request with this routing id comes from the connection of this number. None:
        that one is gone already."""
        self._listen()
        connection = self._by_number.get(number)
        if connection is not None:
            self._by_routing.pop(connection.routing, None)
            self._silent -= not connection.routing
            connection.routing = routing
            self._by_routing[routing] = connection
        return connection

    def of(self, routing: bytes) -> Connection | None:
        """The connection behind a routing id, if it is still there."""
        return self._by_routing.get(routing)

    def finished(self, connection: Connection) -> None:
        """A whole request has come."""
        connection.requests += 1
        if connection.unfinished_since is not None:
            connection.unfinished_since = None
            self._unfinished.discard(connection)
        if connection.doubt is not None:
            self._clear(connection)

    # --- coming and going -----------------------------------------------------------------

    def _listen(self) -> None:
        """Read what the monitor has; its descriptor is edge-triggered, so everything."""
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            # zmq.utils.monitor has a function for it, but imports all of asyncio.
            event, value = _EVENT.unpack(frames[0])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._by_number.get(value)
                if gone is not None:
                    self._forget(gone)
            else:
                self._note_failed(os.strerror(value))

    def _note_failed(self, cause: str) -> None:
        self._counters["connections_failed"] += 1
        log_event("connection-failed", level=logging.WARNING, cause=cause)

    def _accepted(self, number: int) -> None:
        try:
            copy = socket.socket(fileno=os.dup(number))
        except OSError:
            return  # gone again already, or no descriptor is left for a copy
        if copy.family != socket.AF_UNIX or copy.getsockname() != self._path:
            copy.close()  # gone again, and its number is another's by now
            return
        stale = self._by_number.get(number)
        if stale is not None:
            self._forget(stale)
        try:
            connection = Connection(number, copy, peer_credentials(copy))
            # Data that was read already is no EPOLLIN any more, but its arrival is an event, and
            # with EPOLLOUT in the mask it is reported.
            self._arrivals.register(copy, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        except OSError as error:  # no room for another one in the kernel
            self._note_failed(str(error))
            with contextlib.suppress(OSError):  # the peer has closed it meanwhile
                copy.shutdown(socket.SHUT_RDWR)
            copy.close()
            return
        self._by_number[number] = self._by_copy[copy.fileno()] = connection
        self._addresses[connection.address] += 1
        self._accepts += 1
        self._silent += 1
        refusal = self._refusal(connection)
        if refusal:
            self._refuse(connection, refusal)

    def _admit(self, peer: str) -> bool:
        """May what has just connected as `uid:gid:pid` go on?

        Which connection it is cannot be told, so this is about the process; what is wrong with the
        connection has had it cut off when it was accepted.
        """
        self._listen()
        if not self._is_banned(int(peer.rpartition(":")[2])):
            return self._addresses[peer] > 0
        for connection in list(self._by_copy.values()):
            if connection.address == peer and not connection.routing:
                self._refuse(connection, BANNED)  # accepted before its process was cut off
        return False

    def _refuse(self, connection: Connection, cause: str) -> None:
        self._counters["connections_refused"] += 1
        self._end(connection, "connection-refused", cause)

    def _refusal(self, connection: Connection) -> str:
        """Why the connection cannot stay; "" if it can."""
        peer = connection.peer
        if not self._access.admits(peer):
            return f"it is a process of another user: this broker serves {self._access}"
        if len(self._by_copy) > self._limits.connections:
            return f"there are too many {self._limits.reached('connections')}"
        if peer.pid and self._addresses[connection.address] > self._limits.process_connections:
            return f"its process has too many {self._limits.reached('process_connections')}"
        most = descriptor_limit()
        if max(connection.number, connection.copy.fileno()) > most - SPARE_DESCRIPTORS:
            return f"there are no descriptors left of {most} (RLIMIT_NOFILE)"
        return BANNED if self._is_banned(peer.pid) else ""

    def _is_banned(self, pid: int) -> bool:
        _struck, banned_until = self._strikes.get(pid, (0.0, 0.0))
        return time.monotonic() < banned_until

    def cut(self, connection: Connection, cause: str) -> None:
        """End the connection. Its process may make another, for a while not if this repeats."""
        if self._by_copy.get(connection.copy.fileno()) is not connection:
            return
        self._counters["connections_cut"] += 1
        self._strike(connection.peer.pid)
        self._end(connection, "connection-cut", cause)
        self._on_cut(connection, cause)

    def _end(self, connection: Connection, event: str, cause: str) -> None:
        peer = connection.peer
        log_event(event, level=logging.WARNING, pid=peer.pid, uid=peer.uid, cause=cause)
        with contextlib.suppress(OSError):  # the peer has closed it meanwhile: that ends it too
            connection.copy.shutdown(socket.SHUT_RDWR)
        self._forget(connection)

    def _strike(self, pid: int) -> None:
        if not pid:
            return  # outside our PID namespace: all such processes would be struck
        now = time.monotonic()
        struck, _banned = self._strikes.get(pid, (float("-inf"), 0.0))
        banned_until = now + BAN_SECONDS if now - struck < STRIKE_SECONDS else 0.0
        for other in [p for p, (at, _until) in self._strikes.items() if now - at > STRIKE_SECONDS]:
            del self._strikes[other]
        self._strikes[pid] = (now, banned_until)

    def _forget(self, connection: Connection) -> None:
        number = connection.copy.fileno()
        self._arrivals.unregister(number)
        connection.copy.close()
        del self._by_copy[number]
        self._silent -= not connection.routing
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]
        if self._by_number.get(connection.number) is connection:
            del self._by_number[connection.number]
        if self._by_routing.get(connection.routing) is connection:
            del self._by_routing[connection.routing]
        self._unfinished.discard(connection)
        self._clear(connection)

    # --- what never ends ------------------------------------------------------------------

    def _look_later(self) -> None:
        """Something arrives: look at all of it in a moment, and never more often than that."""
        self._loop.remove(self._arrivals.fileno())
        self._looked = self._memory.resident()
        self._loop.call_later(WINDOW_SECONDS, self._look)

    def _look(self) -> None:
        if self._arrivals.closed:
            return
        for number, events in self._arrivals.poll(0):
            connection = self._by_copy.get(number)
            if connection is None:
                continue
            if events & HUNG_UP:
                self._forget(connection)
            else:
                self._note(connection, events)
        self._judge()
        if self._unfinished:
            self._loop.call_later(WINDOW_SECONDS, self._look)
        elif self._in_doubt:
            self._loop.call_later(REST_SECONDS, self._look)
        else:
            self._loop.call_later(REST_SECONDS, self._wait_for_arrivals)

    def _wait_for_arrivals(self) -> None:
        if not self._arrivals.closed:
            self._loop.add(self._arrivals.fileno(), READ, lambda _events: self._look_later())

    def _note(self, connection: Connection, events: int) -> None:
        """Something has happened on a connection since we looked last."""
        if connection.requests != connection.seen:
            connection.seen = connection.requests  # if this was not all, more will follow
            return
        if not events & READ and connection.told_at is not None:
            self._note_reading(connection)
            return
        if connection.unfinished_since is None:
            connection.unfinished_since = time.monotonic()
            self._unfinished.add(connection)

    def _note_reading(self, connection: Connection) -> None:
        """It has perhaps only read what we sent, which is an event too."""
        queued = array.array("i", [0])
        fcntl.ioctl(connection.copy, termios.TIOCOUTQ, queued)
        now = time.monotonic()
        long_ago = now - (connection.told_at or 0.0) > UNREAD_SECONDS
        if long_ago and not queued[0]:
            connection.told_at = None
        if connection.doubt is None:
            connection.doubt = Doubt(now, self._looked, self._settled)
            self._in_doubt.add(connection)

    def _clear(self, connection: Connection) -> None:
        connection.doubt = None
        self._in_doubt.discard(connection)

    def _judge(self) -> None:
        """Cut off whose requests do not end while they cost too much memory together."""
        self._looked = self._memory.resident()
        self._listen()  # connections in that memory may not have been heard of yet
        self._judge_doubts()
        if not self._unfinished:
            self._usual, self._usual_settled = self._looked, self._settled
            return
        grown = self._looked - self._usual - self._own_cost(self._usual_settled)
        if grown <= self._limits.stream_bytes:
            return
        before = time.monotonic() - PATIENCE_SECONDS
        for connection in list(self._unfinished):
            if connection.unfinished_since is not None and connection.unfinished_since <= before:
                self._cut_unfinished(connection, grown)

    def _judge_doubts(self) -> None:
        """Whether memory says that it was data; an honest peer is in doubt each time it reads."""
        now = time.monotonic()
        others = self._unfinished or any(not each.requests for each in self._in_doubt)
        for connection in list(self._in_doubt):
            doubt = connection.doubt
            if doubt is None or now - doubt.since < PATIENCE_SECONDS:
                continue
            if connection.requests and others:
                self._clear(connection)  # there is somebody more likely
                continue
            grown = self._looked - doubt.resident - self._own_cost(doubt.settled)
            factor = DOUBT_FACTOR if connection.requests else 1
            if grown > factor * self._limits.stream_bytes:
                self._cut_unfinished(connection, grown)
            elif now - doubt.since > DOUBT_SECONDS:
                self._clear(connection)

    @property
    def _settled(self) -> int:
        """How many connections there were whose memory is in what we look at."""
        return self._accepts - self._silent

    def _own_cost(self, settled: int) -> int:
        """Bytes that connections may have cost themselves since so many were settled."""
        return (self._accepts - settled) * CONNECTION_BYTES

    def _cut_unfinished(self, connection: Connection, grown: int) -> None:
        self.cut(
            connection,
            f"its request did not end, {grown} bytes of memory went into such requests "
            f"{self._limits.reached('stream_bytes')}",
        )


class Memory:
    """Our own resident memory (proc(5), statm)."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def resident(self) -> int:
        """Bytes."""
        return int(os.pread(self._file, 256, 0).split()[1]) * mmap.PAGESIZE

    def close(self) -> None:
        os.close(self._file)
