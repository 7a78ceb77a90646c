"""Peers that speak ZeroMQ's wire protocol by hand, so that they can say what libzmq never would."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

# ZMTP 3.1 (ZeroMQ RFC 37): greeting with the NULL mechanism, and the READY command of a DEALER.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = b"\x04" + bytes([len(_BODY)]) + _BODY
CHUNK_BYTES = 1 << 16


def frame(data: bytes, *, more: bool) -> bytes:
    """One frame; with `more` its message goes on."""
    if len(data) < 256:
        return bytes([more, len(data)]) + data
    return bytes([2 | more]) + len(data).to_bytes(8, "big") + data


def _shake_hands(connection: socket.socket, directory: Path) -> None:
    connection.settimeout(5)
    connection.connect(str(directory / "default.zmq"))
    connection.sendall(GREETING + READY)
    wanted = len(GREETING) + len(READY)
    while wanted > 0:
        received = connection.recv(wanted)
        if not received:
            raise ConnectionResetError("the broker ended the connection in the handshake")
        wanted -= len(received)


def connect_raw(directory: Path) -> socket.socket:
    """A connection to the broker's conversation after the handshake, made by hand."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        _shake_hands(connection, directory)
    except BaseException:
        connection.close()
        raise
    return connection


def stream(directory: Path, frame_bytes: int, seconds: float) -> dict[str, int]:
    """Send frames of a request that never ends, and begin anew whenever the connection is cut."""
    one = frame(bytes(frame_bytes), more=True)
    chunk = one * max(1, CHUNK_BYTES // len(one))
    sent = cuts = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with connect_raw(directory) as connection:
                while time.monotonic() < until:
                    connection.sendall(chunk)
                    sent += len(chunk)
        except OSError:
            cuts += 1
            time.sleep(0.005)
    return {"sent": sent, "cuts": cuts}


class EndlessRequest:
    """`stream` in a process of its own: brokers remember who was cut off by its pid."""

    def __init__(self, directory: Path, frame_bytes: int, seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory), str(frame_bytes), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def result(self) -> dict[str, int]:
        """What `stream` returned; waits for its end."""
        said, _nothing = self._process.communicate(timeout=30)
        result: dict[str, int] = json.loads(said)
        return result


def cut_conversation(directory: Path) -> int:
    """End every conversation this process has with a broker, as a fault would; how many."""
    path = str(directory / "default.zmq")
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not stat.S_ISSOCK(link.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if connection.getpeername() == path:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # closed meanwhile, or not connected
            continue
    return count


if __name__ == "__main__":
    print(json.dumps(stream(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
