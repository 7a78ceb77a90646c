"""The broker's side of loader processes: starting them, their last words, their end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker import wire
from broker.loop import READ, Loop
from broker.sessions import PeerIdentity

LAST_WORDS_BYTES = 4096
GRACE_SECONDS = 1.0
"""How long a loader that closed its session may live on before it is killed."""


class CheckpointWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Load a checkpoint; the descriptor is its folder."""

    source: wire.Source
    hash_first: bool


class ShippedWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Run code that an engine shipped; the descriptor holds it."""

    description: str


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a loader is to do. Reaches it in a memfd: it may be larger than a packet."""

    claim: str
    socket: str
    """Path of the ROUTER."""
    device: str
    platform: str
    threads: int
    work: CheckpointWork | ShippedWork


@dataclass
class Spawned:
    """A loader process that was just started; the caller owns the three descriptors."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    stderr: int
    pidfd: int


def spawn(job: Job, given: int) -> Spawned:
    """Start a loader. Blocks for some milliseconds: not for the loop.

    Args:
        given: the descriptor its work is about, borrowed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    job_fd = os.memfd_create("weight-broker-job", os.MFD_CLOEXEC)
    stderr_ours, stderr_theirs = os.pipe2(os.O_CLOEXEC)
    try:
        os.pwrite(job_fd, wire.encode(job), 0)
        passed = (theirs.fileno(), job_fd, given)
        process = subprocess.Popen(
            [sys.executable, "-m", "broker.loader", *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=stderr_theirs,
            stderr=stderr_theirs,
            cwd="/",  # `-m` puts the working directory first on sys.path
            env=_environment(),
            start_new_session=True,  # a Ctrl-C in the terminal is the broker's to handle
        )
    except BaseException:
        ours.close()
        os.close(stderr_ours)
        raise
    finally:
        theirs.close()
        os.close(job_fd)
        os.close(stderr_theirs)
    os.set_blocking(stderr_ours, False)
    return Spawned(process, ours, stderr_ours, os.pidfd_open(process.pid))


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}


class LoaderProcess:
    """A running loader, watched. All methods belong to the loop's thread.

    Args:
        on_end: called once when the process has ended, with a clause saying how.
    """

    def __init__(self, loop: Loop, spawned: Spawned, on_end: Callable[[str], None]) -> None:
        self.identity = PeerIdentity(spawned.process.pid, os.getuid(), "loader", None)
        self._why = ""
        self._loop = loop
        self._process = spawned.process
        self._pidfd = spawned.pidfd
        self._stderr = spawned.stderr
        self._words = b""
        self._on_end = on_end
        self._ended = False
        loop.add(self._stderr, READ, lambda _events: self._listen())
        loop.add(self._pidfd, READ, lambda _events: self._end())

    def stop(self, why: str = "") -> None:
        """Kill it; `on_end` follows, with `why` if it still ran."""
        if not self._ended:
            self._why = self._why or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end_soon(self) -> None:
        """It has closed its session: it must end by itself now, or is killed."""
        self._loop.call_later(GRACE_SECONDS, self.stop)

    def join(self, seconds: float) -> None:
        """Wait for a killed process without the loop; for the broker's own end."""
        if not self._ended:
            poller = select.poll()  # select() knows no descriptor above 1023
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(seconds * 1000)
            self._end()

    def _listen(self) -> None:
        try:
            while words := os.read(self._stderr, 65536):
                sys.stderr.buffer.write(words)
                sys.stderr.buffer.flush()
                self._words = (self._words + words)[-LAST_WORDS_BYTES:]
        except BlockingIOError:
            return
        self._loop.remove(self._stderr)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._listen()
        code = self._process.wait()
        self._loop.remove(self._stderr)
        self._loop.remove(self._pidfd)
        os.close(self._stderr)
        os.close(self._pidfd)
        self._on_end(self._why or _how_it_ended(code, self._words))


def _how_it_ended(code: int, words: bytes) -> str:
    if code < 0:
        try:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            how = f"was killed by signal {-code}"
        if -code == signal.SIGKILL:
            how += ", by hand or because the machine ran out of memory"
    else:
        how = f"ended with exit code {code}"
    lines = words.decode("utf-8", "replace").split("\n")
    last = " | ".join(line.strip() for line in lines if line.strip())[-500:]
    return f"{how}; its last words: {last}" if last else f"{how} without a word"
