"""One session with a broker: both channels, one I/O thread, no torch.

The I/O thread owns the DEALER and the session socket; every other thread hands it packets and
waits for answers. So calls may be made from several threads, and the end of the broker is noticed
at once whatever the engine is doing.
"""

from __future__ import annotations

import array
import itertools
import logging
import os
import queue
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from broker import wire
from broker.errors import (
    BadRequest,
    BrokerError,
    BrokerLost,
    InternalError,
    UsageError,
    from_payload,
)
from broker.rundir import broker_not_found, find_brokers
from broker.sessions import receive_packet
from engine_client.deadline import Deadline

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger("weight-broker.client")

_live: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass
class _Outgoing:
    """A packet for the session socket (may be None) and then a request (may be None)."""

    packet: bytes | None
    descriptors: list[int]
    frames: list[bytes] | None


@dataclass
class _Pending:
    """A call under way; the I/O thread puts in what arrives."""

    arrived: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)


class Session:
    """A live session. Thread-safe; unusable after `close`, the broker's end, or in a forked child.

    Args:
        connection: the session socket, connected; owned by the session from now on.
        router: path of the broker's ROUTER.
        platform: "cuda", "rocm" or "simulated"; must be the broker's.
        label: what `status` shows for this engine.
        timeout: seconds for welcome and hello together; None waits for ever.

    Raises:
        RequestTimeout, BrokerLost, ProtocolMismatch.
    """

    def __init__(
        self,
        connection: socket.socket,
        router: Path,
        *,
        platform: str,
        label: str = "",
        timeout: float | None = 10.0,
    ) -> None:
        self._pid = os.getpid()
        self._connection = connection
        connection.setblocking(False)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.LINGER, 0)
        self._dealer.set(zmq.IMMEDIATE, 1)
        self._dealer.set(zmq.RECONNECT_IVL, -1)
        self._dealer.connect(f"ipc://{router}")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outgoing: deque[_Outgoing] = deque()
        self._pending: dict[bytes, _Pending] = {}
        self._attaching: dict[str, _Pending] = {}
        self._ids = itertools.count(1)
        # Reentrant: a garbage collection may run a lease's finaliser, which calls `notify`, in a
        # thread that is inside.
        self._lock = threading.RLock()
        self._wake_closed = False
        self._end: BrokerError | None = None
        self._welcome: queue.SimpleQueue[wire.Welcome | BrokerError] = queue.SimpleQueue()
        self._lost_callbacks: list[Callable[[], None]] = []
        self._event_callbacks: list[Callable[[wire.Event], None]] = []
        self._thread = threading.Thread(target=self._run, name="weight-broker-io", daemon=True)
        self._thread.start()
        _live.add(self)
        try:
            self._greet(platform, label, Deadline(timeout))
        except BaseException:
            self.close()
            raise

    def _greet(self, platform: str, label: str, deadline: Deadline) -> None:
        try:
            welcome = self._welcome.get(timeout=deadline.remaining())
        except queue.Empty:
            raise deadline.expired("waiting for the broker's welcome") from None
        if isinstance(welcome, BrokerError):
            raise welcome
        self.epoch = welcome.epoch
        self.number = welcome.session
        hello = wire.Hello(welcome.token, wire.PROTOCOL, platform, label)
        answer = self.call("hello", hello, wire.Welcomed, deadline=deadline, stage="saying hello")
        self.devices: list[str] = answer.devices

    # --- calls ----------------------------------------------------------------------------

    def call(
        self,
        operation: str,
        message: wire.Message | None,
        answer: type[T],
        *,
        deadline: Deadline | None = None,
        stage: object = "",
        on_progress: Callable[[wire.Progress], None] | None = None,
        deliver: tuple[str, int] | None = None,
    ) -> T:
        """Send a request and wait for its final answer. Blocks.

        Args:
            message: the operation's struct, or None for an empty payload.
            answer: the struct of an `ok` payload.
            deadline: None waits as long as the broker lives.
            stage: its `str` at the time-out is the sentence's end: what was being waited for.
            on_progress: called in this thread.
            deliver: ("source", "manifest" or "code", descriptor): sent ahead on the session socket.

        Raises:
            RequestTimeout: the broker still works on it: `cancel` if it was an acquire.
            BrokerLost: the broker ended during the call.
            BrokerError: what the broker answered.
        """
        payload = self.ask(
            operation,
            message,
            deadline=deadline,
            stage=stage,
            on_progress=on_progress,
            deliver=deliver,
        )
        return decoded(answer, payload)

    def ask(
        self,
        operation: str,
        message: wire.Message | None,
        *,
        deadline: Deadline | None = None,
        stage: object = "",
        on_progress: Callable[[wire.Progress], None] | None = None,
        deliver: tuple[str, int] | None = None,
    ) -> bytes:
        """As `call`, for an answer of several kinds: the payload of the `ok`."""
        deadline = deadline or Deadline(None)
        request, pending = self._send_request(operation, message, deliver)
        try:
            while True:
                status, payload = self._next(pending, deadline, stage or f"waiting for {operation}")
                if status == wire.OK:
                    return bytes(payload)
                if status != wire.PROGRESS:
                    raise from_payload(status, payload)
                if on_progress is not None:
                    on_progress(decoded(wire.Progress, payload))
        finally:
            with self._lock:
                self._pending.pop(request, None)

    def notify(self, operation: str, message: wire.Message) -> None:
        """Send a request whose answer nobody needs. Never blocks, never raises on a lost broker."""
        if self.is_inherited:
            return
        with self._lock:
            if self._end is None:
                frames = [next_id(self._ids), b"", operation.encode(), wire.encode(message)]
                self._push(_Outgoing(None, [], frames))

    def attach(self, lease: str, deadline: Deadline) -> tuple[int, list[int]]:
        """The slab's size in bytes and the descriptors of a lease or claim; the caller owns them.

        Raises:
            RequestTimeout, BrokerLost, BadRequest (no such lease), StaleEpoch.
        """
        pending = _Pending()
        self._check_process()
        with self._lock:
            self._check_usable()
            self._attaching[lease] = pending
            self._push(_Outgoing(wire.encode(wire.Attach(lease)), [], None))
        try:
            _status, delivered = self._next(pending, deadline, "receiving the descriptors")
        finally:
            with self._lock:
                self._attaching.pop(lease, None)
        nbytes, descriptors = delivered
        return nbytes, descriptors

    def _send_request(
        self, operation: str, message: wire.Message | None, deliver: tuple[str, int] | None
    ) -> tuple[bytes, _Pending]:
        self._check_process()
        payload = b"" if message is None else wire.encode(message)
        if len(payload) > wire.MAX_FRAME_BYTES:
            raise BadRequest(
                f"{operation}: {len(payload)} bytes are more than the {wire.MAX_FRAME_BYTES} a "
                "request may have"
            )
        pending = _Pending()
        with self._lock:
            self._check_usable()
            request = next_id(self._ids)
            self._pending[request] = pending
            packet, descriptors = None, []
            if deliver is not None:
                packet = wire.encode(wire.Deliver(request, deliver[0]))
                descriptors = [os.dup(deliver[1])]
            self._push(_Outgoing(packet, descriptors, [request, b"", operation.encode(), payload]))
        return request, pending

    def _next(self, pending: _Pending, deadline: Deadline, stage: object) -> tuple[str, Any]:
        try:
            status, payload = pending.arrived.get(timeout=deadline.remaining())
        except queue.Empty:
            raise deadline.expired(stage) from None
        if isinstance(payload, BrokerError):
            # One error may end many calls: each raises its own.
            raise type(payload)(payload.sentence, **payload.fields)
        return status, payload

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, where nothing of the session works."""
        return self._pid != os.getpid()

    def _check_process(self) -> None:
        # Before any lock: in a forked child another thread of the parent may hold it for ever.
        if self.is_inherited:
            raise UsageError(
                "this client was made before a fork, in the parent process; a forked child must "
                "make its own"
            )

    def _check_usable(self) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.sentence, **self._end.fields)

    # --- end ------------------------------------------------------------------------------

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call back once, from the I/O thread, when the broker is gone (at once if it is)."""
        self._check_process()
        with self._lock:
            lost = isinstance(self._end, BrokerLost)
            if not lost:
                self._lost_callbacks.append(callback)
        if lost:
            callback()

    def on_event(self, callback: Callable[[wire.Event], None]) -> Callable[[], None]:
        """Call back for every event, from the I/O thread; the result, called, ends that."""
        self._check_process()
        with self._lock:
            self._event_callbacks.append(callback)

        def forget() -> None:
            with self._lock:
                if callback in self._event_callbacks:
                    self._event_callbacks.remove(callback)

        return forget

    @property
    def is_usable(self) -> bool:
        return self._end is None and not self.is_inherited

    def close(self) -> None:
        """End the session; the broker takes its leases back. Idempotent; nothing in a child."""
        if self.is_inherited:
            return
        self._finish(UsageError("this client is closed"))
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

    def abandon_in_child(self) -> None:
        """In a forked child: drop the inherited socket, so that our parent's death is seen."""
        self._connection.close()

    def _finish(self, end: BrokerError) -> None:
        """No call succeeds from now on; those under way get `end`."""
        with self._lock:
            if self._end is not None:
                return
            self._end = end
            waiting = [*self._pending.values(), *self._attaching.values()]
            callbacks = self._lost_callbacks if isinstance(end, BrokerLost) else []
        self._welcome.put(end)
        for pending in waiting:
            pending.arrived.put(("", end))
        for callback in callbacks:
            guarded(callback)

    # --- the I/O thread -------------------------------------------------------------------

    def _push(self, outgoing: _Outgoing) -> None:
        self._outgoing.append(outgoing)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._end is None:
                blocked_on = self._flush()
                socket_events = zmq.POLLIN | (zmq.POLLOUT if blocked_on == "session" else 0)
                poller.register(self._connection, socket_events)
                dealer_events = zmq.POLLIN | (zmq.POLLOUT if blocked_on == "dealer" else 0)
                poller.register(self._dealer, dealer_events)
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                # Replies first: an answer that came before the broker's end still counts.
                self._receive_replies()
                if self._connection.fileno() in ready and self._end is None:
                    self._receive_packets()
        except (OSError, zmq.ZMQError, BrokerError) as error:
            self._finish(BrokerLost(f"the connection to the broker failed: {error}"))
        finally:
            self._finish(BrokerLost("the connection to the broker ended"))
            self._dispose()

    def _dispose(self) -> None:
        for outgoing in self._outgoing:
            for descriptor in outgoing.descriptors:
                os.close(descriptor)
        self._outgoing.clear()
        self._dealer.close()
        self._context.term()
        self._connection.close()

    def _flush(self) -> str:
        """Send what waits; the channel that is full, or "" if everything is sent."""
        while self._outgoing:
            outgoing = self._outgoing[0]
            if outgoing.packet is not None:
                if not send_packet(self._connection, outgoing.packet, outgoing.descriptors):
                    return "session"
                for descriptor in outgoing.descriptors:
                    os.close(descriptor)
                outgoing.packet, outgoing.descriptors = None, []
            if outgoing.frames is not None:
                try:
                    self._dealer.send_multipart(outgoing.frames, zmq.DONTWAIT)
                except zmq.Again:
                    return "dealer"
            self._outgoing.popleft()
        return ""

    def _receive_replies(self) -> None:
        while True:
            try:
                frames: list[bytes] = self._dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            status = frames[-2].decode("ascii", "replace") if len(frames) >= 2 else ""
            if status == wire.EVENT:
                self._on_event(frames[-1])
            elif len(frames) == 4:
                with self._lock:
                    pending = self._pending.get(frames[0])
                if pending is not None:
                    pending.arrived.put((status, frames[-1]))

    def _on_event(self, payload: bytes) -> None:
        event = decoded(wire.Event, payload)
        with self._lock:
            callbacks = list(self._event_callbacks)
        for callback in callbacks:
            guarded(callback, event)

    def _receive_packets(self) -> None:
        while True:
            try:
                packet, descriptors, truncated = receive_packet(self._connection)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet, descriptors, truncated = b"", [], False
            if not packet:
                self._receive_replies()
                self._finish(BrokerLost("the broker has ended; mapped weights stay readable"))
                return
            self._on_packet(packet, descriptors, truncated=truncated)

    def _on_packet(self, packet: bytes, descriptors: list[int], *, truncated: bool) -> None:
        message = wire.decode_to_engine(packet)
        if isinstance(message, wire.Welcome):
            self._welcome.put(message)
            return
        with self._lock:
            pending = self._attaching.get(message.lease)
        if isinstance(message, wire.Refused):
            error = from_payload(message.status, message.payload.encode())
            if pending is not None:
                pending.arrived.put(("", error))
            else:
                self._welcome.put(error)
        elif pending is None or truncated or message.epoch != self.epoch:
            for descriptor in descriptors:
                os.close(descriptor)
            if pending is not None:
                pending.arrived.put(("", InternalError("the broker's descriptors arrived cut")))
        else:
            pending.arrived.put(("", (message.nbytes, descriptors)))


def connect(
    name: str,
    directory: Path | None,
    *,
    platform: str,
    label: str = "",
    timeout: float | None = 10.0,
) -> Session:
    """Open a session with the broker of this name.

    Args:
        directory: the only one to look in; None: every candidate (broker.rundir).

    Raises:
        BrokerNotFound: nobody listens; the sentence lists every path tried.
        BadRequest: a directory is not private.
        RequestTimeout, BrokerLost, ProtocolMismatch.
    """
    tried = []
    for paths in find_brokers(name, directory):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _limit_waiting(connection, timeout)
            connection.connect(str(paths.session))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            tried.append((paths.session, "nobody listens there any more"))
        except BlockingIOError:
            connection.close()
            raise Deadline(timeout).expired("connecting: the broker accepts nobody") from None
        except BaseException:
            connection.close()
            raise
        else:
            return Session(connection, paths.zmq, platform=platform, label=label, timeout=timeout)
    raise broker_not_found(name, tried)


def _limit_waiting(connection: socket.socket, timeout: float | None) -> None:
    """`connect` waits for room in a full backlog no longer than sending may take (unix(7))."""
    if timeout is not None:
        seconds, fraction = divmod(max(timeout, 0.001), 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_packet(connection: socket.socket, packet: bytes, descriptors: Sequence[int]) -> bool:
    """Send one packet without blocking; False if the socket is full. Descriptors are borrowed."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
    try:
        connection.sendmsg([packet], [rights] if descriptors else [])
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True  # end-of-file follows and ends the session
    return True


def decoded(kind: type[T], payload: bytes) -> T:
    result: T = wire.decode_reply(kind, payload)
    return result


def next_id(ids: itertools.count[int]) -> bytes:
    return next(ids).to_bytes(8, "big")


def guarded(callback: Callable[..., None], *arguments: Any) -> None:
    """Run a user's callback in the I/O thread, which must go on whatever it raises."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("a callback of the weight broker's client raised")


def _after_fork_in_child() -> None:
    for session in list(_live):
        session.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
