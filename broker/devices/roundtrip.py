"""Proof that a device's memory can be shared: two processes, one pattern, a deadline.

Drivers promise more than they hold (WSL2, containers), and a call in the wrong form may crash or
hang the process; so the proof is made by two children, one after the other:

    writer   creates a slab, writes a pattern, sends the descriptor and exits
    reader   maps the same memory read-only and compares

That the writer is gone by then shows that the descriptor alone keeps the memory. The parent keeps
the slab as a canary: each engine compares it at its first map (`compare_canary`).

    python -m broker.devices.roundtrip (write | read) UUID SOCKET
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from broker.children import child_environment
from broker.devices.base import Canary, Device, DeviceError, Segment
from broker.devices.discovery import open_device, open_driver

DEADLINE_SECONDS = 60.0
"""For both children together. Without persistence mode a driver may need seconds to initialise for
each GPU, and a first context takes seconds more."""

PATTERN_BYTES = 64 << 10
"""Written at both ends of the slab: enough to show that the whole of it is the same memory."""

REAPER = "reap-roundtrip-child"
"""Name of the thread that waits for a child that was given up."""

_MESSAGE_BYTES = 8192


class RoundTripFailed(DeviceError):
    """The device's memory could not be shared.

    Attributes:
        reason: "failed" (a call failed), "crashed", "hung" or "wrong-bytes".
        step: "write" or "read": which child.
    """

    def __init__(self, reason: str, step: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.step = step


def prove_sharing(uuid: str, *, deadline_seconds: float = DEADLINE_SECONDS) -> Canary:
    """Let two child processes share memory of the device; blocks until they have, or the deadline.

    Uses this process's environment, and no driver in this process.

    Raises:
        RoundTripFailed: with the step, the reason and the child's words; nothing is left behind
            but, after "hung", perhaps a child that the driver does not let die.
    """
    end = time.monotonic() + deadline_seconds

    def left() -> float:
        return max(end - time.monotonic(), 0.001)

    with contextlib.ExitStack() as stack:
        words, descriptors = _run_child("write", uuid, left)
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        if len(descriptors) != 1:
            raise RoundTripFailed("failed", "write", f"the writer sent no descriptor: {words}")
        nbytes, seed = words.split()
        canary = Canary(descriptors[0], int(nbytes), seed)
        _run_child("read", uuid, left, canary)
        stack.pop_all()
    return canary


def compare_canary(device: Device, canary: Canary) -> None:
    """Map the canary read-only and compare its pattern: this process reads what another wrote.

    Raises:
        RoundTripFailed: the bytes differ ("wrong-bytes").
        DeviceError: it cannot be mapped.
    """
    mapping = device.map(canary.descriptor, canary.nbytes, writable=False)
    try:
        expected = _pattern(canary.seed)
        for offset in (0, canary.nbytes - PATTERN_BYTES):
            found = device.read(mapping, offset, PATTERN_BYTES)
            if found != expected:
                place = next(i for i in range(PATTERN_BYTES) if found[i] != expected[i])
                raise RoundTripFailed(
                    "wrong-bytes",
                    "read",
                    f"memory of {device.properties.uuid} shared between processes reads wrong "
                    f"bytes: byte {offset + place} is {found[place]}, not {expected[place]}",
                )
    finally:
        mapping.close()


def _pattern(seed: str) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(PATTERN_BYTES)


def _run_child(
    step: str, uuid: str, left: Callable[[], float], canary: Canary | None = None
) -> tuple[str, list[int]]:
    """One child from start to exit; what it said, and the descriptors it sent.

    Args:
        left: the seconds that are left for it at each moment.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            child = _start(step, uuid, theirs.fileno())
        try:
            if canary is not None:
                message = f"{canary.nbytes} {canary.seed}".encode()
                with contextlib.suppress(OSError):  # it died: its exit tells more
                    socket.send_fds(ours, [message], [canary.descriptor])
            return _collect(step, uuid, child, ours, left)
        finally:
            _end(child)


def _start(step: str, uuid: str, descriptor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "broker.devices.roundtrip", step, uuid, str(descriptor)]
    try:
        return subprocess.Popen(
            command,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=child_environment(),
        )
    except OSError as error:
        sentence = f"a child process to {step} from cannot be started ({error})"
        raise RoundTripFailed("failed", step, sentence) from error


def _collect(
    step: str,
    uuid: str,
    child: subprocess.Popen[bytes],
    ours: socket.socket,
    left: Callable[[], float],
) -> tuple[str, list[int]]:
    descriptors: list[int] = []
    try:
        ours.settimeout(left())
        data, descriptors, _, _ = socket.recv_fds(ours, _MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        status = child.wait(left())
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        _close_all(descriptors)
        sentence = f"the child that should {step} a pattern on {uuid} did not finish in time"
        raise RoundTripFailed("hung", step, sentence) from error
    kind, _, words = data.decode("utf-8", "replace").partition(" ")
    if kind == "ok" and status == 0:
        return words, descriptors
    _close_all(descriptors)
    if kind in ("failed", "wrong-bytes"):
        raise RoundTripFailed(kind, step, words)
    raise RoundTripFailed(
        "crashed",
        step,
        f"the child that should {step} a pattern on {uuid} crashed with exit status {status}"
        f"{_last_line(child)}",
    )


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _last_line(child: subprocess.Popen[bytes]) -> str:
    """The last line a dead child wrote to its standard error, if any."""
    output = child.stderr.read(_MESSAGE_BYTES) if child.stderr else b""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return f" ({lines[-1]})" if lines else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child if it lives, and reap it whenever the kernel lets it die.

    A process inside a hanging driver call may ignore even SIGKILL, so nobody waits for it here.
    """
    if child.poll() is None:
        child.kill()
        threading.Thread(target=child.wait, name=REAPER, daemon=True).start()
    if child.stderr is not None:
        child.stderr.close()


# --- in the children --------------------------------------------------------------------------


def _write_pattern(device: Device, parent: socket.socket) -> None:
    granularity = device.properties.granularity
    nbytes = -(-2 * PATTERN_BYTES // granularity) * granularity
    seed = secrets.token_hex(8)
    slab = device.create(nbytes)
    with device.open_writer(slab, nbytes, buffers=2) as writer:
        for offset in (0, nbytes - PATTERN_BYTES):
            buffer = writer.buffer()
            buffer.view[:PATTERN_BYTES] = _pattern(seed)
            writer.submit(buffer, [Segment(0, PATTERN_BYTES, offset)])
    socket.send_fds(parent, [f"ok {nbytes} {seed}".encode()], [slab])


def _read_pattern(device: Device, parent: socket.socket) -> None:
    message, descriptors, _, _ = socket.recv_fds(parent, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    nbytes, seed = message.decode().split()
    compare_canary(device, Canary(descriptors[0], int(nbytes), seed))
    parent.send(b"ok")


def _main(step: str, uuid: str, descriptor: str) -> None:
    with socket.socket(fileno=int(descriptor)) as parent:
        try:
            device = open_device(open_driver(), uuid)
            if step == "write":
                _write_pattern(device, parent)
            else:
                _read_pattern(device, parent)
        except RoundTripFailed as error:
            parent.send(f"{error.reason} {error}".encode()[:_MESSAGE_BYTES])
        except DeviceError as error:
            parent.send(f"failed {error}".encode()[:_MESSAGE_BYTES])


if __name__ == "__main__":
    _main(*sys.argv[1:])
