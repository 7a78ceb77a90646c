"""The ROUTER: receiving whole requests, sending replies that never block and are never lost.

Only this module, connections.py and doorman.py touch zmq. One thread owns the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from broker.connections import Connection, Connections
from broker.credentials import Access
from broker.limits import Limits
from broker.logs import log_event
from broker.loop import Loop

_NOW = int(zmq.DONTWAIT)
_NOW_AND_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
"""Plain numbers: to combine pyzmq's own flags costs as much as to send a frame."""
RECEIVE_HIGH_WATER = 16
"""Requests of one connection that libzmq reads ahead; the rest waits in its socket."""
SEND_HIGH_WATER = 256
"""A peer that does not run for a minute is due 240 progress messages. Its own side takes some
hundred as well."""
RETRY_SECONDS = 0.02
SKIP_BATCH = 2000
"""Frames above the limit that are thrown away in one turn: some milliseconds."""
CUT_FRAMES = 16_384
"""More frames above the limit, in all of a connection's requests, are no mistake: it is cut off."""


class _Unsent(msgspec.Struct):
    """Final replies for a peer that is busy, oldest first."""

    replies: deque[list[bytes]] = msgspec.field(default_factory=deque)
    nbytes: int = 0
    since: float = msgspec.field(default_factory=time.monotonic)

    def append(self, frames: list[bytes]) -> None:
        self.replies.append(frames)
        self.nbytes += sum(map(len, frames))

    def pop_first(self) -> None:
        self.nbytes -= sum(map(len, self.replies.popleft()))


def _make_routing_ids_unpredictable() -> None:
    """libzmq counts them up from what rand() says, which nobody has seeded: always the same number.

    A peer that takes the next one for itself ends this process (an assertion in libzmq).
    """
    import ctypes  # takes a while, and is needed once

    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


class Conversation:
    """A bound ROUTER.

    Args:
        listener: a listening Unix stream socket at `path`; handed over (ZMQ_USE_FD), so that libzmq
            neither creates nor unlinks files.
        access: who may connect.
        on_lost: called from the loop, in a moment, with a routing id whose connection was cut off,
            and why. Nothing can be sent to it any more.

    Attributes:
        counters: requests, replies, drops, largest messages in bytes.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        path: Path,
        access: Access,
        limits: Limits,
        on_lost: Callable[[bytes, str], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._loop = loop
        self._limits = limits
        self._on_lost = on_lost
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8)
        _make_routing_ids_unpredictable()
        self._router = self._context.socket(zmq.ROUTER)
        # As of the class that pyzmq's own extends by arguments which nobody here gives: what they
        # cost is as much as the rest of a call.
        self._recv = super(zmq.Socket, self._router).recv
        self._send = super(zmq.Socket, self._router).send
        self._get = super(zmq.Socket, self._router).get
        self._router.set(zmq.LINGER, 200)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        self._router.set(zmq.SNDHWM, SEND_HIGH_WATER)
        # Above the limit, so that an honest mistake is answered with a sentence. libzmq drops the
        # connection of a larger frame.
        self._router.set(zmq.MAXMSGSIZE, 2 * limits.frame_bytes)
        self.connections = Connections(
            loop,
            self._context,
            self._router,
            path,
            access,
            limits,
            self.counters,
            self._on_cut,
        )
        self._router.set(zmq.USE_FD, listener.detach())
        self._router.bind(f"ipc://{path}")
        self._unsent: dict[bytes, _Unsent] = {}
        self._skipping: bytes | None = None
        self._is_settled = False
        """There is no request, and the descriptor will tell of the next one."""

    def fileno(self) -> int:
        """ZeroMQ's own descriptor, for `on_readable`: edge-triggered, and whatever is done with the
        socket, sending too, takes an edge away. Wait for it only when `has_request` has said no."""
        descriptor = self._router.getsockopt(zmq.FD)
        return int(descriptor)

    def on_readable(self, _events: int) -> None:
        """A request may have come."""
        self._is_settled = False

    @property
    def has_request(self) -> bool:
        """Whether `receive` has to be called again. To ask costs a third of receiving nothing."""
        if self._skipping is not None:
            return True
        if not self._is_settled:
            self._is_settled = not int(self._get(_EVENTS)) & _POLLIN
        return not self._is_settled

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next request as (routing id, frames), or None if there is none.

        A request with more frames than allowed comes back cut one frame past the limit; the rest is
        dropped without being kept, a part of it at every call; until then there is no other.
        """
        if self._is_settled or (self._skipping is not None and self._skip()):
            return None
        try:
            frame = self._recv(_NOW, False)
        except zmq.Again:
            self._is_settled = True
            return None
        routing = frame.bytes
        frames: list[bytes] = []
        connection = self.connections.of(routing)
        if connection is None and frame.more:
            frame = self._recv(_NOW, False)
            with contextlib.suppress(zmq.ZMQError):  # its connection is gone already
                connection = self.connections.introduce(routing, int(frame.get(zmq.SRCFD)))
            frames.append(frame.bytes)
        while frame.more:  # the frame's own word costs less than the socket's RCVMORE
            if len(frames) > self._limits.frames:
                self._skipping = routing
                break
            frame = self._recv(_NOW, False)
            frames.append(frame.bytes)
        else:
            if connection is not None:
                self.connections.finished(connection)
        counters, nbytes = self.counters, sum(map(len, frames))
        counters["requests"] += 1
        if nbytes > counters["largest_request_bytes"]:
            counters["largest_request_bytes"] = nbytes
        return routing, frames

    def _skip(self) -> bool:
        """Drop frames of the request that has too many; true if some may remain."""
        routing = self._skipping or b""
        connection = self.connections.of(routing)
        for _ in range(SKIP_BATCH):
            if not self._router.recv(zmq.DONTWAIT, copy=False).more:
                self._skipping = None
                if connection is not None:
                    self.connections.finished(connection)
                return False
            if connection is not None:
                connection.surplus += 1
        if connection is not None and connection.surplus > CUT_FRAMES:
            self.cut(routing, f"its requests had over {CUT_FRAMES} frames more than they may have")
        return True

    def reply(self, routing: bytes, frames: list[bytes]) -> None:
        """Send a final reply now, or keep it for a peer that is busy."""
        if routing not in self._unsent and self._try_send(routing, frames):
            return
        unsent = self._unsent.setdefault(routing, _Unsent())
        unsent.append(frames)
        for kept, limit in ((len(unsent.replies), "replies"), (unsent.nbytes, "reply_bytes")):
            if kept > getattr(self._limits, limit):
                self.counters["conversations_dropped"] += 1
                self.cut(routing, f"it does not read its replies {self._limits.reached(limit)}")
                return

    def tell(self, routing: bytes, frames: list[bytes]) -> None:
        """Send progress or an event if the peer has room for it, else drop it."""
        if routing in self._unsent or not self._try_send(routing, frames):
            self.counters["notices_dropped"] += 1
            connection = self.connections.of(routing)
            pid = None if connection is None else connection.peer.pid
            log_event("notice-dropped", pid=pid, cause="the peer does not read")

    def retry(self) -> bool:
        """Try the kept replies again; true while some remain (call again after RETRY_SECONDS)."""
        for routing, unsent in list(self._unsent.items()):
            while unsent.replies and self._try_send(routing, unsent.replies[0]):
                unsent.pop_first()
            if not unsent.replies:
                self._unsent.pop(routing, None)
        return bool(self._unsent)

    def cut(self, routing: bytes, cause: str) -> None:
        """End the connection behind a routing id; `on_lost` follows."""
        connection = self.connections.of(routing)
        if connection is not None:
            self.connections.cut(connection, cause)
        else:
            self.forget(routing)

    def _on_cut(self, connection: Connection, cause: str) -> None:
        self.forget(connection.routing)
        if connection.routing:
            # Not now: a request of this very peer may just be handled, or a turn's answers be sent.
            lost = partial(self._on_lost, connection.routing, cause)
            self._loop.call_soon_threadsafe(lost)

    def forget(self, routing: bytes) -> None:
        """Drop what is kept for this peer."""
        unsent = self._unsent.pop(routing, None)
        if unsent is not None:
            self.counters["replies_dropped"] += len(unsent.replies)
            log_event("replies-dropped", level=logging.WARNING, replies=len(unsent.replies))

    def lag(self, routing: bytes) -> float:
        """Seconds since a reply could first not be sent to this peer; 0: it reads them all."""
        unsent = self._unsent.get(routing)
        return 0.0 if unsent is None else time.monotonic() - unsent.since

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def close(self) -> None:
        self.connections.close()
        self._router.close()
        self._context.term()

    def _try_send(self, routing: bytes, frames: list[bytes]) -> bool:
        """False if the peer's queue is full. Everything is bytes already: nothing raises midway."""
        self._is_settled = False
        try:
            send = self._send
            send(routing, _NOW_AND_MORE)
            for frame in frames[:-1]:
                send(frame, _NOW_AND_MORE)
            send(frames[-1], _NOW)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["replies_to_the_gone"] += 1
            log_event("reply-to-the-gone", status=frames[-2].decode())
            return True
        connection = self.connections.of(routing)
        if connection is not None:
            connection.told_at = time.monotonic()
        counters, nbytes = self.counters, sum(map(len, frames))
        counters["replies"] += 1
        if nbytes > counters["largest_reply_bytes"]:
            counters["largest_reply_bytes"] = nbytes
        return True
