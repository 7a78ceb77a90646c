"""Packets and descriptors over a socket pair."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from broker.link import link_pair, packet_of, receive_item, try_send
from broker.packets import MAX_DESCRIPTORS, receive_packet

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


def test_cut_packets(pair: Pair) -> None:
    """A packet that is too long, or has too many descriptors, is known to have been cut."""
    ours, theirs = pair
    theirs.send(b"x" * 65)
    assert receive_packet(ours, 64) == (b"x" * 64, [], True)
    socket.send_fds(theirs, [b"y"], [0] * (MAX_DESCRIPTORS + 1))
    packet, descriptors, cut = receive_packet(ours, 64)
    assert (packet, len(descriptors), cut) == (b"y", MAX_DESCRIPTORS, True)
    for descriptor in descriptors:
        os.close(descriptor)
