"""One session with a broker: calls and their answers. No torch.

Calls may be made from several threads, and the end of the broker is noticed at once whatever the
engine is doing: the sockets belong to a thread of their own (channel.py).
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from broker import wire
from broker.credentials import (
    GROUP_VARIABLE,
    Access,
    own_access,
    peer_credentials,
    trusted_group,
)
from broker.devices.base import Canary
from broker.errors import (
    BadRequest,
    BrokerError,
    BrokerLost,
    InternalError,
    StaleEpoch,
    UsageError,
    from_payload,
)
from broker.rundir import broker_not_found, find_brokers
from engine_client.calls import Call
from engine_client.channel import Channel, hang_up
from engine_client.deadline import Deadline
from engine_client.descriptors import Descriptor, closed_after, owned
from engine_client.listeners import Listeners
from engine_client.progress import Show
from engine_client.room import CLIENT_DESCRIPTORS, check_room, told_of_the_limit
from engine_client.shielded import shielded

T = TypeVar("T", bound=msgspec.Struct)

CONNECT_SECONDS = 10.0
CONNECT_TRIES = 3
RETRY_SECONDS = 0.1

_live: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """A live session. Thread-safe; unusable after `close`, the broker's end, or in a forked child.

    Ends by itself when nothing refers to it any more; clients, leases, claims and watches do.

    Args:
        connection: the session socket, connected; owned by the session from now on.
        router: path of the broker's ROUTER.
        platform: "cuda", "rocm" or "simulated"; must be the broker's.
        label: what `status` shows for this engine.
        timeout: seconds for welcome and hello together, or their deadline; None waits for ever.

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
        timeout: float | Deadline | None = CONNECT_SECONDS,
    ) -> None:
        self._pid = os.getpid()
        self._welcome: queue.SimpleQueue[wire.Welcome | BrokerError | None] = queue.SimpleQueue()
        self._listeners = Listeners()
        self._channel = Channel(connection, router, self._welcome.put, self._listeners)
        weakref.finalize(self, _end_dropped, self._channel, self._pid).atexit = False
        _live.add(self)
        try:
            deadline = timeout if isinstance(timeout, Deadline) else Deadline(timeout)
            self._greet(platform, label, deadline)
        except BaseException:
            self.close()
            raise

    def _greet(self, platform: str, label: str, deadline: Deadline) -> None:
        deadline.wake_by(partial(self._welcome.put, None))
        try:
            welcome = self._welcome.get(timeout=deadline.remaining())
        except queue.Empty:
            welcome = None
        if welcome is None:
            raise deadline.expired("waiting for the broker's welcome")
        if isinstance(welcome, BrokerError):
            raise welcome
        self.epoch = welcome.epoch
        self.number = welcome.session
        hello = wire.Hello(welcome.token, wire.PROTOCOL, platform, label)
        self._channel.resume_with(hello)
        answer = self.call("hello", hello, wire.Welcomed, deadline=deadline, stage="saying hello")
        if answer.epoch != self.epoch:
            raise StaleEpoch(
                f"the two channels lead to different brokers: epoch {self.epoch} on the session, "
                f"{answer.epoch} on the conversation"
            )
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
        is_repeated: bool = True,
    ) -> T:
        """Send a request and wait for its final answer. Blocks.

        Args:
            message: the operation's struct, or None for an empty payload.
            answer: the struct of an `ok` payload.
            deadline: None waits as long as the broker lives.
            stage: its `str` at the time-out is the sentence's end: what was being waited for.
            on_progress: called in this thread.
            deliver: ("source", "manifest" or "code", descriptor): sent ahead on the session socket.
            is_repeated: if the broker's server is replaced before it answers, ask the new one.

        Raises:
            RequestTimeout: the broker still works on it: `cancel` if it was an acquire.
            BrokerLost: the broker ended during the call.
            StaleEpoch: its server was replaced, and the request was not to be repeated.
            BrokerError: what the broker answered.
        """
        payload = self.ask(
            operation,
            message,
            deadline=deadline,
            stage=stage,
            on_progress=on_progress,
            deliver=deliver,
            is_repeated=is_repeated,
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
        is_repeated: bool = True,
    ) -> bytes:
        """As `call`, for an answer of several kinds: the payload of the `ok`."""
        deadline = deadline or Deadline(None)
        call = self._request(operation, message, deliver)
        call.is_repeated = is_repeated
        try:
            self._channel.submit(call)
            while True:
                status, payload = self._next(call, deadline, stage or f"waiting for {operation}")
                if status == wire.OK:
                    return bytes(payload)
                if status != wire.PROGRESS:
                    raise from_payload(status, payload)
                if on_progress is not None:
                    on_progress(decoded(wire.Progress, payload))
        finally:
            self._channel.settle(call)

    def notify(self, operation: str, message: wire.Message) -> None:
        """Send a request whose answer nobody needs. Never blocks, never raises on a lost broker.

        It reaches the broker all the same, also one whose server is being replaced.
        """
        if self.is_inherited or sys.is_finalizing():
            return  # the session ends with its process, and whatever this would tell with it
        call = self._request(operation, message, None)
        call.arrived = None
        try:
            self._channel.submit(call)
        except BrokerError:
            return  # the session has ended, and with it whatever this would have told
        except BaseException:  # an interrupt: it may be said half, so it is said again or never
            self._channel.settle(call)
            raise

    def attach(self, lease: str, deadline: Deadline) -> tuple[int, list[Descriptor]]:
        """The slab's size in bytes and the descriptors of a lease or claim.

        Raises:
            RequestTimeout, BrokerLost, BadRequest (no such lease), StaleEpoch.
        """
        message, descriptors = self._attach(lease, deadline)
        return message.nbytes, descriptors

    @contextmanager
    def canary(self, device: str, deadline: Deadline) -> Iterator[Canary]:
        """The slab by which this process finds out whether it reads what others wrote, in a block.

        Raises:
            RequestTimeout, BrokerLost, BadRequest (the broker has none for this device).
        """
        message, descriptors = self._attach(f"{wire.CANARY}{device}", deadline)
        with closed_after(descriptors):
            if len(descriptors) != 1:
                raise InternalError(
                    f"the broker delivered {len(descriptors)} descriptors, not a canary"
                )
            yield Canary(descriptors[0].fileno(), message.nbytes, message.seed)

    def _attach(self, lease: str, deadline: Deadline) -> tuple[wire.Attached, list[Descriptor]]:
        self._check_process()
        call = Call(packet=wire.encode(wire.Attach(lease)), lease=lease)
        message: wire.Attached
        descriptors: list[Descriptor]
        try:
            self._channel.submit(call)
            _status, (message, descriptors) = self._next(
                call, deadline, "receiving the descriptors"
            )
        finally:
            self._channel.settle(call)
        if message.epoch != self.epoch:
            descriptors.clear()
            raise StaleEpoch(
                f"the descriptors are of epoch {message.epoch}, this session is of {self.epoch}"
            )
        return message, descriptors

    def _request(
        self, operation: str, message: wire.Message | None, deliver: tuple[str, int] | None
    ) -> Call:
        self._check_process()
        payload = b"" if message is None else wire.encode(message)
        if len(payload) > wire.MAX_FRAME_BYTES:
            raise BadRequest(
                f"{operation}: {len(payload)} bytes are more than the {wire.MAX_FRAME_BYTES} a "
                "request may have"
            )
        request = self._channel.next_id()
        call = Call(frames=[request, b"", operation.encode(), payload])
        if deliver is not None:
            call.packet = wire.encode(wire.Deliver(request, deliver[0]))
            with told_of_the_limit(f"the request {operation}"):
                call.descriptor = owned(partial(os.dup, deliver[1]))
        return call

    def _next(self, call: Call, deadline: Deadline, stage: object) -> tuple[str, Any]:
        if call.arrived is None:
            raise UsageError("nobody waits for this call")
        deadline.wake_by(partial(call.arrived.put, ("", deadline)))
        try:
            status, payload = call.arrived.get(timeout=deadline.remaining())
        except queue.Empty:
            raise deadline.expired(stage) from None
        if payload is deadline:
            raise deadline.expired(stage)
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
        check_interpreter()

    # --- end ------------------------------------------------------------------------------

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call back once, from the I/O thread, when the broker is gone (at once if it is)."""
        self._check_process()
        self._listeners.on_lost(callback)

    def on_event(self, callback: Callable[[wire.Event], None]) -> Callable[[], None]:
        """Call back for every event, from the I/O thread; the result, called, ends that."""
        self._check_process()
        return self._listeners.on_event(callback)

    @property
    def is_usable(self) -> bool:
        """False once the broker is lost, the session closed, or in a forked child."""
        return self._channel.end is None and not self.is_inherited

    def check_usable(self) -> None:
        """Raise why the session has ended, if it has; `UsageError` in a forked child."""
        self._check_process()
        end = self._channel.end
        if end is not None:
            raise type(end)(end.sentence, **end.fields)

    def close(self) -> None:
        """End the session; the broker takes its leases back. Idempotent; nothing in a child."""
        if not self.is_inherited:
            self._channel.leave()
            self._channel.close(UsageError("this client is closed"))

    def leave(self) -> None:
        """Tell the broker that the end which follows is no death. Nothing in a child."""
        if not self.is_inherited:
            self._channel.leave()

    def abandon_in_child(self) -> None:
        """In a forked child: drop the inherited socket, so that our parent's death is seen."""
        self._channel.abandon_in_child()


def connect(
    name: str,
    directory: Path | None,
    *,
    platform: str,
    label: str = "",
    timeout: float | None = CONNECT_SECONDS,
) -> Session:
    """Open a session with the broker of this name.

    Args:
        directory: the only one to look in; None: every candidate (broker.rundir).

    Raises:
        BrokerNotFound: nobody listens; the sentence lists every path tried.
        BadRequest: a directory is not private.
        UsageError: this process may not open enough files (RLIMIT_NOFILE).
        RequestTimeout, BrokerLost, ProtocolMismatch.
    """
    deadline = Deadline(timeout)

    def connect_in_time(_show: Show) -> Session:
        check_interpreter()
        check_room(CLIENT_DESCRIPTORS, "a client")
        return _connect(name, directory, platform, label, deadline)

    return shielded(connect_in_time, deadline)


def _connect(
    name: str, directory: Path | None, platform: str, label: str, deadline: Deadline
) -> Session:
    for _ in range(CONNECT_TRIES - 1):
        try:
            return _connect_once(name, directory, platform, label, deadline)
        except BrokerLost:
            # A connection that a server had accepted, but not recorded yet, dies with it.
            time.sleep(RETRY_SECONDS)
    return _connect_once(name, directory, platform, label, deadline)


def _connect_once(
    name: str, directory: Path | None, platform: str, label: str, deadline: Deadline
) -> Session:
    tried = []
    group = trusted_group()
    for paths in find_brokers(name, directory, group=group):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _limit_waiting(connection, deadline.remaining())
            connection.connect(str(paths.session))
            _check_listener(connection, paths.session, own_access(group))
        except (FileNotFoundError, ConnectionRefusedError):
            hang_up(connection)
            tried.append((paths.session, "nobody listens there any more"))
        except BlockingIOError:
            hang_up(connection)
            raise deadline.expired("connecting: the broker accepts nobody") from None
        except BaseException:
            hang_up(connection)
            raise
        else:
            return Session(connection, paths.zmq, platform=platform, label=label, timeout=deadline)
    raise broker_not_found(name, tried, directory)


def _check_listener(connection: socket.socket, path: Path, access: Access) -> None:
    """Raise `BadRequest` unless the process that listens is one we trust, by the kernel's word."""
    broker = peer_credentials(connection)
    if not access.admits(broker):
        raise BadRequest(
            f"whoever listens at {path} runs as uid {broker.uid}, group {broker.gid}, and is no "
            f"broker of {access}; set {GROUP_VARIABLE} if another user shares it with your group",
            path=str(path),
            uid=broker.uid,
            gid=broker.gid,
        )


def _limit_waiting(connection: socket.socket, timeout: float | None) -> None:
    """`connect` waits for room in a full backlog no longer than sending may take (unix(7))."""
    if timeout is not None:
        seconds, fraction = divmod(max(timeout, 0.001), 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def check_interpreter() -> None:
    """Raise `UsageError` where no other thread runs any more: it would be waited for for ever."""
    if sys.is_finalizing():
        raise UsageError(
            "the interpreter is ending, and nothing can be asked of the broker any more: call it "
            "before, at the latest in a function that atexit calls; leases go back by themselves"
        )


def decoded(kind: type[T], payload: bytes) -> T:
    result: T = wire.decode_reply(kind, payload)
    return result


def _end_dropped(channel: Channel, pid: int) -> None:
    """Nobody has closed the session, and nobody can any more. Waits for nobody."""
    if os.getpid() == pid:
        channel.finish(UsageError("this client is closed"))


def _after_fork_in_child() -> None:
    for session in list(_live):
        session.abandon_in_child()


def _at_exit() -> None:
    """An engine that ends in order need not close its client."""
    for session in list(_live):
        session.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
