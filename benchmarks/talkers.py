"""Engines by hand: what they say without the client that says it, many in one process."""

from __future__ import annotations

import array
import os
import socket
from typing import Any

import zmq

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.packets import receive_packet

REQUEST_ID = b"12345678"
"""Of as many bytes as the engines' own. A request that is repeated under its id is answered from
memory, so each gets the next number instead."""
LEASE = "1"


class Talker:
    """One client: a DEALER and, with the broker, a session."""

    def __init__(self, context: zmq.Context[Any], address: str, directory: str) -> None:
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{address}")
        self.session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if directory:
            self.session.connect(f"{directory}/default.session")
            self._say_hello()

    def _say_hello(self) -> None:
        welcome = wire.decode_to_engine(self.receive_packet()[0])
        assert isinstance(welcome, wire.Welcome)  # noqa: S101 - nothing else comes first
        hello = wire.Hello(welcome.token, wire.PROTOCOL, "simulated")
        self.dealer.send_multipart([REQUEST_ID, b"", b"hello", wire.encode(hello)])
        self.receive()

    def receive(self) -> list[bytes]:
        reply: list[bytes] = self.dealer.recv_multipart()
        if reply[-2] != b"ok":
            raise RuntimeError(f"refused: {reply}")
        return reply

    def receive_packet(self) -> tuple[bytes, list[int]]:
        packet, descriptors, _cut = receive_packet(self.session, wire.MAX_SESSION_PACKET_BYTES)
        return packet, descriptors

    def deliver(self, descriptor: int, request: bytes = REQUEST_ID) -> None:
        """Send a checkpoint's folder ahead of the request that is about it."""
        rights = array.array("i", [descriptor]).tobytes()
        packet = wire.encode(wire.Deliver(request, "source"))
        self.session.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def ask_attach(self) -> None:
        """`take_attached` has the answer."""
        self.session.send(wire.encode(wire.Attach(LEASE)))

    def take_attached(self) -> int:
        """Close the descriptors that have come; bytes of the answer."""
        packet, descriptors = self.receive_packet()
        for descriptor in descriptors:
            os.close(descriptor)
        return len(packet)

    def hold(self, checkpoint: str) -> None:
        """Acquire a resident checkpoint and keep the lease."""
        with open_checkpoint(checkpoint) as opened:
            self.deliver(opened.folder)
            self.dealer.send_multipart(cycle_requests(describe_source(opened, None))[0])
            self.receive()

    def close(self) -> None:
        self.dealer.close()
        self.session.close()


def cycle_requests(source: wire.Source) -> list[list[bytes]]:
    """The three requests of a cycle; `attach` as if it went through the conversation."""
    acquire = wire.Acquire(LEASE, wire.Demand("SIM-0"), source)
    return [
        [REQUEST_ID, b"", b"acquire", wire.encode(acquire)],
        [REQUEST_ID, b"", b"attach", wire.encode(wire.Attach(LEASE))],
        [REQUEST_ID, b"", b"release", wire.encode(wire.Release(LEASE))],
    ]
