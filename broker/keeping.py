"""The server's end of its link to the keeper: what is recorded, and what a successor gets back."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from broker import wire
from broker.custody.records import KeptLease, KeptSet
from broker.devices.base import Canary
from broker.link import (
    INLINE_BYTES,
    Item,
    batch_of,
    packed,
    packet_of,
    receive_item,
    try_send,
    unpack_record,
    wait_for_room,
)

CLOSE_SECONDS = 5.0
"""How long a server that ends waits for a keeper that does not read."""


class KeptSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session as a successor needs it; its socket is beside it."""

    id: int
    token: bytes
    label: str
    watches: list[str] = []
    since: float = 0.0
    """When it connected, in seconds since 1970; 0: not known."""


class Inheritance(msgspec.Struct):
    """Everything an earlier server had handed to the keeper. The holder owns all descriptors."""

    sessions: list[tuple[KeptSession, int]] = []
    sets: list[tuple[KeptSet, list[int]]] = []
    leases: list[KeptLease] = []
    canaries: dict[str, Canary] = {}
    """By the device's UUID; what the keeper's platform check has left."""
    listeners: dict[str, int] = {}
    """Listening sockets beside the two that every server gets, by what they are for."""
    facts: dict[str, bytes] = {}
    """Records without a descriptor, by key: the epoch, the budgets."""


class KeeperLink:
    """Everything sent is recorded when the call returns, or `is_behind`, and what must come after
    it has to be handed in by `later`. Leases are many and small: their records are gathered
    (`is_gathering`) until `flush`. Belongs to the loop's thread; no call waits for the keeper.

    Attributes:
        is_behind: the keeper does not read (it is stopped, or closes much memory): records wait
            here.
        is_gathering: records wait for `flush`; nobody may be told of what they say.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._is_gone = False
        self._on_behind: Callable[[], None] = lambda: None
        self._behind: deque[_Packet | Callable[[], None]] = deque()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self.is_behind = self.is_gathering = False

    def fileno(self) -> int:
        """Readable at end-of-file: the keeper has gone. Writable again: `catch_up`."""
        return self._link.fileno()

    def on_behind(self, callback: Callable[[], None]) -> None:
        """Call back when `catch_up` becomes necessary."""
        self._on_behind = callback

    def flush(self) -> None:
        """Record what was gathered, in one packet; the keeper may be behind then."""
        if self.is_gathering:
            packet = batch_of(self._gathered)
            self._gathered, self._gathered_bytes = [], 0
            self.is_gathering = False
            self._send_packet(packet, ())

    def later(self, call: Callable[[], None]) -> None:
        """Do this when everything said so far is recorded."""
        self.flush()
        self._put_behind(call)

    def _put_behind(self, entry: _Packet | Callable[[], None]) -> None:
        self._behind.append(entry)
        self.is_behind = True

    def catch_up(self) -> None:
        """Send what waits, and do what has to come after it, as far as the keeper reads."""
        while self._behind and self._advance(self._behind[0]):
            first = self._behind.popleft()
            self.is_behind = bool(self._behind)
            if not isinstance(first, _Packet):
                self._do_late(first)

    def _do_late(self, call: Callable[[], None]) -> None:
        """What it records comes before everything that waits already."""
        rest, self._behind = self._behind, deque()
        self.is_behind = False
        try:
            call()
            self.flush()
        finally:
            self._behind.extend(rest)
            self.is_behind = bool(self._behind)

    def _advance(self, first: _Packet | Callable[[], None]) -> bool:
        if not isinstance(first, _Packet):
            return True
        if not self._is_gone and not self._try_send(first.packet, first.descriptors):
            return False
        for descriptor in first.descriptors:
            os.close(descriptor)
        return True

    def receive_inheritance(self) -> Inheritance:
        """What an earlier server left; nothing for the first. Blocks until it is complete.

        Raises:
            OSError: the keeper is gone.
        """
        inherited = Inheritance()
        while True:
            item = receive_item(self._link)
            if item is None:
                raise ConnectionResetError("the keeper ended while it handed over")
            if item.verb == "end":
                return inherited
            _sort(item, inherited)

    def keep_session(self, session: KeptSession, connection: int) -> None:
        self._send("keep", "session", str(session.id), wire.encode(session), [connection])

    def note_session(self, session: KeptSession) -> None:
        """The session's record has changed; its socket is the same."""
        self._send("note", "session", str(session.id), wire.encode(session))

    def drop_session(self, session: int) -> None:
        self._send("drop", "session", str(session))

    def keep_set(self, kept: KeptSet, descriptors: Sequence[int]) -> None:
        self._send("keep", "set", str(kept.id), wire.encode(kept), descriptors)

    def drop_set(self, set_id: int) -> None:
        self._send("drop", "set", str(set_id))

    def keep_lease(self, kept: KeptLease) -> None:
        self._gather(packet_of("keep", "lease", f"{kept.session}/{kept.lease}", wire.encode(kept)))

    def drop_lease(self, session: int, lease: str) -> None:
        self._gather(packet_of("drop", "lease", f"{session}/{lease}"))

    def keep_fact(self, key: str, record: bytes) -> None:
        self._send("keep", "fact", key, record)

    def ready(self, line: str) -> None:
        """Requests are answered from now on; `line` is for who started the keeper."""
        self._send("ready", record=line.encode())

    def alive(self) -> None:
        """The server's loop turns. Not said to a keeper that does not read: it does not hear it."""
        if not self.is_behind:
            self._send("alive")

    def close(self) -> None:
        """Record nothing any more; waits a moment for a keeper that is behind. Idempotent."""
        self.flush()
        limit = time.monotonic() + CLOSE_SECONDS
        self._behind = deque(entry for entry in self._behind if isinstance(entry, _Packet))
        while self._behind and not self._is_gone and time.monotonic() < limit:
            wait_for_room(self._link, limit - time.monotonic())
            self.catch_up()
        self._is_gone = True
        self.catch_up()
        self._link.close()

    def _gather(self, packet: bytes) -> None:
        if self._gathered_bytes + len(packet) > INLINE_BYTES:
            self.flush()
        self._gathered.append(packet)
        self.is_gathering = True
        self._gathered_bytes += len(packet)

    def _send(
        self,
        verb: str,
        kind: str = "-",
        key: str = "-",
        record: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        self.flush()  # nothing is overtaken
        with packed(record, descriptors) as (travelling, beside):
            self._send_packet(packet_of(verb, kind, key, travelling), beside)

    def _send_packet(self, packet: bytes, descriptors: Sequence[int]) -> None:
        if self._is_gone:
            return
        if self._behind or not self._try_send(packet, descriptors):
            self._put_behind(_Packet(packet, [os.dup(fd) for fd in descriptors]))
            if len(self._behind) == 1:
                self._on_behind()

    def _try_send(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        try:
            return try_send(self._link, packet, descriptors)
        except ConnectionError:
            self._is_gone = True  # the loop sees end-of-file next, and stops
            return True


class _Packet(msgspec.Struct):
    """One that the keeper has had no room for yet; it owns the descriptors."""

    packet: bytes
    descriptors: list[int]


def _sort(item: Item, inherited: Inheritance) -> None:
    record = unpack_record(item)
    if item.kind == "session":
        session = msgspec.msgpack.decode(record, type=KeptSession)
        inherited.sessions.append((session, item.descriptors[0]))
    elif item.kind == "set":
        kept = msgspec.msgpack.decode(record, type=KeptSet)
        inherited.sets.append((kept, item.descriptors))
    elif item.kind == "canary":  # from broker.service
        nbytes, seed = record.decode().split()
        inherited.canaries[item.key] = Canary(item.descriptors[0], int(nbytes), seed)
    elif item.kind == "listener":  # from broker.service
        inherited.listeners[item.key] = item.descriptors[0]
    elif item.kind == "lease":
        inherited.leases.append(msgspec.msgpack.decode(record, type=KeptLease))
    else:
        inherited.facts[item.key] = record
