"""Packets and descriptors over a socket pair."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from broker.link import link_pair, packet_of, receive_item, try_send
from broker.packets import MOST_SENT, discard_unread, receive_packet
from tests.support.raw import close_descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = link_pair()
    with ours, theirs:
        yield ours, theirs


def test_last_words_of_a_peer_that_never_read(pair: Pair) -> None:
    """What a peer sent before it ended arrives, also if it left packets of ours unread."""
    ours, theirs = pair
    ours.send(b"never read")
    theirs.send(b"first")
    theirs.send(b"last")
    theirs.close()
    assert [receive_packet(ours, 64) for _ in range(3)] == [
        (b"first", [], False),
        (b"last", [], False),
        (b"", [], False),
    ]


def test_records_of_a_server_that_died_while_taking_over(pair: Pair) -> None:
    """The keeper gets what a server recorded, though the server never read what it was handed."""
    ours, theirs = pair
    try_send(ours, packet_of("item", "slab", "1"), [])
    try_send(theirs, packet_of("keep", "lease", "7", b"record"), [0])
    theirs.close()
    item = receive_item(ours)
    assert item is not None
    assert (item.verb, item.kind, item.key, item.record) == ("keep", "lease", "7", b"record")
    os.close(item.descriptors.pop())
    assert receive_item(ours) is None


def test_cut_packet(pair: Pair) -> None:
    """A packet that is too long is known to have been cut."""
    ours, theirs = pair
    theirs.send(b"x" * 65)
    assert receive_packet(ours, 64) == (b"x" * 64, [], True)


def test_many_descriptors(pair: Pair) -> None:
    """As many as the kernel lets anybody send arrive: it has none to close in `recvmsg`."""
    ours, theirs = pair
    with pytest.raises(OSError, match="Invalid argument"):
        socket.send_fds(theirs, [b"y"], [0] * (MOST_SENT + 1))
    socket.send_fds(theirs, [b"y"], [0] * MOST_SENT)
    packet, descriptors, cut = receive_packet(ours, 64)
    close_descriptors(descriptors)
    assert (packet, len(descriptors), cut) == (b"y", MOST_SENT, False)


def test_no_room_for_descriptors(pair: Pair) -> None:
    """A packet of which the kernel kept descriptors back is known to have been cut."""
    ours, theirs = pair
    socket.send_fds(theirs, [b"y"], [0, 0, 0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one + 1, hard))
    try:
        packet, descriptors, cut = receive_packet(ours, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    close_descriptors(descriptors)
    assert (packet, len(descriptors), cut) == (b"y", 1, True)


@contextlib.contextmanager
def sent_pipe(connection: socket.socket) -> Iterator[BinaryIO]:
    """A pipe's reading end; its only writing end is on its way through the socket."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        socket.send_fds(connection, [b"y"], [writer])
        os.close(writer)
        yield pipe


def test_unread_descriptors(pair: Pair) -> None:
    """What is in a queue is closed before the socket is, also behind an empty packet."""
    ours, theirs = pair
    theirs.send(b"")
    with sent_pipe(theirs) as pipe:
        ours.shutdown(socket.SHUT_RDWR)
        discard_unread(ours)
        assert pipe.read() == b""  # blocks while anybody could write


def test_unread_descriptors_of_a_peer_that_is_gone(pair: Pair) -> None:
    """The same if packets of ours were left unread."""
    ours, theirs = pair
    ours.send(b"never read")
    with sent_pipe(theirs) as pipe:
        theirs.close()
        ours.shutdown(socket.SHUT_RDWR)
        discard_unread(ours)
        assert pipe.read() == b""
