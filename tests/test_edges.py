"""ZeroMQ's descriptor tells of a request once, and sending may take that away: nothing waits."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from broker.conversation import Conversation
from broker.credentials import own_access
from broker.limits import DEFAULTS
from broker.loop import READ, Loop
from broker.server import Server
from tests.support.clock import SCALE

SETTLED_SECONDS = 0.003
"""libzmq looks for what has arrived while it sends, if it did not do so in the last millisecond."""


class Meeting:
    """A ROUTER and two peers that are connected to it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "zmq"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        access, limits = own_access(None), DEFAULTS
        self._loop = Loop()
        self.conversation = Conversation(
            self._loop, listener, path, access, limits, lambda _routing, _cause: None
        )
        self._loop.add(self.conversation.fileno(), READ, self.conversation.on_readable)
        self._context = zmq.Context()
        self.peers = [self._context.socket(zmq.DEALER) for _ in range(2)]
        for peer in self.peers:
            peer.connect(f"ipc://{path}")
            peer.send_multipart([b"ping", b""])
            self.receive()

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


@pytest.fixture
def meeting(private: Path) -> Iterator[Meeting]:
    meeting = Meeting(private)
    yield meeting
    meeting.close()


def test_a_request_that_comes_before_an_answer(meeting: Meeting) -> None:
    """It is known after the answer was sent, whatever the descriptor says by then."""
    first, second = meeting.peers
    for _ in range(20):
        first.send_multipart([b"ping", b""])
        routing = meeting.receive()
        meeting.send_until_it_is_seen(second)
        meeting.conversation.reply(routing, [b"ok", b""])
        assert meeting.conversation.has_request
        meeting.receive()
        assert not meeting.conversation.has_request


def test_a_turn_knows_of_it(meeting: Meeting) -> None:
    """Answers are a turn's last act; what came while they were sent is not waited for."""
    first, second = meeting.peers
    first.send_multipart([b"ping", b""])
    routing = meeting.receive()

    def tell_due() -> None:
        meeting.send_until_it_is_seen(second)
        meeting.conversation.reply(routing, [b"ok", b""])

    server: Any = SimpleNamespace(
        conversation=meeting.conversation, _handle_requests=lambda: None, tell_due=tell_due
    )
    assert Server._drain(server)
    assert meeting.receive() != routing
