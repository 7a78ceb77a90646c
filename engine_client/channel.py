"""Both channels of a session and the thread that owns them.

Every other thread hands in calls and waits for what arrives. A call stays on the channel until it
is settled: when the broker's server is replaced behind our back, it says welcome again, and after a
new `hello` every call that is still unsettled is sent once more. Requests can stand that: leases
and claims go by ids that the engine chose.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from broker import wire
from broker.errors import BrokerError, BrokerLost, InternalError, NoSession, from_payload
from broker.packets import receive_packet
from engine_client.calls import Call, close_all, send_packet

log = logging.getLogger("weight-broker.client")

RECONNECT_MS = 20
RECONNECT_MAX_MS = 500
"""Between tries to reach the server that follows one that died."""
HELLO_SECONDS = 1.0
"""How long a new server may take to answer a `hello` before it is said again."""
LAST_REPLIES_SECONDS = 0.1
_HELLO = b"hello"
"""Request id of the `hello` that resumes a session; others have 8 bytes."""


class Channel:
    """The session socket and the DEALER, both used by one thread of their own.

    Args:
        connection: connected; owned from now on.
        router: path of the broker's ROUTER.
        on_welcome: called in the I/O thread with the first welcome, or a refusal.
    """

    def __init__(
        self,
        connection: socket.socket,
        router: Path,
        on_welcome: Callable[[wire.Welcome | BrokerError], None],
    ) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.LINGER, 0)
        self._dealer.set(zmq.IMMEDIATE, 1)
        self._dealer.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._dealer.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(f"ipc://{router}")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_closed = False
        self._has_left = False
        self._ids = itertools.count(1)
        # Reentrant: a garbage collection may run a lease's finaliser, which submits a call, in a
        # thread that is inside.
        self._lock = threading.RLock()
        self._calls: dict[bytes, Call] = {}
        self._attaches: dict[str, Call] = {}
        self._outgoing: deque[Call] = deque()
        self._hello: wire.Hello | None = None
        self._resuming: Call | None = None
        self._hello_at = 0.0
        self._on_welcome = on_welcome
        self._lost_callbacks: list[Callable[[], None]] = []
        self._event_callbacks: list[Callable[[wire.Event], None]] = []
        self.end: BrokerError | None = None
        self._thread = threading.Thread(target=self._run, name="weight-broker-io", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------

    def next_id(self) -> bytes:
        """A request id of this channel."""
        return next(self._ids).to_bytes(8, "big")

    def submit(self, call: Call) -> None:
        """Send a call as soon as possible.

        Raises:
            BrokerLost, UsageError: the channel has ended; the call is settled.
        """
        with self._lock:
            if self.end is not None:
                self._forget(call)
                raise type(self.end)(self.end.sentence, **self.end.fields)
            if call.frames is None:
                self._attaches[call.lease] = call
            else:
                self._calls[call.frames[0]] = call
            self._outgoing.append(call)
            os.eventfd_write(self._wake, 1)

    def settle(self, call: Call) -> None:
        """Nobody waits any more; it is not sent again. Idempotent."""
        with self._lock:
            self._forget(call)

    def resume_with(self, hello: wire.Hello) -> None:
        """What to say to a new server; from the first `hello` on."""
        with self._lock:
            self._hello = hello

    def on_lost(self, callback: Callable[[], None]) -> bool:
        """Remember a callback for the broker's end; true if that has come already."""
        with self._lock:
            if isinstance(self.end, BrokerLost):
                return True
            self._lost_callbacks.append(callback)
            return False

    def on_event(self, callback: Callable[[wire.Event], None]) -> Callable[[], None]:
        """Call back for every event; the result, called, ends that."""
        with self._lock:
            self._event_callbacks.append(callback)

        def forget() -> None:
            with self._lock:
                if callback in self._event_callbacks:
                    self._event_callbacks.remove(callback)

        return forget

    def finish(self, end: BrokerError) -> None:
        """No call succeeds from now on; those under way get `end`. The first end counts."""
        with self._lock:
            if self.end is not None:
                return
            self.end = end
            calls = [*self._calls.values(), *self._attaches.values()]
            callbacks = self._lost_callbacks if isinstance(end, BrokerLost) else []
        self._on_welcome(end)
        for call in calls:
            if call.arrived is not None:
                call.arrived.put(("", end))
        for callback in callbacks:
            guarded(callback)

    def close(self, end: BrokerError) -> None:
        """Finish, and wait for the thread unless this is it. Idempotent."""
        self.finish(end)
        with self._lock:
            if self._wake_closed:
                return
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            with self._lock:
                if not self._wake_closed:
                    self._wake_closed = True
                    os.close(self._wake)

    def leave(self) -> None:
        """Tell the broker that this end is no death; at most once, and nothing if it is gone."""
        with self._lock:
            if self._has_left:
                return
            self._has_left = True
            with contextlib.suppress(OSError):
                send_packet(self._connection, wire.encode(wire.Leave()), ())

    def abandon_in_child(self) -> None:
        """In a forked child: drop the inherited socket, so that our parent's death is seen."""
        self._connection.close()

    def _forget(self, call: Call) -> None:
        call.settled = True
        if call.frames is not None:
            self._calls.pop(call.frames[0], None)
        elif self._attaches.get(call.lease) is call:
            del self._attaches[call.lease]
        descriptor, call.descriptor = call.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    # --- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while self.end is None:
                blocked_on = self._flush()
                socket_events = zmq.POLLIN | (zmq.POLLOUT if blocked_on == "session" else 0)
                poller.register(self._connection, socket_events)
                dealer_events = zmq.POLLIN | (zmq.POLLOUT if blocked_on == "dealer" else 0)
                poller.register(self._dealer, dealer_events)
                ready = dict(poller.poll(self._hello_again()))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._monitor in ready:
                    self._on_disconnected()
                # Replies first: an answer that came before the broker's end still counts.
                self._receive_replies()
                if self._connection.fileno() in ready and self.end is None:
                    self._receive_packets()
        except (OSError, zmq.ZMQError, BrokerError) as error:
            self.finish(BrokerLost(f"the connection to the broker failed: {error}"))
        finally:
            self.finish(BrokerLost("the connection to the broker ended"))
            self._dispose()

    def _on_disconnected(self) -> None:
        """The server died, or has cut this conversation: what it was told, it may not know."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
        self._resume()

    def _dispose(self) -> None:
        with self._lock:
            for call in [*self._calls.values(), *self._attaches.values()]:
                self._forget(call)
        self._outgoing.clear()
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close()
        self._context.term()
        self._connection.close()

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

    def _send(self, call: Call) -> str:
        with self._lock:
            if call.settled:
                return ""
            if call.packet is not None and not call.packet_sent:
                descriptors = [] if call.descriptor is None else [call.descriptor]
                if not send_packet(self._connection, call.packet, descriptors):
                    return "session"
                call.packet_sent = True
            if call.frames is not None:
                try:
                    self._dealer.send_multipart(call.frames, zmq.DONTWAIT)
                except zmq.Again:
                    return "dealer"
            if call.arrived is None and call.frames is None:
                self._forget(call)
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
        with self._lock:
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
        with self._lock:
            callbacks = list(self._event_callbacks)
        for callback in callbacks:
            guarded(callback, event)

    def _receive_packets(self) -> None:
        while True:
            try:
                packet, descriptors, truncated = receive_packet(
                    self._connection, wire.MAX_SESSION_PACKET_BYTES
                )
            except BlockingIOError:
                return
            if not packet:
                self._receive_last_replies()
                self.finish(BrokerLost("the broker has ended; mapped weights stay readable"))
                return
            self._on_packet(packet, descriptors, truncated=truncated)

    def _receive_last_replies(self) -> None:
        """What the broker answered just before its end may still be on its way through libzmq."""
        limit = time.monotonic() + LAST_REPLIES_SECONDS
        while self._calls and self._dealer.poll(int(max(0.0, limit - time.monotonic()) * 1000)):
            self._receive_replies()

    def _on_packet(self, packet: bytes, descriptors: list[int], *, truncated: bool) -> None:
        message = wire.decode_to_engine(packet)
        if isinstance(message, wire.Welcome):
            if self._hello is None:
                self._on_welcome(message)
            else:
                self._resume()
            return
        with self._lock:
            call = self._attaches.get(message.lease)
        if isinstance(message, wire.Refused):
            error = from_payload(message.status, message.payload.encode())
            if call is not None and call.arrived is not None:
                call.arrived.put(("", error))
            elif self._hello is None:
                self._on_welcome(error)
            else:
                log.warning("the broker refused a packet: %s", error.sentence)
        elif call is None or call.arrived is None or truncated:
            close_all(descriptors)
            if call is not None and call.arrived is not None:
                call.arrived.put(("", InternalError("the broker's descriptors arrived cut")))
        else:
            call.arrived.put(("", (message, descriptors)))

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
        with self._lock:
            self._outgoing.clear()
            for call in [*self._attaches.values(), *self._calls.values()]:
                call.packet_sent = False
                self._outgoing.append(call)


def guarded(callback: Callable[..., None], *arguments: Any) -> None:
    """Run a user's callback in the I/O thread, which must go on whatever it raises."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("a callback of the weight broker's client raised")
