"""A conversation without a broker: a bound ROUTER, and peers that talk to it."""

from __future__ import annotations

import select
import socket
import time
from pathlib import Path

import zmq

from broker.closing import Closeable
from broker.conversation import Conversation
from broker.credentials import own_access
from broker.limits import DEFAULTS
from broker.loop import READ, Loop
from tests.support.clock import SCALE

SETTLED_SECONDS = 0.003
"""libzmq looks for what has arrived while it sends, if it did not do so in the last millisecond."""


class Meeting(Closeable):
    """A ROUTER and two peers that are connected to it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "zmq"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        access, limits = own_access(None), DEFAULTS
        self._loop = Loop()
        self.lost: list[bytes] = []
        self.conversation = Conversation(
            self._loop,
            listener,
            path,
            access,
            limits,
            lambda routing, _cause: self.lost.append(routing),
        )
        self._loop.add(self.conversation.fileno(), READ, self.conversation.on_readable)
        self._context = zmq.Context()
        self._address = f"ipc://{path}"
        self.peers: list[zmq.Socket[bytes]] = []
        for _ in range(2):
            self.connect().send_multipart([b"ping", b""])
            self.receive()

    def connect(self) -> zmq.Socket[bytes]:
        """Another peer."""
        peer = self._context.socket(zmq.DEALER)
        peer.connect(self._address)
        self.peers.append(peer)
        return peer

    def receive(self) -> bytes:
        """Whose request it is; there is no other then."""
        received: list[bytes] = []

        def drain() -> bool:
            request = self.conversation.receive()
            if request is not None:
                received.append(request[0])
                self._loop.stop()
            return self.conversation.has_request

        self._loop.call_later(5 * SCALE, self._loop.stop)
        self._loop.run(drain)
        (routing,) = received
        assert self.conversation.receive() is None
        return routing

    def run_pending(self) -> None:
        """What was to be done in a moment."""
        self._loop.run_pending()

    def send_until_it_is_seen(self, peer: zmq.Socket[bytes]) -> None:
        time.sleep(SETTLED_SECONDS)
        peer.send_multipart([b"ping", b""])
        poller = select.poll()
        poller.register(self.conversation.fileno(), select.POLLIN)
        assert poller.poll(5000 * SCALE)

    def close(self) -> None:
        self.conversation.close()
        self._loop.close()
        for peer in self.peers:
            peer.close(0)
        self._context.term()
