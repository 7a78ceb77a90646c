"""`LyingBroker`: speaks both channels in a thread of the test, and says what the test wants."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from broker import wire
from broker.closing import Closeable
from broker.memfd import sealed_memfd
from broker.weights import Manifest, TensorGroup, WeightKey, encode_manifest

EPOCH = "the lying broker's"
SLAB_BYTES = 8192
HONEST = Manifest(
    nbytes=4096, groups=[TensorGroup("float32", [512], [1], "tensor", ["a", "b"], [0, 2048])]
)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def slab(nbytes: int = SLAB_BYTES, seals: int = SEALS) -> int:
    """A slab as the simulated device freezes it, or one with fewer seals."""
    writable = os.memfd_create("weight-broker-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(writable, nbytes)
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)
    reader = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(writable)
    return reader


def manifest(described: Manifest = HONEST) -> int:
    return sealed_memfd("weight-broker-manifest", encode_manifest(described))


class LyingBroker(Closeable):
    """A broker that tells the truth until its attributes are changed.

    Attributes:
        welcome: its first packet.
        hello: the answer to hello, as (status, payload).
        granted: changes the lease it grants; may return bytes.
        attached: changes the packet that goes with the descriptors.
        descriptors: makes what it delivers; it closes them after sending.
    """

    def __init__(self, directory: Path) -> None:
        self.welcome: bytes = wire.encode(wire.Welcome(1, b"token", EPOCH))
        self.hello: tuple[str, bytes] = (wire.OK, wire.encode(wire.Welcomed(1, EPOCH, ["SIM-0"])))
        self.granted: Callable[[wire.Granted], wire.Granted | bytes] = lambda granted: granted
        self.attached: Callable[[wire.Attached], wire.SessionMessage] = lambda attached: attached
        self.descriptors: Callable[[], Sequence[int]] = lambda: [slab(), manifest()]
        self.asked: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / "default.session"))
        self._listener.listen()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.bind(f"ipc://{directory}/default.zmq")
        self._end, self._told = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        os.close(self._told)
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        for what in (self._listener, self._router, self._end):
            poller.register(what, zmq.POLLIN)
        connections: dict[int, socket.socket] = {}
        while True:
            ready = dict(poller.poll())
            if self._end in ready:
                break
            if self._listener.fileno() in ready:
                connection, _address = self._listener.accept()
                connections[connection.fileno()] = connection
                poller.register(connection, zmq.POLLIN)
                connection.send(self.welcome)
            if self._router in ready:
                self._answer(self._router.recv_multipart())
            for number in [number for number in connections if number in ready]:
                if not self._deliver(connections[number]):
                    poller.unregister(connections[number])
                    connections.pop(number).close()
        for what in (self._listener, *connections.values()):
            what.close()
        os.close(self._end)
        self._router.close()
        self._context.term()

    def _answer(self, frames: list[bytes]) -> None:
        *envelope, operation, payload = frames
        self.asked.append(operation.decode())
        status, body = wire.OK, wire.encode(wire.Done())
        if operation == b"hello":
            status, body = self.hello
        elif operation == b"acquire":
            asked: wire.Acquire = msgspec.msgpack.decode(payload, type=wire.Acquire)
            said = self.granted(_honest_grant(asked))
            body = said if isinstance(said, bytes) else wire.encode(said)
        self._router.send_multipart([*envelope, status.encode(), body])

    def _deliver(self, connection: socket.socket) -> bool:
        packet = connection.recv(1 << 16)
        if not packet:
            return False
        asked = wire.decode_to_broker(packet)
        if isinstance(asked, wire.Attach):
            message = self.attached(wire.Attached(asked.lease, SLAB_BYTES, EPOCH))
            sent = self.descriptors()
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent).tobytes())
            connection.sendmsg([wire.encode(message)], [rights] if sent else [])
            for descriptor in sent:
                os.close(descriptor)
        return True


def _honest_grant(asked: wire.Acquire) -> wire.Granted:
    demand = asked.demand
    key = WeightKey(
        device=demand.device, name=demand.name or "", dtype="float32", layout={}, format="hf"
    )
    return wire.Granted(asked.lease, 1, key, "1", SLAB_BYTES, 2, "resident")
