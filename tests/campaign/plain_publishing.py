"""Stands in for engine_client/publishing.py in engines without torch: tensors are plain bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from broker.devices.base import Device
from broker.weights import Manifest
from engine_client import WeightSet
from tests.campaign.content import manifest_of, write_into

before_writing: list[Callable[[], None]] = []
"""What an engine is to do once it holds the memory and has written nothing."""


@dataclass
class Publication:
    manifest: Manifest
    tensors: Mapping[str, bytes]
    dtype: str = "uint8"


def plan_publication(
    tensors: Mapping[str, bytes], metadata: Mapping[str, Any] | None = None
) -> Publication:
    manifest = manifest_of(tensors)
    manifest.metadata = dict(metadata or {})
    return Publication(manifest, tensors)


def write_publication(
    publication: Publication,
    _device: Device,
    slab: int,
    _nbytes: int,
    report: Callable[[int, int], None],
) -> None:
    while before_writing:
        before_writing.pop()()
    write_into(slab, publication.manifest, publication.tensors)
    report(publication.manifest.nbytes, publication.manifest.nbytes)


def rebind(_source: object, _weights: WeightSet) -> None:
    """Bytes are bound to nothing."""


def stand_in() -> None:
    """From now on this process publishes plain bytes."""
    sys.modules["engine_client.publishing"] = sys.modules[__name__]
