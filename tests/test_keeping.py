"""The line between server and keeper: nothing is lost, nothing overtakes, nobody waits."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from broker.custody.records import KeptLease
from broker.keeping import KeeperLink, KeptSession
from broker.link import (
    INLINE_BYTES,
    Item,
    items_of,
    packet_of,
    receive_item,
    try_send,
    unpack_record,
)

SMALL_QUEUE = 4096


class Keeper:
    """The keeper's end, which reads when a test says so."""

    def __init__(self, queue: int = SMALL_QUEUE) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, queue)
        self.link.settimeout(0.0)
        self.server = KeeperLink(theirs)

    def close(self) -> None:
        self.link.close()
        self.server.close()

    def read(self) -> list[Item]:
        """Everything that has come; None at the end of file ends it too."""
        items = []
        try:
            while (item := receive_item(self.link)) is not None:
                items += items_of(item)
        except BlockingIOError:
            pass
        return items

    def read_all(self) -> list[Item]:
        """Everything the server has to say, however long its queue."""
        items = self.read()
        while self.server.is_behind:
            self.server.catch_up()
            items += self.read()
        return items


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.close()


def lease(number: int) -> KeptLease:
    return KeptLease(1, f"lease {number}", 7)


def record(keeper: Keeper, number: int) -> None:
    """A lease in a packet of its own."""
    keeper.server.keep_lease(lease(number))
    keeper.server.flush()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_keeper_that_does_not_read(keeper: Keeper) -> None:
    """Records wait at the server, which goes on, and arrive in order with their descriptors."""
    told: list[str] = []
    keeper.server.on_behind(lambda: told.append("behind"))
    before = open_descriptors()
    reader, writer = os.pipe()
    for number in range(200):
        record(keeper, number)
        if number == 100:
            keeper.server.keep_session(KeptSession(3, b"token", "engine"), reader)
    assert keeper.server.is_behind
    assert told == ["behind"]
    os.close(reader)
    items = keeper.read_all()
    assert [item.key for item in items if item.kind == "lease"] == [
        f"1/lease {number}" for number in range(200)
    ]
    (session,) = [item for item in items if item.kind == "session"]
    os.write(writer, b"the same pipe")
    assert os.read(session.descriptors[0], 100) == b"the same pipe"
    for descriptor in (writer, *session.descriptors):
        os.close(descriptor)
    assert open_descriptors() == before


def test_what_follows_from_a_record_comes_after_it(keeper: Keeper) -> None:
    """What is handed in by `later` is done in order, and what it records overtakes nothing."""
    done: list[str] = []

    def grant(number: int) -> None:
        keeper.server.keep_lease(lease(number))
        keeper.server.later(lambda: done.append(f"reply {number}"))

    first = 0
    while not keeper.server.is_behind:
        record(keeper, first)
        first += 1
    for number in range(first, first + 100):
        keeper.server.later(lambda number=number: grant(number))  # type: ignore[misc]
        keeper.server.later(lambda number=number: done.append(f"after {number}"))  # type: ignore[misc]
    assert done == []
    items = keeper.read_all()
    assert [item.key for item in items] == [f"1/lease {n}" for n in range(first + 100)]
    expected = [
        said
        for number in range(first, first + 100)
        for said in (f"reply {number}", f"after {number}")
    ]
    assert done == expected


def test_what_fails_late_loses_no_record(keeper: Keeper) -> None:
    """Who takes over has what was recorded after it, too."""
    first = 0
    while not keeper.server.is_behind:
        record(keeper, first)
        first += 1

    def fail() -> None:
        raise ZeroDivisionError

    keeper.server.later(fail)
    record(keeper, first)
    read: list[Item] = []
    with pytest.raises(ZeroDivisionError):
        read += keeper.read_all()
    read += keeper.read_all()
    assert read[-1].key == f"1/lease {first}"


def test_leases_of_a_turn_are_one_packet(keeper: Keeper) -> None:
    """They are gathered until `flush`, then all there, in order, after what was recorded before."""
    keeper.server.keep_fact("epoch", b"e")
    for number in range(3):
        keeper.server.keep_lease(lease(number))
    keeper.server.drop_lease(1, "lease 1")
    assert [item.key for item in keeper.read()] == ["epoch"]
    keeper.server.flush()
    packet = receive_item(keeper.link)
    assert packet is not None
    said = [(item.verb, item.key) for item in items_of(packet)]
    assert said == [*(("keep", f"1/lease {number}") for number in range(3)), ("drop", "1/lease 1")]
    assert keeper.read() == []


def test_gathered_records_are_not_overtaken(keeper: Keeper) -> None:
    """A record that goes at once takes what was gathered along."""
    keeper.server.keep_lease(lease(1))
    keeper.server.keep_session(KeptSession(3, b"token", ""), 0)
    first, second = keeper.read()
    assert (first.key, second.kind) == ("1/lease 1", "session")
    os.close(second.descriptors[0])


def test_gathered_records_fit_into_a_packet() -> None:
    """A batch goes before it is larger than a packet may be."""
    keeper = Keeper(queue=1 << 20)
    received: list[Item] = []
    for number in range(100):
        keeper.server.keep_lease(KeptLease(1, f"{number:01000}", 7))
        received += keeper.read()
    assert keeper.server.is_gathering
    assert 0 < len(received) < 100
    keeper.server.flush()
    received += keeper.read()
    assert [item.key for item in received] == [f"1/{number:01000}" for number in range(100)]
    keeper.close()


def test_large_records_travel_as_files(keeper: Keeper) -> None:
    """A record beyond what a packet takes arrives whole, and its file is closed on both sides."""
    before = open_descriptors()
    record = os.urandom(INLINE_BYTES + 1)
    keeper.server.keep_fact("large", record)
    (item,) = keeper.read_all()
    assert unpack_record(item) == record
    assert item.descriptors == []
    assert open_descriptors() == before


def test_keeper_that_is_gone(keeper: Keeper) -> None:
    """Recording for nobody is no error, and what waited is dropped with its descriptors."""
    before = open_descriptors()
    for number in range(200):
        keeper.server.keep_session(KeptSession(number, b"token", ""), 0)
    assert open_descriptors() > before
    keeper.link.close()
    keeper.server.catch_up()
    assert not keeper.server.is_behind
    keeper.server.keep_lease(lease(1))
    keeper.server.close()
    assert open_descriptors() == before - 2


def test_end_while_the_keeper_is_behind(keeper: Keeper) -> None:
    """A server that ends in order leaves its records, and does nothing more that follows them."""
    done: list[str] = []
    while not keeper.server.is_behind:
        record(keeper, 0)
    keeper.read()
    keeper.server.keep_lease(lease(1))
    keeper.server.later(lambda: done.append("too late"))
    keeper.server.close()
    assert keeper.read()[-1].key == "1/lease 1"
    assert done == []


def test_handing_over_breaks_off(keeper: Keeper) -> None:
    """A server whose keeper dies while it hands over does not start."""
    assert try_send(keeper.link, packet_of("item", "fact", "epoch", b"e"), [])
    keeper.link.close()
    with pytest.raises(ConnectionResetError, match="while it handed over"):
        keeper.server.receive_inheritance()
