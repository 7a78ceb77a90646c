"""Snapshots for tests, and pages taken apart by the library's own parser."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from broker.metrics.endpoint import Page
from broker.metrics.measures import LOAD_SECONDS, Histogram
from broker.metrics.snapshot import Snapshot

TEXT = "text/plain"


def snapshot(**changed: Any) -> Snapshot:
    """A broker that holds nothing, but for what a test says."""
    idle = Snapshot(
        version="0",
        name="default",
        platform="simulated",
        started=1.0,
        server_started=2.0,
        slowest_turn=0.0,
        devices={"SIM-0": {"leased": 0, "idle": 0, "reserved": 0, "free": 8, "limit": 8}},
        states=Counter(),
        sets=[],
        engines=0,
        loaders=0,
        sessions=[],
        leases=0,
        waiting={"acquire": (0, 0.0)},
        loads_queued=0,
        connections=0,
        counters={},
        requests={},
        request_errors=Counter(),
        load_seconds=Histogram(LOAD_SECONDS),
        loaded_bytes=0,
        load_failures=Counter(),
        publication_failures=Counter(),
    )
    return dataclasses.replace(idle, **changed)


class Samples:
    """The samples of a page."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._samples = [sample for family in self.families for sample in family.samples]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Samples:
        return cls(Page(snapshot).text(TEXT)[1].decode())

    def values(self, name: str, /, **labels: str) -> list[float]:
        """Of all samples of this name, without the prefix, that have these labels."""
        return [
            sample.value
            for sample in self._samples
            if sample.name == f"weight_broker_{name}" and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, /, **labels: str) -> float:
        """Of the only such sample."""
        (value,) = self.values(name, **labels)
        return float(value)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        return [each.labels for each in self._samples if each.name == f"weight_broker_{name}"]
