"""Peers that speak the two channels by hand: without our client, and not always as they should."""

from __future__ import annotations

import array
import os
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from broker import wire
from broker.closing import Closeable
from broker.packets import receive_packet
from tests.support.clock import SCALE

ANSWER_SECONDS = 5.0


class RawDealer(Closeable):
    """A plain pyzmq DEALER on a broker's conversation."""

    def __init__(self, directory: Path, name: str = "default") -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{directory / name}.zmq")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def receive(self, seconds: float = ANSWER_SECONDS) -> list[bytes]:
        if not self.socket.poll(int(seconds * SCALE * 1000)):
            raise AssertionError(f"within {seconds * SCALE} s: no answer")
        frames: list[bytes] = self.socket.recv_multipart()
        return frames

    def ask(self, *frames: bytes) -> list[bytes]:
        self.send(*frames)
        return self.receive()

    def ping_seconds(self) -> float:
        began = time.monotonic()
        status, _payload = self.ask(b"ping", b"")
        assert status == b"ok"
        return time.monotonic() - began

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class RawSession(Closeable):
    """A session socket by hand."""

    def __init__(self, directory: Path, name: str = "default") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(ANSWER_SECONDS * SCALE)
        self.socket.connect(str(directory / f"{name}.session"))
        self.delivered: list[int] = []
        welcome = self.receive()
        assert isinstance(welcome, wire.Welcome)
        self.welcome = welcome

    def hello(self, dealer: RawDealer, **changed: Any) -> list[bytes]:
        """Say hello on a DEALER with this session's token, or with what a test puts instead."""
        fields = {"token": self.welcome.token, "protocol": wire.PROTOCOL, "platform": "simulated"}
        return dealer.ask(b"hello", wire.encode(wire.Hello(**{**fields, **changed})))

    def send(self, packet: bytes, descriptors: list[int] | None = None) -> None:
        rights = array.array("i", descriptors or []).tobytes()
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        self.socket.sendmsg([packet], extra)

    def receive(self) -> Any:
        """The next packet as its struct; None at the broker's end of file."""
        packet, descriptors, _cut = receive_packet(self.socket, wire.MAX_SESSION_PACKET_BYTES)
        self.delivered += descriptors
        return wire.decode_to_engine(packet) if packet else None

    def close(self) -> None:
        self.socket.close()
        while self.delivered:
            os.close(self.delivered.pop())


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def close_descriptors(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
