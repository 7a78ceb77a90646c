"""Real brokers and engines in processes of their own, with a limit on every wait."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import IO, Any

from broker import wire
from broker.closing import Closeable
from engine_client import EngineClient
from engine_client.observer import Observer
from tests.support.clock import SCALE, eventually
from tests.support.raw import RawDealer
from tests.support.warm_start import ROOT as ROOT  # whoever starts processes wants it too
from tests.support.warm_start import WarmProcess

START_SECONDS = 20.0
ANSWER_SECONDS = 30.0
RIGHT_SECONDS = 1.0
"""Within this the books are right again after a death (DESIGN promise 5, issue of the whole)."""
LOADER_FAULTS = Path(__file__).parent / "loader_faults"


class LoaderFault(str, Enum):
    """What a broker's next loaders do wrong (loader_faults/sitecustomize.py)."""

    STOPS_AT_START = "stops at start"
    """SIGSTOP before its first word: a load as slow as a test wants it. `let_loader_go` ends it."""
    STOPS_WHILE_WRITING = "stops while writing"
    DIES_WHILE_WRITING = "dies while writing"
    FINDS_THE_DEVICE_FULL = "finds the device full"
    FINDS_NO_MEMORY = "finds no memory"
    FINDS_THE_DISK_BROKEN = "finds the disk broken"
    FINDS_THE_FILE_SERVER_GONE = "finds the file server gone"
    WRITES_ZEROS = "writes zeros"
    """Reads and digests the checkpoint as it should, but its first piece arrives as zeros."""


class Lines:
    """A process's output line by line, with a limit on every wait."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.rstrip("\n"))
        stream.close()
        self._lines.put(None)

    def has_next(self) -> bool:
        return not self._lines.empty()

    def next(self, seconds: float, what: str) -> str:
        try:
            line = self._lines.get(timeout=seconds * SCALE)
        except queue.Empty:
            raise AssertionError(f"within {seconds * SCALE} s: {what} said nothing") from None
        if line is None:
            raise EOFError(f"{what} has ended")
        return line


def _started(
    module: str,
    *arguments: str,
    within: Sequence[str] = (),
    cold: bool = False,
    environ: Mapping[str, str] | None = None,
    has_input: bool = False,
    stderr: int = 2,
) -> subprocess.Popen[str] | WarmProcess:
    """`python -m MODULE ARGUMENTS`, forked unless it is to be cold or within another command."""
    if not (cold or within):
        return WarmProcess(module, *arguments, environ=environ, has_input=has_input, stderr=stderr)
    return subprocess.Popen(
        [*within, sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE if has_input else None,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env=environ,
        text=True,
    )


class RunningBroker:
    """`weight-broker serve` with processes of its own, on the simulated device by default.

    `pid` and `process` are the keeper's, which is the one to send signals to; `server_pid()` is of
    the process it has started to answer engines. `within` is the beginning of a command that runs
    another. `cold` is one that imports everything itself, as any does that is run in a way of its
    own; the others are forked (tests/support/warm.py).
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        device: str = "simulated",
        environ: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
        cold: bool = False,
    ) -> None:
        self.directory = directory
        self.log = directory / "broker.log"
        self._log_file = self.log.open("a")
        self._loader_order = directory / "loader-order"
        self._dealer: RawDealer | None = None
        arguments = ("serve", "--device", device, "--dir", str(directory), *options)
        environment = {
            **os.environ,
            "PYTHONPATH": str(LOADER_FAULTS),
            "WEIGHT_BROKER_TEST_LOADER": str(self._loader_order),
            **(environ or {}),
        }
        self.process = _started(
            "broker",
            *arguments,
            within=within,
            cold=cold or bool(environ),
            environ=environment,
            stderr=self._log_file.fileno(),
        )
        assert self.process.stdout is not None
        self._lines = Lines(self.process.stdout)
        try:
            self.ready_line = self._lines.next(START_SECONDS, "the broker")
        except (EOFError, AssertionError) as error:
            self.kill()
            raise AssertionError(f"the broker did not start:\n{self.log.read_text()}") from error

    @property
    def pid(self) -> int:
        return self.process.pid

    def server_pid(self) -> int:
        pid: int = self.status()["broker"]["pid"]
        return pid

    def log_lines(self) -> list[str]:
        """The log's whole lines: one that is being written is seen in parts, a page at a time."""
        whole, _newline, _begun = self.log.read_text().rpartition("\n")
        return whole.splitlines()

    def client(self, **options: Any) -> EngineClient:
        return EngineClient("simulated", directory=self.directory, **options)

    def observer(self) -> Observer:
        return Observer(directory=self.directory)

    def status(self) -> dict[str, Any]:
        """As `weight-broker status --json` has it, without a session that would be in it."""
        if self._dealer is None:
            self._dealer = RawDealer(self.directory)
        status, payload = self._dealer.ask(b"status", b"")
        assert status == b"ok", payload
        return wire.as_plain(wire.decode_reply(wire.StatusReport, payload))

    def counter(self, name: str) -> int:
        count: int = self.status()["counters"].get(name, 0)
        return count

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        self.process.kill()
        self._ended()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it in order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self._ended()

    def _ended(self) -> int:
        try:
            return self.process.wait(START_SECONDS * SCALE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the broker did not end:\n{self.log.read_text()}") from None
        finally:
            self._log_file.close()
            if self._dealer is not None:
                self._dealer.close()

    # --- what it holds --------------------------------------------------------------------

    def counts(self) -> Counts:
        """What its books count from now on."""
        return Counts(self)

    def free_bytes(self) -> int:
        """Bytes of the device that its books call free."""
        (device,) = self.status()["devices"].values()
        free: int = device["free"]
        return free

    def evict_all(self) -> None:
        """Have it forget every set: freed now, or with the last lease."""
        with self.observer() as observer:
            for entry in self.status()["sets"]:
                observer.evict(str(entry["id"]))

    def waiting(self) -> int:
        """Requests that wait for weights."""
        return sum(entry["waiting"] for entry in self.status()["sets"])

    def leases(self) -> int:
        """How many there are. One that was let go of is perhaps still among them: its engine does
        not wait for the broker."""
        return sum(len(entry["leases"]) for entry in self.status()["sets"])

    def slabs(self) -> int:
        """Slabs that keeper or server really hold, by the kernel's word."""
        return len({slab for pid in self.processes() for slab in held_slabs(pid)})

    def open_descriptors(self) -> int:
        return sum(len(descriptors(pid)) for pid in self.processes())

    def resident_bytes(self) -> int:
        return sum(map(resident_bytes, self.processes()))

    def processes(self) -> tuple[int, int]:
        """Pids of keeper and server."""
        return self.pid, self.server_pid()

    # --- its loaders ----------------------------------------------------------------------

    def order_loaders(self, fault: LoaderFault | None) -> None:
        """What loaders that start from now on do wrong; None: nothing."""
        if fault is None:
            self._loader_order.unlink(missing_ok=True)
        else:
            self._loader_order.write_text(fault.value)

    def loaders(self) -> list[int]:
        """Pids of the loaders that run now."""
        return [entry["pid"] for entry in self.status()["sessions"] if entry["loader"]]

    def stopped_loader(self) -> int:
        """The pid of the loader that has stopped itself as it was ordered to."""

        def stopped() -> int:
            pids = [pid for pid in self.loaders() if process_state(pid) == "T"]
            return pids[0] if pids else 0

        return eventually(stopped, START_SECONDS, "a loader's stop")

    def let_loader_go(self) -> None:
        """Let the stopped loader go on; later ones do nothing wrong."""
        pid = self.stopped_loader()
        self.order_loaders(None)
        os.kill(pid, signal.SIGCONT)


class Counts:
    """What happens at a broker after this was made: many tests share one."""

    def __init__(self, broker: RunningBroker) -> None:
        self._broker = broker
        self._before = broker.status()["counters"]

    def added(self, counter: str) -> int:
        return self._broker.counter(counter) - int(self._before.get(counter, 0))


class Engine(Closeable):
    """An engine in a process of its own that does what it is told (tests/support/engine.py)."""

    def __init__(
        self,
        broker: RunningBroker,
        *options: str,
        within: Sequence[str] = (),
        directory: Path | None = None,
    ) -> None:
        arguments = (str(directory or broker.directory), *options)
        self.process = _started("tests.support.engine", *arguments, within=within, has_input=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input = self.process.stdin
        self._lines = Lines(self.process.stdout)

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        """Start a command; `answer` waits for its end."""
        self._input.write(json.dumps({"command": command, **arguments}) + "\n")
        self._input.flush()

    def answer(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """`{"ok": …}` or `{"error": class name, "sentence": …, "fields": …}`."""
        answer: dict[str, Any] = json.loads(self._lines.next(seconds, f"engine {self.pid}"))
        return answer

    def has_answered(self) -> bool:
        """Whether `answer` would return at once."""
        return self._lines.has_next()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Do a command that is expected to succeed; its result."""
        self.tell(command, **arguments)
        answer = self.answer()
        assert "ok" in answer, answer
        return answer["ok"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end by itself (end of its input), or kill it."""
        if self.process.poll() is None:
            self._input.close()
            try:
                self.process.wait(5 * SCALE)
            except subprocess.TimeoutExpired:
                self.kill()
        else:
            self._input.close()


def process_state(pid: int) -> str:
    """The kernel's letter for what the process does (proc(5)); "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return process_state(pid) not in ("", "Z", "X")


def wait_until_gone(pid: int, seconds: float = 5.0) -> None:
    eventually(lambda: not is_alive(pid), seconds, f"the end of process {pid}")


def descriptors(pid: int) -> list[str]:
    """What each of a process's descriptors leads to."""
    return [target for link in Path(f"/proc/{pid}/fd").iterdir() if (target := _target(link))]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


def held_slabs(pid: int) -> set[int]:
    """Slabs that a process has descriptors of, by the number of their memory file."""
    return {
        inode
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if "weight-broker-slab" in _target(link) and (inode := _inode(link))
    }


def _inode(link: Path) -> int:
    try:
        return link.stat().st_ino
    except FileNotFoundError:  # closed meanwhile
        return 0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (VmRSS; "kB" is 1024 bytes, proc(5))."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no resident memory")


def processes_of(directory: Path) -> list[int]:
    """Brokers of this directory and their loaders, whoever their parent is now."""
    mark, log = f"WEIGHT_BROKER_TEST_LOADER={directory}/".encode(), f"{directory}/broker.log"
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [
        pid
        for pid in pids
        if (mark in _environment(pid) or _error_output(pid) == log) and is_alive(pid)
    ]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile, or not ours
        return b""


def _error_output(pid: int) -> str:
    """Where its standard error goes: a forked broker has the environment of another."""
    try:
        return os.readlink(f"/proc/{pid}/fd/2")  # noqa: PTH115
    except OSError:  # gone meanwhile, or not ours
        return ""
