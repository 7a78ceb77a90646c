"""The ROUTER: receiving whole requests, sending replies that never block and are never lost.

Only this module and server.py touch zmq. One thread owns the socket.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from pathlib import Path

import zmq

from broker import wire

RECEIVE_HIGH_WATER = 1000
SEND_HIGH_WATER = 1000
MAX_TRANSPORT_FRAME_BYTES = 1 << 20
"""libzmq drops a connection that sends a larger frame. Above wire.MAX_FRAME_BYTES, so that an
honest mistake is answered with a sentence."""
MAX_UNSENT_REPLIES = 256
"""Final replies kept for a peer that does not read; past it the peer loses its conversation."""
RETRY_SECONDS = 0.02


class Conversation:
    """A bound ROUTER.

    Args:
        listener: a listening Unix stream socket at `path`; handed over (ZMQ_USE_FD), so that libzmq
            neither creates nor unlinks files.

    Attributes:
        counters: requests, replies, drops, largest messages in bytes.
    """

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self.counters: Counter[str] = Counter()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 200)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        self._router.set(zmq.SNDHWM, SEND_HIGH_WATER)
        self._router.set(zmq.MAXMSGSIZE, MAX_TRANSPORT_FRAME_BYTES)
        self._router.set(zmq.USE_FD, listener.detach())
        self._router.bind(f"ipc://{path}")
        self._unsent: dict[bytes, deque[list[bytes]]] = {}

    def fileno(self) -> int:
        """ZeroMQ's own descriptor: edge-triggered, so drain until `receive` says None."""
        descriptor = self._router.getsockopt(zmq.FD)
        return int(descriptor)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next request as (routing id, frames), or None if there is none.

        A request with more frames than allowed comes back cut one frame past the limit; the rest
        is read and dropped without being kept.
        """
        try:
            routing: bytes = self._router.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        frames: list[bytes] = []
        size = 0
        while self._router.getsockopt(zmq.RCVMORE):
            frame: bytes = self._router.recv(zmq.DONTWAIT)
            size += len(frame)
            if len(frames) <= wire.MAX_ENVELOPE_FRAMES + 2:
                frames.append(frame)
        self._count("requests", "largest_request_bytes", size)
        return routing, frames

    def reply(self, routing: bytes, frames: list[bytes]) -> None:
        """Send a final reply now, or keep it for a peer that is busy."""
        if routing in self._unsent or not self._try_send(routing, frames):
            waiting = self._unsent.setdefault(routing, deque())
            waiting.append(frames)
            if len(waiting) > MAX_UNSENT_REPLIES:
                self.forget(routing)
                self.counters["conversations_dropped"] += 1

    def tell(self, routing: bytes, frames: list[bytes]) -> None:
        """Send progress or an event if the peer has room for it, else drop it."""
        if routing in self._unsent or not self._try_send(routing, frames):
            self.counters["notices_dropped"] += 1

    def retry(self) -> bool:
        """Try the kept replies again; true while some remain (call again after RETRY_SECONDS)."""
        for routing, waiting in list(self._unsent.items()):
            while waiting and self._try_send(routing, waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._unsent[routing]
        return bool(self._unsent)

    def forget(self, routing: bytes) -> None:
        """Drop what is kept for this peer."""
        self._unsent.pop(routing, None)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def close(self) -> None:
        self._router.close()
        self._context.term()

    def _try_send(self, routing: bytes, frames: list[bytes]) -> bool:
        """False if the peer's queue is full. Everything is bytes already: nothing raises midway."""
        try:
            self._router.send_multipart([routing, *frames], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["replies_to_the_gone"] += 1
            return True
        self._count("replies", "largest_reply_bytes", sum(map(len, frames)))
        return True

    def _count(self, what: str, largest: str, size: int) -> None:
        self.counters[what] += 1
        if size > self.counters[largest]:
            self.counters[largest] = size
