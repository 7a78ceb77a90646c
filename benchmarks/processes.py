"""Processes that are measured: brokers, workers that do as they are told, the kernel's word."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.closing import Closeable

ROOT = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary one, beside the other temporary files: its path must be short (sockets)."""
    path = Path(tempfile.mkdtemp(prefix="wb-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Broker(Closeable):
    """`weight-broker serve` on the simulated device, as a user starts it."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._log = (directory / "broker.log").open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "broker", "serve", *_serve_options(directory), *options],
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            text=True,
        )
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        self.ready_line = self._process.stdout.readline()
        if not self.ready_line:
            self._process.wait()
            raise RuntimeError((directory / "broker.log").read_text())

    @property
    def keeper(self) -> int:
        """The pid of the process that was started."""
        return self._process.pid

    @property
    def server(self) -> int:
        """The pid of the process that answers."""
        return int(self.ready_line.partition("server_pid=")[2])

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.keeper) + cpu_seconds(self.server)

    def close(self) -> None:
        """Stop it and wait until it is gone."""
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None  # noqa: S101 - as above
        self._process.stdout.close()
        self._log.close()


def _serve_options(directory: Path) -> tuple[str, ...]:
    return ("--device", "simulated", "--dir", str(directory))


class Worker(Closeable):
    """A process of a benchmark's other half: `python -m MODULE worker ARGUMENTS`.

    It answers each command, one line of JSON, with another.
    """

    def __init__(self, module: str, *arguments: str, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, "-m", module, "worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        """Start a command; `answer` waits for its end."""
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {' '.join(map(str, self._process.args))} has ended")  # type: ignore[arg-type]
        return json.loads(line)

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def close(self) -> None:
        """End it and wait until it is gone."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None  # noqa: S101 - both were asked for
            stream.close()
        self._process.wait(60)


def work(commands: Mapping[str, Callable[..., Any]]) -> None:
    """A worker's life: do what standard input says until it ends."""
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(commands[given.pop("command")](**given)), flush=True)


# --- what the kernel says ------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads so far, in nanoseconds' steps (proc(5), schedstat)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by the names of /proc/PID/status ("kB" is 1024 bytes) that begin with "Vm"."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name.startswith("Vm")
    }


def proportional_bytes(pid: int, name: str) -> int:
    """Pss of the mappings whose name contains this (/proc/PID/smaps)."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counts = name in line
        elif counts and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total
