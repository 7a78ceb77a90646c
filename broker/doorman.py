"""Who may have a conversation: asked before anything of a new connection is read."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from broker.loop import READ, Loop


class Doorman:
    """Answers libzmq's question for every new connection, before anything it sends is read.

    By ZAP (ZeroMQ RFC 27), over an inproc socket: libzmq holds a connection back until it has its
    answer. The address it gives of a peer on a Unix socket is `localhost:uid:gid:pid`. A refusal is
    no answer, since libzmq's clients never come back after one: the connection is cut instead.

    Args:
        admits: asked with `uid:gid:pid`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        loop: Loop,
        admits: Callable[[str], bool],
    ) -> None:
        self._loop = loop
        self._admits = admits
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        router.set(zmq.ZAP_DOMAIN, b"weight-broker")
        self._number = int(self._socket.getsockopt(zmq.FD))
        loop.add(self._number, READ, lambda _events: self._answer())
        loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                asker, empty, version, request, _domain, address, *_rest = (
                    self._socket.recv_multipart(zmq.DONTWAIT)
                )
            except zmq.Again:
                return
            if self._admits(address.decode().partition(":")[2]):
                answer = [asker, empty, version, request, b"200", b"", b"", b""]
                self._socket.send_multipart(answer, zmq.DONTWAIT)

    def close(self) -> None:
        self._loop.remove(self._number)
        self._socket.close()
