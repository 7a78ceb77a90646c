"""The least that a warm cycle costs: its messages and nothing else.

A ROUTER, sessions and a process in the keeper's place, without a decision, a check or a count: what
the kernel, libzmq and pyzmq take for the messages themselves is the bound of what a broker written
in Python can reach beside an echo. `deliver`, `acquire`, `attach` and `release` come as the broker
gets them, answers are as long as its own, and before an answer about a lease its record goes to the
other process, once a turn as in the broker.
"""

from __future__ import annotations

import array
import os
import select
import socket
import sys
from pathlib import Path

import zmq

from broker import wire
from broker.packets import receive_packet

RECORD_BYTES = {b"acquire": 150, b"release": 20}
"""Of a lease that is kept and dropped, about."""
_NOW = int(zmq.DONTWAIT)
_TURN = 64
"""Requests answered before sessions get their turn, as in the broker's limits."""


def _sink(link: socket.socket) -> None:
    """The other process: takes records until there are none."""
    while link.recv(1 << 16):
        pass


class BareExchange:
    """Answers of these sizes to `cycle_requests`, at the addresses that a broker has there."""

    def __init__(self, directory: Path, sizes: dict[bytes, int]) -> None:
        self._answers = {word: b"x" * nbytes for word, nbytes in sizes.items()}
        self._router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._router.bind(f"ipc://{directory}/default.zmq")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{directory}/default.session")
        self._listener.listen(128)
        self._sessions: dict[int, socket.socket] = {}
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._link.close()
            _sink(theirs)
            os._exit(0)
        theirs.close()
        memory = [os.memfd_create(name) for name in ("slab", "manifest")]
        rights = array.array("i", memory).tobytes()
        self._rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        self._epoll = select.epoll()
        self._epoll.register(int(self._router.getsockopt(zmq.FD)), select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    def run(self) -> None:
        """Until it is killed."""
        while True:
            more = self._answer_requests()
            for descriptor, _events in self._epoll.poll(0 if more else None):
                if descriptor == self._listener.fileno():
                    self._welcome()
                elif descriptor in self._sessions:
                    self._answer_session(self._sessions[descriptor])

    def _welcome(self) -> None:
        session, _ = self._listener.accept()
        session.setblocking(False)
        session.send(wire.encode(wire.Welcome(1, bytes(16), "")))
        self._sessions[session.fileno()] = session
        self._epoll.register(session, select.EPOLLIN)

    def _answer_requests(self) -> bool:
        """True if there are more: to send may take away what the descriptor had to tell."""
        due, records = [], 0
        for _ in range(_TURN):
            try:
                routing, request, empty, word, _payload = self._router.recv_multipart(_NOW)
            except zmq.Again:
                break
            records += RECORD_BYTES.get(word, 0)
            due.append([routing, request, empty, b"ok", self._answers.get(word, b"")])
        if records:
            self._link.send(bytes(records))
        for answer in due:
            self._router.send_multipart(answer)
        return bool(int(self._router.get(zmq.EVENTS)) & zmq.POLLIN)

    def _answer_session(self, session: socket.socket) -> None:
        packet, descriptors, _cut = receive_packet(session, wire.MAX_SESSION_PACKET_BYTES)
        if descriptors:
            os.close(descriptors[0])
        elif packet:
            session.sendmsg([self._answers[b"attach"]], self._rights)
        else:
            self._epoll.unregister(session)
            del self._sessions[session.fileno()]
            session.close()


if __name__ == "__main__":
    pairs = [size.split("=") for size in sys.argv[2:]]
    sizes = {word.encode(): int(nbytes) for word, nbytes in pairs}
    exchange = BareExchange(Path(sys.argv[1]), sizes)
    print("ready", flush=True)
    exchange.run()
