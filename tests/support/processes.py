"""Real brokers and engines in processes of their own, with a limit on every wait."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from engine_client import EngineClient
from engine_client.observer import Observer
from tests.support.clock import SCALE, eventually

START_SECONDS = 20.0
ANSWER_SECONDS = 30.0
ROOT = Path(__file__).resolve().parents[2]


class _Lines:
    """A process's output line by line, with a limit on every wait."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.rstrip("\n"))
        stream.close()
        self._lines.put(None)

    def next(self, seconds: float, what: str) -> str:
        try:
            line = self._lines.get(timeout=seconds * SCALE)
        except queue.Empty:
            raise AssertionError(f"within {seconds * SCALE} s: {what} said nothing") from None
        if line is None:
            raise EOFError(f"{what} has ended")
        return line


class RunningBroker:
    """`weight-broker serve` in a process of its own, on the simulated device by default."""

    def __init__(self, directory: Path, *options: str, device: str = "simulated") -> None:
        self.directory = directory
        self.log = directory / "broker.log"
        self._log_file = self.log.open("w")
        always = ("--device", device, "--dir", str(directory))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "broker", "serve", *always, *options],
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdout is not None
        self._lines = _Lines(self.process.stdout)
        try:
            self.ready_line = self._lines.next(START_SECONDS, "the broker")
        except EOFError as error:
            self.process.wait()
            raise AssertionError(f"the broker did not start:\n{self.log.read_text()}") from error

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, **options: Any) -> EngineClient:
        return EngineClient("simulated", directory=self.directory, **options)

    def observer(self) -> Observer:
        return Observer(directory=self.directory)

    def status(self) -> dict[str, Any]:
        with self.observer() as observer:
            return observer.status()

    def counter(self, name: str) -> int:
        count: int = self.status()["counters"].get(name, 0)
        return count

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it in order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(START_SECONDS * SCALE)
        self._log_file.close()
        return code

    def children(self) -> list[int]:
        """Pids of the loaders that run now."""
        path = Path(f"/proc/{self.pid}/task")
        pids: list[int] = []
        for task in path.iterdir():
            pids += map(int, (task / "children").read_text().split())
        return pids


class Engine:
    """An engine in a process of its own that does what it is told (tests/support/engine.py)."""

    def __init__(self, broker: RunningBroker, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine", str(broker.directory), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input = self.process.stdin
        self._lines = _Lines(self.process.stdout)

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

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int, seconds: float = 5.0) -> None:
    eventually(lambda: not is_alive(pid), seconds, f"the end of process {pid}")


def open_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
