"""An engine without torch that does what it is told, several things at once, and reads meanwhile.

Engines are forked from one process that has imported everything, so that thousands can come and go.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from broker.errors import BrokerError
from engine_client import Checkpoint, EngineClient, WeightSet
from tests.campaign import plain_publishing
from tests.campaign.content import contents, tag_of

THREADS = 8
WAIT_FOR_THREADS_SECONDS = 0.001


class CampaignEngine:
    """One method a command. Weights are held in numbered slots."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._client: EngineClient | None = None
        self._held: dict[int, WeightSet] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._lost_at: float | None = None
        self._passes = 0
        self._slowest = 0.0
        self._damage: list[str] = []

    def connect(self) -> int:
        """A new client; what the one before has mapped stays mapped until it is released."""
        client = EngineClient("simulated", directory=self._directory, label="campaign")
        client.on_broker_lost(self._on_lost)
        self._client, self._lost_at = client, None
        return client._session.number

    def reconnect(self) -> dict[str, int]:
        """As `connect`, but give back everything first."""
        self.close()
        return {"pid": os.getpid(), "session": self.connect()}

    def _on_lost(self) -> None:
        self._lost_at = time.time()

    @property
    def client(self) -> EngineClient:
        assert self._client is not None
        return self._client

    # --- weights --------------------------------------------------------------------------

    def acquire(
        self, slot: int, path: str, name: str | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        return self._hold(slot, self.client.acquire(Checkpoint(path, name), timeout=timeout))

    def connect_and_acquire(self, slot: int, path: str) -> dict[str, Any]:
        self.connect()
        return self.acquire(slot, path)

    def acquire_name(self, slot: int, name: str, timeout: float | None = None) -> dict[str, Any]:
        return self._hold(slot, self.client.acquire(name, timeout=timeout))

    def publish(
        self,
        slot: int,
        name: str,
        tag: str,
        nbytes: int,
        generation: str | None = None,
        pause: str = "",
    ) -> dict[str, Any]:
        """`pause`: "stop" or "die" once the memory is there, and nothing written yet."""
        self._pause_before_writing(pause)
        made = contents(tag, nbytes)
        weights = self.client.publish(name, made, generation=generation)  # type: ignore[arg-type]
        return self._hold(slot, weights)

    def get_or_publish(
        self, slot: int, name: str, tag: str, nbytes: int, pause: str = ""
    ) -> dict[str, Any]:
        self._pause_before_writing(pause)
        weights = self.client.get_or_publish(name, lambda: contents(tag, nbytes))  # type: ignore[arg-type,return-value]
        return self._hold(slot, weights)

    def _pause_before_writing(self, pause: str) -> None:
        number = {"stop": signal.SIGSTOP, "die": signal.SIGKILL}.get(pause)
        plain_publishing.before_writing.clear()
        if number is not None:
            # Of this thread: one of the process may stop it only after the writing.
            plain_publishing.before_writing.append(lambda: signal.raise_signal(number))

    def _hold(self, slot: int, weights: WeightSet) -> dict[str, Any]:
        with self._lock:
            assert slot not in self._held, f"slot {slot} is taken"
            self._held[slot] = weights
        return {
            "tag": tag_of(weights),
            "set": weights.set_id,
            "how": weights.how,
            "generation": weights.generation,
            "nbytes": weights.nbytes,
            "address": weights._lease.mapping.address,
        }

    def release(self, slot: int) -> None:
        with self._reading, self._lock:
            self._held.pop(slot).release()

    def swap(self, slot: int, name: str) -> bool:
        """Hold the newest generation instead of an older one; whether it was another."""
        newest = self.client.acquire(name)
        tag_of(newest)
        with self._reading, self._lock:
            older = self._held.get(slot)
            if older is not None and older.set_id == newest.set_id:
                newest.release()
                return False
            self._held[slot] = newest
            if older is not None:
                older.release()
        return True

    def acquire_and_release(self, path: str, seconds: float) -> int:
        """Over and over for so long; how often."""
        limit, times = time.monotonic() + seconds, 0
        while time.monotonic() < limit:
            with self.client.acquire(Checkpoint(path)) as weights:
                tag_of(weights)
            times += 1
        return times

    def check(self) -> dict[int, dict[str, Any]]:
        """Read every byte that is held: what each slot says it is."""
        with self._reading:
            with self._lock:
                held = dict(self._held)
            return {
                slot: {
                    "tag": tag_of(weights),
                    "set": weights.set_id,
                    "nbytes": weights.nbytes,
                    "address": weights._lease.mapping.address,
                }
                for slot, weights in held.items()
            }

    def fork_unseen(self) -> int:
        """Fork as a library in C would, without Python's hooks: the child holds what we hold."""
        libc = ctypes.PyDLL(None)  # the GIL must not be another thread's in the child
        child: int = libc.fork()
        if child == 0:
            libc.pause()
            libc._exit(0)
        return child

    # --- reading on and on ----------------------------------------------------------------

    def read_on(self) -> None:
        """From now on read everything that is held over and over."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.check()
            except AssertionError as error:
                self._damage.append(str(error))
            self._slowest = max(self._slowest, time.monotonic() - began)
            self._passes += 1
            time.sleep(WAIT_FOR_THREADS_SECONDS)

    def readings(self) -> dict[str, Any]:
        return {"passes": self._passes, "slowest": self._slowest, "damage": self._damage}

    # --- its broker -----------------------------------------------------------------------

    def lost_at(self) -> float | None:
        """When `on_broker_lost` called back (Unix time)."""
        return self._lost_at

    def ping(self) -> float:
        """Seconds that it took, however long."""
        began = time.monotonic()
        self.client.ping(timeout=None)
        return time.monotonic() - began

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def evict(self, which: str) -> list[int]:
        return list(self.client.evict(which).sets)

    def pin(self, which: str) -> list[int]:
        return list(self.client.pin(which).sets)

    def channel(self) -> dict[str, Any]:
        """Where its channel stands, for a message."""
        channel = self.client._session._channel
        resuming = channel._resuming
        return {
            "end": repr(channel.end),
            "resuming": None if resuming is None else resuming.packet_sent,
            "calls": [call.frames and call.frames[2:3] for call in channel._calls.values()],
            "attaches": list(channel._attaches),
            "outgoing": len(channel._outgoing),
        }

    def close(self) -> None:
        """End the client; without its tensors nothing stays mapped."""
        with self._lock:
            self._held.clear()
        self.client.close()


def run_engine(connection: Connection, directory: str) -> None:
    """The engine's process: (number, command, arguments) in, (number, outcome …) out."""
    engine = CampaignEngine(Path(directory))
    plain_publishing.stand_in()
    answering = threading.Lock()

    def do(number: int, command: str, arguments: dict[str, Any]) -> None:
        outcome = _outcome(getattr(engine, command), arguments)
        with answering:
            connection.send((number, *outcome, time.time()))

    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            try:
                number, command, arguments = connection.recv()
            except (EOFError, ConnectionResetError):
                os._exit(0)  # threads may be waiting for the broker
            pool.submit(do, number, command, arguments)


def _outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, Any, str]:
    """("ok", result, ""), or the error's class and its sentence."""
    try:
        return "ok", call(**arguments), ""
    except BrokerError as error:
        return type(error).__name__, error.fields, error.sentence
    except Exception:  # noqa: BLE001 - whatever it is, the campaign has lost something
        return "crash", None, traceback.format_exc()
