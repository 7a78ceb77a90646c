"""Both channels of a session and the thread that owns them.

Every other thread hands in calls and waits for what arrives. A call stays on the channel until it
is settled: when the broker's server is replaced behind our back, it says welcome again, and after a
new `hello` every call that is still unsettled is sent once more. Requests can stand that: leases
and claims go by ids that the engine chose. One that cannot (`upgrade`) says so.

There is no lock here. A signal's handler may interrupt the main thread between any two steps and
close the client, and a garbage collection may run a lease's finaliser in the middle of any: neither
may find a lock held that it, or the I/O thread that it waits for, needs. So every step is a single
operation of a dict, a deque or an attribute, and the steps are in an order in which whatever comes
between them does no harm: a call is first entered, and then it is looked whether the channel has
ended; an end is first set, and then the calls that are entered are told.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from broker import wire
from broker.errors import (
    BrokerError,
    BrokerLost,
    InternalError,
    NoSession,
    StaleEpoch,
    from_payload,
)
from broker.forking import no_fork
from broker.packets import receive_packet
from engine_client.calls import Call, send_packet
from engine_client.descriptors import Descriptor, owned
from engine_client.listeners import Listeners

log = logging.getLogger("weight-broker.client")

RECONNECT_MS = 20
RECONNECT_MAX_MS = 500
"""Between tries to reach the server that follows one that died."""
HELLO_SECONDS = 1.0
"""How long a new server may take to answer a `hello` before it is said again."""
LAST_REPLIES_SECONDS = 0.1
CLOSE_SECONDS = 5.0
"""How long `close` waits for the I/O thread, which a user's callback may hold up."""
_HELLO = b"hello"
"""Request id of the `hello` that resumes a session; others have 8 bytes."""


def hang_up(connection: socket.socket) -> None:
    """End the connection, for a child too that was forked while it was made and has a copy of it.

    Not in a forked child: it would end its parent's.
    """
    with contextlib.suppress(OSError):  # the broker was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Channel:
    """The session socket and the DEALER, both used by one thread of their own.

    Args:
        connection: connected; owned from now on.
        router: path of the broker's ROUTER.
        on_welcome: called in the I/O thread with the first welcome, or a refusal.
        listeners: who hears of events and of the end; not kept alive.
    """

    def __init__(
        self,
        connection: socket.socket,
        router: Path,
        on_welcome: Callable[[wire.Welcome | BrokerError], None],
        listeners: Listeners,
    ) -> None:
        self._connection = connection
        self._context = zmq.Context()
        self._wake: Descriptor | None = None
        try:
            self._begin(router, on_welcome, listeners)
        except BaseException:
            # Else a collection of garbage would, in any thread, and wait for ever for its sockets.
            self._context.destroy(linger=0)
            self._wake = None
            hang_up(connection)
            raise

    def _begin(
        self,
        router: Path,
        on_welcome: Callable[[wire.Welcome | BrokerError], None],
        listeners: Listeners,
    ) -> None:
        self._connection.setblocking(False)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.LINGER, 0)
        self._dealer.set(zmq.IMMEDIATE, 1)
        self._dealer.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._dealer.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(f"ipc://{router}")
        self._wake = owned(partial(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._has_left = threading.Lock()  # held from the first `leave` on
        self._ids = itertools.count(1)
        self._calls: dict[bytes, Call] = {}
        self._attaches: dict[str, Call] = {}
        self._outgoing: deque[Call] = deque()
        self._settled: deque[Call] = deque()
        """Whose descriptors the I/O thread closes, which may be sending them."""
        self._hello: wire.Hello | None = None
        self._resuming: Call | None = None
        self._hello_at = 0.0
        self._on_welcome = on_welcome
        self._listeners = weakref.ref(listeners)
        self._ends: dict[str, BrokerError] = {}
        self._is_over = False
        self._over = threading.Lock()  # held until the I/O thread has let go of everything
        self._over.acquire()
        self._thread = threading.Thread(target=self._run, name="weight-broker-io", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------

    def next_id(self) -> bytes:
        """A request id of this channel."""
        return next(self._ids).to_bytes(8, "big")

    @property
    def end(self) -> BrokerError | None:
        """Why no call succeeds any more; None while they do."""
        return self._ends.get("first")

    def submit(self, call: Call) -> None:
        """Send a call as soon as possible.

        Raises:
            BrokerLost, UsageError: the channel has ended; the call is settled.
        """
        if call.frames is None:
            self._attaches[call.lease] = call
        else:
            self._calls[call.frames[0]] = call
        self._outgoing.append(call)
        if self.end is not None:
            self.settle(call)
            raise type(self.end)(self.end.sentence, **self.end.fields)
        self._wake_up()

    def settle(self, call: Call) -> None:
        """Nobody waits any more; it is not sent again. Idempotent."""
        call.settled = True
        if call.frames is not None:
            self._calls.pop(call.frames[0], None)
        elif self._attaches.get(call.lease) is call:
            self._attaches.pop(call.lease, None)
        if call.descriptor is not None:
            self._settled.append(call)
            self._wake_up()

    def resume_with(self, hello: wire.Hello) -> None:
        """What to say to a new server; from the first `hello` on."""
        self._hello = hello

    def finish(self, end: BrokerError) -> None:
        """No call succeeds from now on; those under way get `end`. The first end counts.

        Waits for nobody: the I/O thread ends by itself.
        """
        if self._ends.setdefault("first", end) is not end:
            return
        self._tell_calls(end)
        self._wake_up()
        listeners = self._listeners()
        if listeners is not None and isinstance(end, BrokerLost):
            listeners.tell_lost()

    def close(self, end: BrokerError) -> None:
        """Finish, and wait until everything is closed, unless this is the I/O thread. Idempotent.

        Safe in a signal's handler, whatever that has interrupted.
        """
        self.finish(end)
        self._wake_up()
        if threading.get_ident() == self._thread.ident or self._is_over or sys.is_finalizing():
            return  # of an interpreter that ends, no other thread runs any more
        # Not `join`: it takes a lock of the threading module, which may be held here.
        if self._over.acquire(timeout=CLOSE_SECONDS):
            self._over.release()

    def leave(self) -> None:
        """Tell the broker that this end is no death; at most once, and nothing if it is gone."""
        if self._has_left.acquire(blocking=False):
            with contextlib.suppress(OSError):
                send_packet(self._connection, wire.encode(wire.Leave()), ())

    def _tell_calls(self, end: BrokerError) -> None:
        self._on_welcome(end)
        for call in self._entered():
            if call.arrived is not None:
                call.arrived.put(("", end))

    def _entered(self) -> list[Call]:
        """Every call that is not settled."""
        return [*self._attaches.copy().values(), *self._calls.copy().values()]

    def _wake_up(self) -> None:
        wake = self._wake
        if wake is not None and wake.fileno() >= 0:  # in a forked child there is nobody to wake
            os.eventfd_write(wake.fileno(), 1)

    def abandon_in_child(self) -> None:
        """In a forked child: drop the inherited socket, so that our parent's death is seen."""
        self._connection.close()

    # --- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except (OSError, zmq.ZMQError, BrokerError) as error:
            self.finish(BrokerLost(f"the connection to the broker failed: {error}"))
        finally:
            self.finish(BrokerLost("the connection to the broker ended"))
            self._dispose()
            self._is_over = True
            self._over.release()

    def _serve(self) -> None:
        wake = self._wake
        if wake is None:
            return
        poller = zmq.Poller()
        poller.register(wake.fileno(), zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while self.end is None:
            self._close_settled()
            blocked_on = self._flush()
            socket_events = zmq.POLLIN | (zmq.POLLOUT if blocked_on == "session" else 0)
            poller.register(self._connection, socket_events)
            dealer_events = zmq.POLLIN | (zmq.POLLOUT if blocked_on == "dealer" else 0)
            poller.register(self._dealer, dealer_events)
            ready = dict(poller.poll(self._hello_again()))
            if wake.fileno() in ready:
                os.eventfd_read(wake.fileno())
            if self._monitor in ready:
                self._on_disconnected()
            # Replies first: an answer that came before the broker's end still counts.
            self._receive_replies()
            if self._connection.fileno() in ready and self.end is None:
                self._receive_packets()

    def _on_disconnected(self) -> None:
        """The server died, or has cut this conversation: what it was told, it may not know."""
        while self._monitor.poll(0):
            self._monitor.recv_multipart()  # of one kind: no other is asked for
        self._resume()

    def _dispose(self) -> None:
        if self.end is not None:
            # Again, for a `finish` that was interrupted before it had told everybody.
            self._tell_calls(self.end)
        for call in self._entered():
            self.settle(call)
        self._close_settled()
        self._outgoing.clear()
        if not isinstance(self.end, BrokerLost):
            self.leave()
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close()
        self._context.term()
        hang_up(self._connection)
        self._wake = None

    def _flush(self) -> str:
        """Send what waits; the channel that is full, or "" if everything is sent."""
        if self._resuming is not None:
            # Nothing else before the new server knows who we are; `_resumed` sends the rest.
            return "" if self._resuming.packet_sent else self._send_hello(self._resuming)
        while self._outgoing:
            blocked_on = self._send(self._outgoing[0])
            if blocked_on:
                return blocked_on
            self._outgoing.popleft()
        return ""

    def _hello_again(self) -> int | None:
        """Milliseconds until the `hello` that resumes has to be said again; None: no need.

        The broker may have cut the connection on which it was sent.
        """
        if self._resuming is None or not self._resuming.packet_sent:
            return None
        left = self._hello_at + HELLO_SECONDS - time.monotonic()
        if left > 0:
            return int(left * 1000) + 1
        self._resuming.packet_sent = False
        return 0

    def _send_hello(self, hello: Call) -> str:
        try:
            self._dealer.send_multipart(hello.frames or [], zmq.DONTWAIT)
        except zmq.Again:
            return "dealer"
        hello.packet_sent = True
        self._hello_at = time.monotonic()
        return ""

    def _close_settled(self) -> None:
        while self._settled:
            call = self._settled.popleft()
            if call.descriptor is not None:
                call.descriptor.close()
                call.descriptor = None

    def _send(self, call: Call) -> str:
        if call.settled or call.is_sent:
            return ""
        if call.packet is not None and not call.packet_sent:
            descriptors = [] if call.descriptor is None else [call.descriptor.fileno()]
            if not send_packet(self._connection, call.packet, descriptors):
                return "session"
            call.packet_sent = True
        if call.frames is not None:
            try:
                self._dealer.send_multipart(call.frames, zmq.DONTWAIT)
            except zmq.Again:
                return "dealer"
        call.is_sent = True
        return ""

    def _receive_replies(self) -> None:
        while True:
            try:
                frames: list[bytes] = self._dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) < 2:
                continue
            status = frames[-2].decode("ascii", "replace")
            if status == wire.EVENT:
                self._on_event(frames[-1])
            elif len(frames) == 4:
                self._on_reply(frames[0], status, frames[-1])

    def _on_reply(self, request: bytes, status: str, payload: bytes) -> None:
        if self._resuming is not None and request == _HELLO:
            self._resumed(status, payload)
            return
        call = self._calls.get(request)
        if call is None:
            return
        if status == NoSession.status and self._hello is not None:
            # A new server, before its welcome has been read here: the call is sent again later.
            if self._resuming is None:
                self._resume()
        elif call.arrived is not None:
            call.arrived.put((status, payload))
        elif status != wire.PROGRESS:
            self.settle(call)

    def _on_event(self, payload: bytes) -> None:
        event: wire.Event = wire.decode_reply(wire.Event, payload)
        listeners = self._listeners()
        if listeners is not None:
            listeners.tell(event)

    def _receive_packets(self) -> None:
        while True:
            try:
                with no_fork:
                    packet, descriptors, truncated = receive_packet(
                        self._connection, wire.MAX_SESSION_PACKET_BYTES
                    )
                    received = [Descriptor(descriptor) for descriptor in descriptors]
            except BlockingIOError:
                return
            if not packet:
                self._receive_last_replies()
                self.finish(BrokerLost("the broker has ended; mapped weights stay readable"))
                return
            self._on_packet(packet, received, truncated=truncated)

    def _receive_last_replies(self) -> None:
        """What the broker answered just before its end may still be on its way through libzmq."""
        limit = time.monotonic() + LAST_REPLIES_SECONDS
        while self._calls and self._dealer.poll(int(max(0.0, limit - time.monotonic()) * 1000)):
            self._receive_replies()

    def _on_packet(self, packet: bytes, descriptors: list[Descriptor], *, truncated: bool) -> None:
        message = wire.decode_to_engine(packet)
        if isinstance(message, wire.Welcome):
            if self._hello is None:
                self._on_welcome(message)
            else:
                self._resume()
            return
        call = self._attaches.get(message.lease)
        if isinstance(message, wire.Refused):
            error = from_payload(message.status, message.payload.encode())
            if call is not None and call.arrived is not None:
                call.arrived.put(("", error))
            elif self._hello is None:
                self._on_welcome(error)
            elif not message.lease:  # else an `attach` that a server and its successor were sent
                log.warning("the broker refused a packet: %s", error.sentence)
        elif call is not None and call.arrived is not None:
            cut = InternalError("the broker's descriptors arrived cut")
            call.arrived.put(("", cut if truncated else (message, descriptors)))

    # --- a new server ---------------------------------------------------------------------

    def _resume(self) -> None:
        """Say hello to a server that does not know this conversation yet; then send all again."""
        if self._hello is not None:
            frames = [_HELLO, b"", b"hello", wire.encode(self._hello)]
            self._resuming = Call(frames=frames, arrived=None)

    def _resumed(self, status: str, payload: bytes) -> None:
        self._resuming = None
        if status != wire.OK:
            self.finish(BrokerLost(from_payload(status, payload).sentence))
            return
        self._outgoing.clear()
        for call in self._entered():
            if call.is_sent and not call.is_repeated and call.arrived is not None:
                lost = StaleEpoch("the broker's server was replaced before it had answered")
                call.arrived.put(("", lost))
                continue
            call.packet_sent = call.is_sent = False
            self._outgoing.append(call)
