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
from collections.abc import Callable, Iterator
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
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / f"{name}.zmq"))
        self._listener.listen(64)
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """End every connection and every thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

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
            pair.shut()
        self.cuts += len(pairs)
        return len(pairs)

    def _accept(self) -> None:
        while True:
            try:
                engine, _address = self._listener.accept()
            except OSError:  # closed
                return
            broker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                broker.connect(str(self._target))
            except OSError:
                engine.close()
                broker.close()
                continue
            pair = _Pair(engine, broker)
            with self._lock:
                self._pairs.append(pair)
            self._start(self._pass_on, engine, broker, pair, True)
            self._start(self._pass_on, broker, engine, pair, False)

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: _Pair,
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
        pair.shut()
        with self._lock:
            pair.users -= 1
            if not pair.users:
                pair.close()
            if pair in self._pairs:
                self._pairs.remove(pair)


class _Pair:
    """An engine's connection and the one to the broker that belongs to it."""

    def __init__(self, engine: socket.socket, broker: socket.socket) -> None:
        self._ends = (engine, broker)
        self.users = 2

    def shut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # closed by the other side already
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._ends:
            end.close()


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
