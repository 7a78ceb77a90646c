"""The session socket's broker side: who connects, which descriptors pass, who has died.

Death is end-of-file or the peer's pidfd, whichever comes first.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from broker import wire
from broker.credentials import peer_credentials
from broker.errors import BadRequest, BrokerError, Busy
from broker.limits import Limits, descriptor_limit
from broker.logs import printable
from broker.loop import HUNG_UP, READ, WRITE, Loop
from broker.packets import (
    MAX_DESCRIPTORS,
    close_received,
    close_unasked,
    discard_unread,
    receive_packet,
)

READ_OR_HUNG_UP = READ | HUNG_UP
SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
PROCESS_ENDED = "its process has ended"
WITHOUT_A_WORD = "it ended without closing its session"
SPARE_DESCRIPTORS = 96
"""Kept free of delivered ones."""
MAX_AHEAD = 1024
"""Packets that may come before the descriptor that a request needs: an attach of every thread."""
MAX_UNSENT_AHEAD = 8
"""Answers that may wait while it is looked for."""
MAX_PASSED = 8
"""So many packets with descriptors go to a peer before it is looked whether it reads them. Where
all together leave many unread, it is looked before each but the first."""
DESCRIPTORS_PASSED = 2
"""In one of these packets: slab and manifest."""
PAUSE_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.25
"""Before descriptors that could not be sent are tried again; it doubles."""


class PeerIdentity(msgspec.Struct, frozen=True):
    """What the kernel says of the other end. `pid` is 0 if it is outside our PID namespace."""

    pid: int
    uid: int
    command: str
    pidfd: int | None
    has_ended: bool = False


class Passed(msgspec.Struct):
    """What all sessions may have left unread. The kernel limits how many descriptors a user has on
    their way (unix(7), ETOOMANYREFS), and half of those are for the keeper, and for who does read.

    Attributes:
        most: packets with descriptors.
        packets: those sent since each socket was last seen empty.
    """

    most: int = msgspec.field(default_factory=lambda: descriptor_limit() // 2 // DESCRIPTORS_PASSED)
    packets: int = 0


def identify(connection: socket.socket) -> PeerIdentity:
    """Ask the kernel who is at the other end; a pidfd only where the kernel has them."""
    peer = peer_credentials(connection)
    pidfd, has_ended = None, False
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        # Before Linux 6.5 there is no such option: end-of-file alone tells. Later kernels say this
        # of a process that has been reaped, until 6.16, which gives a pidfd of it as well.
        has_ended = error.errno in (errno.EINVAL, errno.ESRCH)
    return PeerIdentity(peer.pid, peer.uid, command_of(peer.pid), pidfd, has_ended)


def command_of(pid: int) -> str:
    """The process's name as `ps` shows it, printable; "?" if it cannot be seen from here."""
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return "?"
    # Bytes of anybody's choice: a long name is cut at the 15th, also in the middle of a letter.
    return printable(name.decode("utf-8", "replace").strip())


def end_connection(connection: socket.socket) -> None:
    """Close the socket, and end it for the peer too: the keeper may hold it as well. Idempotent."""
    with contextlib.suppress(OSError):  # the peer has closed its end already
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):  # it is closed already
        discard_unread(connection)
    connection.close()


class SessionPeer:
    """One session's socket. All methods belong to the loop's thread.

    Args:
        passed: of all sessions together.
        on_attach: an engine wants a lease's descriptors; perhaps asked again, if it did not read.
        on_end: end-of-file or the pidfd; called once, with a sentence's end ("it ended …").
        on_refusal: a packet was answered with this error.
        on_mistake: handling a packet of this session has raised what it should not.
        delivered_by: how many descriptors wait for requests in all sessions of a process.

    Attributes:
        label: what the engine calls itself.
        since: when it connected, in seconds since 1970; 0: not known.
        is_own: it may do what needs the rights of the broker's user.
        has_left: it has said that it is about to close its session.
    """

    def __init__(
        self,
        loop: Loop,
        session: int,
        connection: socket.socket,
        identity: PeerIdentity,
        limits: Limits,
        passed: Passed,
        on_attach: Callable[[SessionPeer, wire.Attach], None],
        on_end: Callable[[SessionPeer, str], None],
        on_refusal: Callable[[SessionPeer, BrokerError], None],
        on_mistake: Callable[[Exception, int], None],
        delivered_by: Callable[[int], int],
    ) -> None:
        self.session = session
        self.identity = identity
        self.token = os.urandom(16)
        self.label = ""
        self.since = 0.0
        self.is_own = False
        self.has_left = False
        self._loop = loop
        self._limits = limits
        self._connection = connection
        self._on_attach = on_attach
        self._on_end = on_end
        self._on_refusal = on_refusal
        self._on_mistake = on_mistake
        self._delivered_by = delivered_by
        self._delivered: dict[tuple[bytes, str], int] = {}
        self._refused: dict[tuple[bytes, str], BrokerError] = {}
        self._late: dict[tuple[bytes, str], None] = {}
        """What requests that were refused are still to get, in order: nobody will take it."""
        self._unsent: list[bytes | wire.Attach] = []
        """Packets; and questions whose answers have descriptors, of which no copies are made."""
        self._all_passed = passed
        self._passed = 0
        self._is_held_back = False
        self._pause = PAUSE_SECONDS
        self._open = True
        connection.setblocking(False)
        loop.add(connection.fileno(), READ, self._on_event)
        if identity.pidfd is not None:
            loop.add(identity.pidfd, READ, lambda _events: self._process_ended())
        elif identity.has_ended:
            loop.call_soon_threadsafe(self._process_ended)

    @property
    def who(self) -> str:
        """The process, for messages: "pid 12 (vllm)"."""
        name = self.label if self.label.isprintable() and self.label else self.identity.command
        return f"pid {self.identity.pid} ({name})"

    @property
    def is_open(self) -> bool:
        """False once either side has closed the session."""
        return self._open

    def send(self, message: wire.SessionMessage) -> None:
        """Send now, or when the peer reads again."""
        packet = wire.encode(message)
        if self._unsent or not self._try_send(packet, ()):
            self._put_off(packet)

    def deliver(
        self, asked: wire.Attach, answer: wire.Attached, descriptors: Sequence[int]
    ) -> None:
        """Send an answer with descriptors, which are borrowed; or ask `on_attach` again when the
        peer reads again."""
        if self._unsent or not self._try_send(wire.encode(answer), descriptors):
            self._put_off(asked)

    def _put_off(self, what: bytes | wire.Attach) -> None:
        self._unsent.append(what)
        if len(self._unsent) == 1:
            self._wait_to_send()
        if len(self._unsent) > self._limits.packets:
            self._end(f"it does not read its session {self._limits.reached('packets')}")

    def refuse(self, lease: str, error: BrokerError) -> None:
        """Answer a packet with an error."""
        self._on_refusal(self, error)
        self.send(wire.Refused(lease, error.status, error.to_payload().decode()))

    def take(self, request: bytes, what: str) -> int:
        """The descriptor delivered for a request; the caller owns it.

        Raises:
            BadRequest: it was not delivered before the request.
            Busy: it was, and there was no room for it; or nothing is read, since answers wait.
        """
        for _ in range(MAX_AHEAD):
            if (request, what) in self._delivered or not self._receive(MAX_UNSENT_AHEAD):
                break
        refusal = self._refused.pop((request, what), None)
        if refusal is not None:
            raise refusal
        descriptor = self._delivered.pop((request, what), None)
        if descriptor is None and self._unsent:
            self._late[request, what] = None
            if len(self._late) > self._limits.descriptors:
                del self._late[next(iter(self._late))]
            raise Busy(
                f"the {what}'s descriptor is not read while answers wait on the session socket: "
                "the engine reads them too slowly, or as many descriptors are on their way as the "
                f"broker's user may have ({descriptor_limit()})",
                limit="RLIMIT_NOFILE",
                value=descriptor_limit(),
            )
        if descriptor is None:
            raise BadRequest(f"the {what}'s descriptor did not arrive on the session socket first")
        return descriptor

    def discard(self, request: bytes) -> None:
        """What was delivered for this request a second time is not needed."""
        for _ in range(MAX_AHEAD):
            if not self._receive(MAX_UNSENT_AHEAD):
                break
        for key in [key for key in self._delivered if key[0] == request]:
            close_received(self._delivered.pop(key))

    def close(self, *, end: bool = True) -> None:
        """Close the socket without calling `on_end`. Idempotent.

        Args:
            end: end the session for the peer too; the keeper holds the socket as well.
        """
        if not self._open:
            return
        self._open = False
        self._loop.remove(self._connection.fileno())
        if end:
            end_connection(self._connection)
        else:
            self._connection.close()
        if self.identity.pidfd is not None:
            self._loop.remove(self.identity.pidfd)
            os.close(self.identity.pidfd)
        for descriptor in self._delivered.values():
            close_received(descriptor)
        self._delivered.clear()
        self._unsent.clear()
        self._forget_passed()

    def _end(self, how: str) -> None:
        if self._open:
            self.close()
            self._on_end(self, how)

    def _process_ended(self) -> None:
        """It may have said something just before, of which the loop has not been told yet."""
        self._on_event(READ, MAX_AHEAD)
        self._end(PROCESS_ENDED)

    def _on_event(self, events: int, packets: int = 1) -> None:
        """One packet a turn: whether there is another, epoll says for less."""
        try:
            if events & WRITE:
                self._flush()
            if events & HUNG_UP and self._unsent:
                self._end(WITHOUT_A_WORD)
            if events & READ_OR_HUNG_UP:
                for _ in range(packets):
                    if not self._receive():
                        break
        except Exception as error:  # noqa: BLE001 - logged whole; the others are served
            self._on_mistake(error, self.session)
            self._end("the broker failed to handle its packets")

    def _flush(self) -> None:
        if not self.is_open:
            return  # a timer that was set before
        waiting, self._unsent = self._unsent, []
        for number, what in enumerate(waiting, 1):
            if isinstance(what, wire.Attach):
                self._on_attach(self, what)
            elif not self._try_send(what, ()):
                self._put_off(what)
            if not self._open:
                return  # it turned out to be gone, and nobody waits any more
            if self._unsent:
                self._unsent += waiting[number:]
                return
        self._pause = PAUSE_SECONDS
        self._loop.modify(self._connection.fileno(), READ)

    def _wait_to_send(self) -> None:
        """Until the socket has room, which it tells; that descriptors may go, nobody tells."""
        number = self._connection.fileno()
        if not self._is_held_back:
            self._loop.modify(number, WRITE)
            return
        self._loop.modify(number, 0)  # of its end it tells always
        self._loop.call_later(self._pause, lambda: self._on_event(WRITE))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def _may_pass_on(self) -> bool:
        """Whether the peer may be sent descriptors: it reads them, or there is room for all."""
        is_crowded = self._all_passed.packets >= self._all_passed.most
        if self._passed < (1 if is_crowded else MAX_PASSED):
            return True
        queued = array.array("i", [0])
        fcntl.ioctl(self._connection, termios.TIOCOUTQ, queued)
        if not queued[0]:
            self._forget_passed()
        return not (queued[0] and is_crowded)

    def _forget_passed(self) -> None:
        self._all_passed.packets -= self._passed
        self._passed = 0

    def _try_send(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        if not self._open:
            return True
        self._is_held_back = bool(descriptors) and not self._may_pass_on()
        if self._is_held_back:
            return False
        rights = []
        if descriptors:
            numbers = array.array("i", descriptors).tobytes()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
        try:
            self._connection.sendmsg([packet], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # not its fault: of all peers together
                self._is_held_back = True
                return False
            # End-of-file will say so too, but perhaps only after an answer is due.
            self._end(f"its session socket failed ({error.strerror})")
        if descriptors:
            self._passed += 1
            self._all_passed.packets += 1
        return True

    def _receive(self, most_unsent: int = 0) -> bool:
        """Handle the next packet; false if there is none, or nothing that may be read now.

        A peer that is not reading our packets is not read either.
        """
        if not self._open or len(self._unsent) > most_unsent:
            return False
        try:
            packet, descriptors, truncated = receive_packet(
                self._connection, wire.MAX_SESSION_PACKET_BYTES
            )
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(f"its session socket failed ({error.strerror})")
            return False
        if not packet and not descriptors:
            self._end(WITHOUT_A_WORD)
            return False
        try:
            self._handle(packet, descriptors, truncated=truncated)
        except BrokerError as error:
            self.refuse("", error)
        return True

    def _handle(self, packet: bytes, descriptors: list[int], *, truncated: bool) -> None:
        """Act on a packet. Its descriptors are closed, but one that waits for its request."""
        kept = False
        try:
            kept = self._decide(packet, descriptors, truncated=truncated)
        finally:
            if not kept:
                close_unasked(descriptors)

    def _decide(self, packet: bytes, descriptors: list[int], *, truncated: bool) -> bool:
        """Whether the packet's descriptor is kept, until its request comes."""
        is_too_long = truncated and len(packet) >= wire.MAX_SESSION_PACKET_BYTES
        if is_too_long or len(descriptors) > MAX_DESCRIPTORS:
            raise BadRequest(
                f"a packet has {wire.MAX_SESSION_PACKET_BYTES} bytes and {MAX_DESCRIPTORS} "
                "descriptors at most"
            )
        message = wire.decode_to_broker(packet)
        if isinstance(message, wire.Attach):
            self._on_attach(self, message)
            return False
        if isinstance(message, wire.Leave):
            self.has_left = True
            return False
        key = (message.request, message.what)
        if len(descriptors) != 1 and not truncated:
            raise BadRequest("deliver carries one descriptor")
        if key in self._late:
            del self._late[key]
            return False
        if key in self._delivered:
            close_received(self._delivered.pop(key))  # sent again: the latest counts
        self._refused.pop(key, None)
        try:
            self._check_room(None if truncated else descriptors[0])
        except Busy as error:
            self._refused[key] = error  # the answer of the request that follows
            if len(self._refused) > self._limits.descriptors:
                del self._refused[next(iter(self._refused))]
            raise
        self._delivered[key] = descriptors[0]
        return True

    @property
    def delivered(self) -> int:
        """How many descriptors wait for their requests."""
        return len(self._delivered)

    def _check_share(self) -> None:
        """Raise `Busy` for a process that has a session's share in several sessions. It may, unless
        half of all that the broker may have open is open: the rest is for others."""
        pid = self.identity.pid
        waiting = self._delivered_by(pid)
        if waiting >= self._limits.descriptors:
            raise Busy(
                f"{waiting} descriptors of process {pid} wait for their requests already, and the "
                f"broker has few left {self._limits.reached('descriptors')}",
                limit="descriptors",
                value=waiting,
            )

    def _check_room(self, descriptor: int | None) -> None:
        """Raise `Busy` if this one is too many; None: so many that the kernel kept it back."""
        if len(self._delivered) >= self._limits.descriptors:
            raise Busy(
                f"{len(self._delivered)} descriptors wait for their requests already "
                f"{self._limits.reached('descriptors')}",
                limit="descriptors",
                value=len(self._delivered),
            )
        most = descriptor_limit()
        if descriptor is not None and descriptor >= most // 2:
            self._check_share()
        if descriptor is None or descriptor >= most - SPARE_DESCRIPTORS:
            raise Busy(
                f"the broker has no room for another descriptor: it may have {most} open",
                limit="RLIMIT_NOFILE",
                value=most,
            )
