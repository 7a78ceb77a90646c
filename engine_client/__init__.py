"""The engine side of the weight broker.

    from engine_client import Checkpoint, EngineClient

Names are imported when they are first used; torch only with `parameters_on_meta` or a first tensor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.weights import WeightKey as WeightKey
    from engine_client.checkpoint import Checkpoint as Checkpoint
    from engine_client.client import EngineClient as EngineClient
    from engine_client.construction import parameters_on_meta as parameters_on_meta
    from engine_client.watching import BrokerStopping as BrokerStopping
    from engine_client.watching import Evicted as Evicted
    from engine_client.watching import NewGeneration as NewGeneration
    from engine_client.weight_set import WeightSet as WeightSet

_HOMES = {
    "BrokerStopping": "engine_client.watching",
    "Checkpoint": "engine_client.checkpoint",
    "EngineClient": "engine_client.client",
    "Evicted": "engine_client.watching",
    "NewGeneration": "engine_client.watching",
    "WeightKey": "broker.weights",
    "WeightSet": "engine_client.weight_set",
    "parameters_on_meta": "engine_client.construction",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine_client' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
