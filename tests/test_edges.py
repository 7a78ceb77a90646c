"""ZeroMQ's descriptor tells of a request once, and sending may take that away: nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.server import Server
from tests.support.meeting import Meeting


@pytest.fixture
def meeting(private: Path) -> Iterator[Meeting]:
    with Meeting(private) as meeting:
        yield meeting


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
