"""The broker's side of loader processes: starting them, their last words, their end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from broker import wire
from broker.children import child_environment
from broker.logs import log_event
from broker.loop import READ, Loop
from broker.sessions import PeerIdentity

LAST_WORDS_BYTES = 4096
READ_BYTES = 8192
"""Read in one turn of what a loader prints: it may print faster than anybody reads."""
PIPE_BYTES = 1 << 20
"""What a pipe holds at most (pipe(7), pipe-max-size): all that a process can have left behind."""
SHOWN_CHARACTERS = 500
"""Of its last words, in a sentence; the error's fields have all."""
GRACE_SECONDS = 1.0
"""How long a loader that closed its session may live on before it is killed: others wait for its
end."""
IDLE_GRACE_SECONDS = 10.0
"""The same once nobody waits for it: an interpreter with torch takes a moment to end."""
FINISHED = "loader-finished"
UNWANTED = "loader-unwanted"
_BY_ITSELF = (FINISHED, "loader-exited", "loader-crashed")


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


class Spawned(msgspec.Struct):
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
    with ExitStack() as theirs_alone, ExitStack() as ours_too:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours_too.callback(ours.close)
        theirs_alone.callback(theirs.close)
        job_fd = os.memfd_create("weight-broker-job", os.MFD_CLOEXEC)
        theirs_alone.callback(os.close, job_fd)
        stderr_ours, stderr_theirs = os.pipe2(os.O_CLOEXEC)
        ours_too.callback(os.close, stderr_ours)
        theirs_alone.callback(os.close, stderr_theirs)
        os.pwrite(job_fd, wire.encode(job), 0)
        passed = (theirs.fileno(), job_fd, given)
        process = subprocess.Popen(
            [sys.executable, "-m", "broker.loader", *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=stderr_theirs,
            stderr=stderr_theirs,
            cwd="/",
            env=child_environment(),
            start_new_session=True,  # a Ctrl-C in the terminal is the broker's to handle
        )
        ours_too.callback(_end_unwatched, process)
        os.set_blocking(stderr_ours, False)
        spawned = Spawned(process, ours, stderr_ours, os.pidfd_open(process.pid))
        ours_too.pop_all()
        return spawned


def _end_unwatched(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Ending(msgspec.Struct, frozen=True):
    """How a loader process ended.

    Attributes:
        how: a clause for a sentence about it: "was killed by signal 11 (SIGSEGV)".
        reason: the same for programs: "loader-finished", "loader-exited", "loader-crashed",
            "loader-killed", "loader-too-slow", "loader-unwanted".
        last_words: the end of what it printed.
    """

    how: str
    reason: str
    last_words: str

    @property
    def in_order(self) -> bool:
        """Whether it did what it was to do, or was told to end."""
        return self.reason in (FINISHED, UNWANTED)

    def __str__(self) -> str:
        last = " | ".join(line.strip() for line in self.last_words.split("\n") if line.strip())
        if not last:
            return f"{self.how} without a word" if self.reason in _BY_ITSELF else self.how
        return f"{self.how}; its last words: {last[-SHOWN_CHARACTERS:]}"


class LoaderProcess:
    """A running loader, watched. All methods belong to the loop's thread.

    Args:
        session: its session's id.
        on_end: called once when the process has ended.
    """

    def __init__(
        self, loop: Loop, session: int, spawned: Spawned, on_end: Callable[[Ending], None]
    ) -> None:
        self.identity = PeerIdentity(spawned.process.pid, os.getuid(), "loader", None)
        self._stopped: tuple[str, str] | None = None
        self._loop = loop
        self._session = session
        self._process = spawned.process
        self._pidfd = spawned.pidfd
        self._stderr = spawned.stderr
        self._words = self._unfinished = b""
        self._on_end = on_end
        self._ended = False
        loop.add(self._stderr, READ, lambda _events: self._listen(READ_BYTES))
        loop.add(self._pidfd, READ, lambda _events: self._end())

    def stop(self, how: str, reason: str = "loader-too-slow") -> None:
        """Kill it; `on_end` follows, with this `Ending` if it still ran."""
        if not self._ended:
            self._stopped = self._stopped or (how, reason)
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end_soon(self, seconds: float) -> None:
        """It has closed its session: it must end by itself now, or is killed."""
        how = "closed its session, lived on and was ended"
        self._loop.call_later(seconds, lambda: self.stop(how))

    def last_words(self) -> str:
        """The end of what it has printed so far; escaped, it fits into an error's fields."""
        self._listen(PIPE_BYTES)
        return _readable(self._words)

    def join(self, seconds: float) -> None:
        """Wait for a killed process without the loop; for the broker's own end."""
        if not self._ended:
            poller = select.poll()  # select() knows no descriptor above 1023
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(seconds * 1000)
            self._end()

    def _listen(self, most: int) -> None:
        """Take so many bytes of what it has printed."""
        while most > 0:
            try:
                words = os.read(self._stderr, READ_BYTES)
            except BlockingIOError:
                return
            if not words:
                self._loop.remove(self._stderr)
                return
            self._words = (self._words + words)[-LAST_WORDS_BYTES:]
            self._log_lines(words)
            most -= len(words)

    def _log_lines(self, words: bytes, *, last: bool = False) -> None:
        """What it prints is part of the log, as lines of its own, whatever it says."""
        *lines, rest = (self._unfinished + words).split(b"\n")
        if last or len(rest) > LAST_WORDS_BYTES:
            lines, rest = [*lines, rest], b""
        self._unfinished = rest
        for line in lines:
            if line.strip():
                log_event(
                    "loader-said",
                    session=self._session,
                    pid=self.identity.pid,
                    text=line.decode("utf-8", "replace"),
                )

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._end_children()
        self._listen(PIPE_BYTES)
        self._log_lines(b"", last=True)
        code = self._process.wait()
        self._loop.remove(self._stderr)
        self._loop.remove(self._pidfd)
        os.close(self._stderr)
        os.close(self._pidfd)
        how, reason = _how_it_ended(code)
        if self._stopped is not None:
            how, reason = self._stopped
        self._on_end(Ending(how, reason, _readable(self._words)))

    def _end_children(self) -> None:
        """Whatever processes its code has left behind: they may hold the slab's descriptor."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # its group's id is taken until `wait`
        except ProcessLookupError:
            return


def _how_it_ended(code: int) -> tuple[str, str]:
    """What an exit status says, and the word for it."""
    if code >= 0:
        return f"ended with exit code {code}", "loader-exited" if code else FINISHED
    try:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        how = f"was killed by signal {-code}"
    if -code == signal.SIGKILL:
        return f"{how}, by hand or because the machine ran out of memory", "loader-killed"
    return how, "loader-crashed"


def _readable(words: bytes) -> str:
    """Text of whatever a process printed, without what would grow when it is escaped."""
    text = words.decode("utf-8", "replace").encode("ascii", "backslashreplace").decode()
    plain = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return plain[-LAST_WORDS_BYTES:]
