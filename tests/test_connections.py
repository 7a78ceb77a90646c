"""Who connects to the ROUTER, and what becomes of a connection that nothing can be known of."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from broker import connections
from broker.credentials import Credentials
from tests.support.meeting import Meeting


def test_who_is_cut_off_is_told_of_in_a_moment(private: Path) -> None:
    """Not in the midst of a request of its own that is being handled."""
    with Meeting(private) as meeting:
        peer = meeting.peers[0]
        peer.send_multipart([b"ping", b""])
        routing = meeting.receive()
        meeting.conversation.cut(routing, "the test wants it")
        meeting.conversation.reply(routing, [b"ok", b""])
        assert meeting.lost == []
        meeting.run_pending()
        assert meeting.lost == [routing]


def test_a_connection_for_which_there_is_no_room(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended and counted, and the others are served: no mistake of the kernel's ends us."""

    def refuse(connection: socket.socket) -> Credentials:
        monkeypatch.undo()
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with Meeting(private) as meeting:
        monkeypatch.setattr(connections, "peer_credentials", refuse)
        late = meeting.connect()  # libzmq makes another connection for it, and another peer of it
        late.send_multipart([b"ping", b""])
        meeting.receive()
        assert meeting.conversation.counters["connections_failed"] == 1
        for peer in meeting.peers:
            peer.send_multipart([b"ping", b""])
            meeting.receive()
