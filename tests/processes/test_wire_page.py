"""A client that was written from docs/reference/wire.md alone, against a real broker.

It uses plain sockets, pyzmq and msgpack, nothing of `broker` or `engine_client`. `Page` keeps it
honest: no field is sent or looked at that the page's tables do not name.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from blake3 import blake3

from tests.support.clock import SCALE, eventually
from tests.support.processes import RunningBroker
from tests.support.stored import small_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"
DEVICE = "SIM-0"
SECONDS = 20.0


class Page:
    """The page's tables: the fields of each message, in order."""

    def __init__(self, text: str) -> None:
        self.fields: dict[str, list[str]] = {}
        self.answers: dict[str, list[str]] = {}
        for section in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]:
            title, _newline, body = section.partition("\n")
            self.fields[title] = re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
            self.answers[title] = re.findall(r"\(#(\w+)\)", body.partition("Answer: ")[2])
        self.by_anchor = {title.lower(): title for title in self.fields}

    def check(self, title: str, message: dict[str, Any]) -> None:
        """Each field of the message is in the table of this section."""
        assert set(message) <= set(self.fields[title]), (title, message)


class PlainClient:
    """A session and its conversation, as the page describes them."""

    def __init__(self, page: Page, directory: Path) -> None:
        self._page = page
        self._requests = 0
        self.stages: list[str] = []
        self.session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.session.settimeout(SECONDS * SCALE)
        self.session.connect(str(directory / "default.session"))
        welcome, _descriptors = self.receive("welcome")
        self._context = zmq.Context()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.set(zmq.IMMEDIATE, 1)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{directory}/default.zmq")
        hello = {"token": welcome["token"], "protocol": 1, "platform": "simulated"}
        answer = self.ask("hello", {**hello, "label": "plain client"})
        assert answer["epoch"] == welcome["epoch"]
        assert DEVICE in answer["devices"]

    def ask(self, operation: str, message: dict[str, Any], descriptor: int = -1) -> Any:
        """A request and its final answer, which must be `ok`."""
        self._page.check(operation, message)
        self._requests += 1
        request = self._requests.to_bytes(8, "little")
        if descriptor >= 0:
            self.send({"type": "deliver", "request": request, "what": "source"}, descriptor)
        payload = msgspec.msgpack.encode(message)
        self.dealer.send_multipart([request, b"", operation.encode(), payload])
        while True:
            assert self.dealer.poll(int(SECONDS * SCALE * 1000)), f"{operation} has no answer"
            identity, delimiter, status, body = self.dealer.recv_multipart()
            if status == b"event":
                continue
            assert (identity, delimiter) == (request, b"")
            if status != b"progress":
                break
            progress = msgspec.msgpack.decode(body)
            self._page.check("Progress", progress)
            self.stages.append(progress["stage"])
        assert status == b"ok", body.decode()
        answer = msgspec.msgpack.decode(body)
        (kind,) = self._page.answers[operation]
        self._page.check(self._page.by_anchor[kind], answer)
        return answer

    def send(self, packet: dict[str, Any], *descriptors: int) -> None:
        self._page.check(packet["type"], packet)
        socket.send_fds(self.session, [msgspec.msgpack.encode(packet)], list(descriptors))

    def receive(self, kind: str) -> tuple[dict[str, Any], list[int]]:
        packet, descriptors, flags, _address = socket.recv_fds(self.session, 1 << 16, 4)
        assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        message = msgspec.msgpack.decode(packet)
        assert message["type"] == kind, message
        self._page.check(kind, message)
        return message, descriptors

    def close(self) -> None:
        self.send({"type": "leave"})
        self.session.close()
        self.dealer.close()
        self._context.term()


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(PAGE.read_text())


@contextmanager
def connected(page: Page, broker: RunningBroker) -> Iterator[PlainClient]:
    client = PlainClient(page, broker.directory)
    try:
        yield client
    finally:
        client.close()


def described(page: Page, folder: Path) -> dict[str, Any]:
    """A checkpoint of one file, as `acquire` wants it."""
    file = folder / "model.safetensors"
    with file.open("rb") as opened:
        length = opened.read(8)
        header = opened.read(struct.unpack("<Q", length)[0])
    found = file.stat()
    digest = blake3(length + header).hexdigest()
    stamp = {
        "name": file.name,
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "header_digest": digest,
    }
    fingerprint = blake3(msgspec.msgpack.encode([[found.st_size, digest]])).hexdigest()
    source = {
        "path": str(folder),
        "only": None,
        "files": [[stamp[field] for field in page.fields["FileStamp"]]],
        "fingerprint": fingerprint,
    }
    page.check("Source", source)
    return source


def tensors(page: Page, slab: int, nbytes: int, manifest: int) -> dict[str, bytes]:
    """Every tensor's bytes, read from the mapped slab; both descriptors are closed."""
    described = msgspec.msgpack.decode(os.pread(manifest, os.fstat(manifest).st_size, 0))
    page.check("Manifest", described)
    with mmap.mmap(slab, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        os.close(slab)
        os.close(manifest)
        found = {}
        for group in described["groups"]:
            page.check("TensorGroup", group)
            assert (group["dtype"], len(group["shape"])) == ("float32", 1)
            for name, offset in zip(group["names"], group["offsets"], strict=True):
                found[name] = memory[offset : offset + 4 * group["shape"][0]]
        return found


def stored(folder: Path) -> dict[str, bytes]:
    """The same, read from the file."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = msgspec.json.decode(data[8 : 8 + length])
    body = data[8 + length :]
    return {name: body[slice(*entry["data_offsets"])] for name, entry in entries.items()}


def test_a_client_written_from_the_page(
    page: Page, shared_broker: RunningBroker, tmp_path: Path
) -> None:
    """It loads a checkpoint, a second one maps what is there; both read the file's own bytes."""
    folder = small_checkpoint(tmp_path / "c")
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with connected(page, shared_broker) as first, connected(page, shared_broker) as second:
        demand = {"device": DEVICE}
        page.check("Demand", demand)
        acquire = {"lease": "mine", "demand": demand, "source": described(page, folder)}
        loaded = first.ask("acquire", acquire, opened)
        os.close(opened)
        assert (loaded["right"], loaded["lease"], loaded["how"]) == ("lease", "mine", "loaded")
        page.check("WeightKey", loaded["key"])
        demand = {"device": DEVICE, "checkpoint": loaded["key"]["checkpoint"]}
        granted = second.ask("acquire", {"lease": "1", "demand": demand})
        assert (granted["set"], granted["how"]) == (loaded["set"], "resident")
        for client, grant in ((first, loaded), (second, granted)):
            client.send({"type": "attach", "lease": grant["lease"]})
            attached, (slab, manifest) = client.receive("attached")
            assert attached["nbytes"] == grant["nbytes"]
            assert tensors(page, slab, attached["nbytes"], manifest) == stored(folder)
            client.ask("release", {"lease": grant["lease"]})
        assert [entry["leases"] for entry in shared_broker.status()["sets"]] == [[]]
    eventually(lambda: shared_broker.status()["sessions"] == [], 5, "the end of both sessions")
    assert "how=died" not in shared_broker.log.read_text()


def test_an_error_as_the_page_says(page: Page, shared_broker: RunningBroker) -> None:
    """A refusal is a status of the page's table, a sentence, and JSON on a second line."""
    with connected(page, shared_broker) as client:
        demand = {"device": DEVICE, "name": "nobody"}
        payload = msgspec.msgpack.encode({"lease": "1", "demand": demand})
        client.dealer.send_multipart([b"id", b"", b"acquire", payload])
        assert client.dealer.poll(int(SECONDS * SCALE * 1000))
        identity, _delimiter, status, body = client.dealer.recv_multipart()
        assert (identity, status) == (b"id", b"not-found")
        assert f"| `{status.decode()}` | [`NotFound`]" in PAGE.read_text()
        sentence, *fields = body.decode().split("\n")
        assert "nobody" in sentence
        assert all(isinstance(msgspec.json.decode(line), dict) for line in fields)
