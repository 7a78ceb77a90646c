"""A torch-free engine that takes commands as JSON lines and answers in JSON lines."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.checkpoints.identity import slab_identity
from broker.errors import BrokerError
from engine_client import Checkpoint, EngineClient, WeightSet
from engine_client.watching import Watch

NOBODY = 65534


class ToldEngine:
    """One method a command."""

    def __init__(self, directory: Path, device: str | None = "simulated") -> None:
        self.client = EngineClient(device, directory=directory, label="told engine")
        self.weights: dict[str, WeightSet] = {}
        self.watches: list[Watch] = []
        self.lost_at: float | None = None
        self.client.on_broker_lost(self._on_lost)

    def _on_lost(self) -> None:
        self.lost_at = time.time()

    # --- weights --------------------------------------------------------------------------

    def acquire(
        self, path: str, name: str | None = None, keep: str = "w", **options: Any
    ) -> dict[str, Any]:
        weights = self.client.acquire(Checkpoint(path, name), **options)
        return self._keep(keep, weights)

    def acquire_name(self, name: str, keep: str = "w", **options: Any) -> dict[str, Any]:
        return self._keep(keep, self.client.acquire(name, **options))

    def _keep(self, keep: str, weights: WeightSet) -> dict[str, Any]:
        self.weights[keep] = weights
        return {
            "set": weights.set_id,
            "how": weights.how,
            "checkpoint": weights.key.checkpoint,
            "generation": weights.generation,
            "nbytes": weights.nbytes,
        }

    def identity(self, keep: str = "w") -> str:
        weights = self.weights[keep]
        return slab_identity(weights.manifest, weights.slab_memory())

    def touch(self, keep: str = "w") -> int:
        """Read one byte of every page, as an engine would by using the weights."""
        return sum(self.weights[keep].slab_memory()[::4096])

    def mapped(self) -> dict[str, int]:
        return mapped_slabs()

    def release(self, keep: str = "w") -> None:
        self.weights.pop(keep).release()

    def have_events(self, name: str) -> None:
        """Have events sent, and never look at them."""
        self.watches.append(self.client.watch(name))

    # --- its surroundings -----------------------------------------------------------------

    def lost(self) -> float | None:
        """When `on_broker_lost` called back (Unix time)."""
        return self.lost_at

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def become_nobody(self) -> None:
        """Give up root's right to read everything."""
        os.seteuid(NOBODY)

    def run_out_of_address_space(self) -> None:
        """From now on nothing large can be mapped."""
        import resource

        _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))

    # --- children -------------------------------------------------------------------------

    def fork(self, keep: str = "w") -> dict[str, Any]:
        """Fork a child that drops a view, tries everything a client can do, says how it went, and
        lives on.

        At that moment another thread is inside the client, and so for ever in the child.
        """
        reader, writer = os.pipe()
        views = [self.weights[keep].slab_memory()]
        inside, leave = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._stay_inside, args=(keep, inside, leave))
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            views.clear()
            os.write(writer, json.dumps(self._tries_in_child(keep)).encode())
            os.close(writer)
            signal.pause()
            os._exit(0)
        leave.set()
        thread.join()
        os.close(writer)
        said = b"".join(iter(lambda: os.read(reader, 65536), b""))
        os.close(reader)
        return {"child": child, "tries": json.loads(said)}

    def _stay_inside(self, keep: str, inside: threading.Event, leave: threading.Event) -> None:
        weights = self.weights[keep]
        with weights._lock, weights._lease._lock:
            inside.set()
            leave.wait()

    def _tries_in_child(self, keep: str) -> dict[str, str]:
        weights = self.weights[keep]
        tries: dict[str, Callable[[], Any]] = {
            "status": self.client.status,
            "acquire": lambda: self.client.acquire("some name"),
            "memory": weights.slab_memory,
            "on_broker_lost": lambda: self.client.on_broker_lost(lambda: None),
            "release": weights.release,
            "close": self.client.close,
        }
        return {name: _outcome(attempt) for name, attempt in tries.items()}

    def fork_unseen(self) -> int:
        """Fork as a library in C would: Python's hooks for forked children do not run."""
        libc = ctypes.PyDLL(None)  # the GIL must not be another thread's in the child
        child: int = libc.fork()
        if child == 0:
            libc.pause()
            libc._exit(0)
        return child


def mapped_slabs() -> dict[str, int]:
    """Bytes of this process's slab mappings as the kernel counts them: resident, proportional."""
    totals = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            inside = "weight-broker-slab" in line
        elif inside and head[:-1] in totals:
            totals[head[:-1]] += int(line.split()[1]) * 1024
    return totals


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except BrokerError as error:
        return f"{type(error).__name__}: {error.sentence}"
    return "done"


def obey(engine: ToldEngine) -> None:
    """Do what standard input says, one line after the other, until it ends."""
    for line in sys.stdin:
        request = json.loads(line)
        command: Callable[..., Any] = getattr(engine, request.pop("command"))
        try:
            answer: dict[str, Any] = {"ok": command(**request)}
        except (BrokerError, ValueError) as error:
            answer = {
                "error": type(error).__name__,
                "sentence": str(error),
                "fields": getattr(error, "fields", {}),
            }
        print(json.dumps({**answer, "at": time.time()}, default=str), flush=True)


def main() -> None:
    obey(ToldEngine(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
