"""A relay between engines and a broker's conversation that delays, repeats and cuts.

It speaks just enough ZMTP 3 (rfc.zeromq.org/spec/23) to know where a message ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Relay:
    """Engines that use `directory` reach the broker of `target` through this.

    Attributes:
        delay: seconds that every message waits.
        repeat: share of the engines' messages that is sent twice.
    """

    def __init__(self, directory: Path, target: Path, name: str = "default") -> None:
        directory.mkdir(mode=0o700)
        self.directory = directory
        self.delay = 0.0
        self.repeat = 0.0
        self.delayed = self.repeated = self.cuts = 0
        self._random = random.Random(1)  # noqa: S311 - which messages are repeated
        self._target = target / f"{name}.zmq"
        self._session = target / f"{name}.session"
        self._name = name
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / f"{name}.zmq"))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def refresh(self) -> None:
        """The session socket is reached by a second name of it: the peer has to be itself."""
        link = self.directory / f"{self._name}.session"
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.link(self._session, link)

    def cut(self) -> int:
        """Close every connection, wherever its messages are; how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _shut(pair)
        self.cuts += len(pairs)
        return len(pairs)

    def _accept(self) -> None:
        while True:
            engine, _address = self._listener.accept()
            broker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                broker.connect(str(self._target))
            except OSError:
                engine.close()
                broker.close()
                continue
            pair = (engine, broker)
            with self._lock:
                self._pairs.append(pair)
            for there, back, is_request in ((engine, broker, True), (broker, engine, False)):
                arguments = (there, back, pair, is_request)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        is_request: bool,
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            for message, is_command in _messages(source):
                if self.delay:
                    self.delayed += 1
                    time.sleep(self.delay)
                sink.sendall(message)
                if is_request and not is_command and self._random.random() < self.repeat:
                    self.repeated += 1
                    sink.sendall(message)
        _shut(pair)
        with self._lock:
            if pair in self._pairs:
                self._pairs.remove(pair)


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _messages(source: socket.socket) -> Iterator[tuple[bytes, bool]]:
    """Whole messages as they are on the wire, and whether each is a command."""
    for _ in range(GREETING_BYTES):  # each side waits for the other's beginning
        yield _exactly(source, 1), True
    while True:
        message = b""
        flags = _MORE
        while flags & _MORE:
            head = _exactly(source, 1)
            flags = head[0]
            length = _exactly(source, 8 if flags & _LONG else 1)
            message += head + length + _exactly(source, int.from_bytes(length, "big"))
        yield message, bool(flags & _COMMAND)


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = source.recv(nbytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
