"""A torch-free engine that takes commands as JSON lines and answers in JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.checkpoints.identity import slab_identity
from broker.errors import BrokerError
from engine_client import Checkpoint, EngineClient, WeightSet


class ToldEngine:
    """One method a command."""

    def __init__(self, directory: Path) -> None:
        self.client = EngineClient("simulated", directory=directory, label="told engine")
        self.weights: dict[str, WeightSet] = {}
        self.lost = False
        self.client.on_broker_lost(self._on_lost)

    def _on_lost(self) -> None:
        self.lost = True

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
        """Bytes of slab mappings as the kernel counts them: resident and proportional."""
        totals = {"Rss": 0, "Pss": 0}
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split()[0]
            if not head.endswith(":"):
                inside = "weight-broker-slab" in line
            elif inside and head[:-1] in totals:
                totals[head[:-1]] += int(line.split()[1]) * 1024
        return totals

    def release(self, keep: str = "w") -> None:
        self.weights.pop(keep).release()

    def is_lost(self) -> bool:
        return self.lost

    def status(self) -> dict[str, Any]:
        return self.client.status()


def main() -> None:
    engine = ToldEngine(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        command: Callable[..., Any] = getattr(engine, request.pop("command"))
        try:
            answer: dict[str, Any] = {"ok": command(**request)}
        except BrokerError as error:
            answer = {
                "error": type(error).__name__,
                "sentence": error.sentence,
                "fields": error.fields,
            }
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
