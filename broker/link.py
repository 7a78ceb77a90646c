"""The line between keeper and server: items with descriptors, over a socket pair.

A packet is `verb kind key` and a newline, then the item's record, which only the server reads.

    server → keeper   keep    remember this item (replacing it) with the descriptors beside it
                      note    replace an item's record, its descriptors stay
                      drop    forget an item and close its descriptors
                      ready   the server answers requests from now on
                      alive   its loop turns
                      batch   several of these packets that carry no descriptors
    keeper → server   begin   serve: the restarts so far, the options, the two listening sockets
                      item    something an earlier server had kept
                      end     that was all

One-way: a packet that was sent is in the keeper's queue, whatever becomes of the sender. So what
must outlive the server is recorded by sending it, before anybody is told of it.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from broker.packets import receive_packet

QUEUE_BYTES = 4 << 20
"""Room for what a server records while the keeper is closing memory."""
EXIT_RESTART = 75
"""A server that ends with this wants a successor (`weight-broker upgrade`)."""
METRICS = "metrics"
"""The listening socket for metrics, among what the keeper hands to every server."""
INLINE_BYTES = 32 * 1024
"""A larger record travels and is kept as a memfd: a packet has to fit into the queue."""
_SPILLED = b"+"
_SIZE = 4
"""Bytes of a packet's length in a batch."""


@dataclass
class Item:
    """A packet taken apart; the receiver owns the descriptors."""

    verb: str
    kind: str
    key: str
    record: bytes = b""
    descriptors: list[int] = field(default_factory=list)


def link_pair() -> tuple[socket.socket, socket.socket]:
    """Keeper's and server's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
    return ours, theirs


def packet_of(verb: str, kind: str = "-", key: str = "-", record: bytes = b"") -> bytes:
    return f"{verb} {kind} {key}\n".encode() + record


def try_send(link: socket.socket, packet: bytes, descriptors: Sequence[int]) -> bool:
    """Send a packet now; False if the queue is full. Descriptors are borrowed.

    Raises:
        ConnectionError: the other end is gone.
    """
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
    try:
        link.sendmsg([packet], [rights] if descriptors else [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:  # as many descriptors are on their way as may be
            raise
        return False
    return True


def wait_for_room(link: socket.socket, seconds: float) -> bool:
    """Whether the queue takes another packet now or within so long; also if the link has ended."""
    poller = select.poll()  # select() knows no descriptor above 1023
    poller.register(link, select.POLLOUT)
    return bool(poller.poll(seconds * 1000))


class RecordLost(OSError):
    """A packet has arrived without its descriptors: this process has too many open."""


def receive_item(link: socket.socket) -> Item | None:
    """The next packet, or None at end-of-file. Blocks if the socket does.

    Raises:
        RecordLost: what it said is lost, what follows is not.
        OSError: as `recvmsg`.
    """
    packet, descriptors, cut = receive_packet(link, 2 * INLINE_BYTES)
    if cut:
        for descriptor in descriptors:
            os.close(descriptor)
        raise RecordLost("a packet of the link arrived cut: too many descriptors are open")
    return _item_of(packet, descriptors) if packet else None


def _item_of(packet: bytes, descriptors: list[int]) -> Item:
    head, _, record = packet.partition(b"\n")
    verb, kind_, key = head.decode().split(" ", 2)
    return Item(verb, kind_, key, record, descriptors)


def batch_of(packets: Sequence[bytes]) -> bytes:
    """One packet that says what these say, in order; none of them has descriptors."""
    if len(packets) == 1:
        return packets[0]
    sized = [len(packet).to_bytes(_SIZE, "little") + packet for packet in packets]
    return packet_of("batch", record=b"".join(sized))


def items_of(item: Item) -> list[Item]:
    """A batch's items, or the item itself."""
    if item.verb != "batch":
        return [item]
    items, at = [], 0
    while at < len(item.record):
        start = at + _SIZE
        at = start + int.from_bytes(item.record[at:start], "little")
        items.append(_item_of(item.record[start:at], []))
    return items


@contextmanager
def packed(record: bytes, descriptors: Sequence[int]) -> Iterator[tuple[bytes, list[int]]]:
    """The record as it travels and the descriptors beside it, to be sent in the block.

    A large record becomes a memfd behind the others, which is closed afterwards.
    """
    if len(record) <= INLINE_BYTES:
        yield record, list(descriptors)
        return
    spill = os.memfd_create("weight-broker-record", os.MFD_CLOEXEC)
    try:
        view = memoryview(record)
        while view:
            view = view[os.write(spill, view) :]
        yield _SPILLED, [*descriptors, spill]
    finally:
        os.close(spill)


def unpack_record(item: Item) -> bytes:
    """The record of a received item; takes a memfd of a large one away."""
    if item.record != _SPILLED:
        return item.record
    spill = item.descriptors.pop()
    try:
        return os.pread(spill, os.fstat(spill).st_size, 0)
    finally:
        os.close(spill)
