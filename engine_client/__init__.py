"""The engine side of the weight broker.

    from engine_client import Checkpoint, EngineClient, NotFound

Names are imported when they are first used; torch only with `parameters_on_meta` or a first tensor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.errors import BadRequest as BadRequest
    from broker.errors import BindError as BindError
    from broker.errors import BrokerError as BrokerError
    from broker.errors import BrokerLost as BrokerLost
    from broker.errors import BrokerNotFound as BrokerNotFound
    from broker.errors import Busy as Busy
    from broker.errors import Cancelled as Cancelled
    from broker.errors import InternalError as InternalError
    from broker.errors import LoadFailed as LoadFailed
    from broker.errors import Mismatch as Mismatch
    from broker.errors import NoSession as NoSession
    from broker.errors import NotFound as NotFound
    from broker.errors import OverBudget as OverBudget
    from broker.errors import ProtocolMismatch as ProtocolMismatch
    from broker.errors import RequestTimeout as RequestTimeout
    from broker.errors import ShuttingDown as ShuttingDown
    from broker.errors import StaleEpoch as StaleEpoch
    from broker.errors import UnknownOperation as UnknownOperation
    from broker.errors import UnsupportedPlatformForIPCError as UnsupportedPlatformForIPCError
    from broker.errors import UnsupportedQuantForIPCError as UnsupportedQuantForIPCError
    from broker.errors import UsageError as UsageError
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
    **dict.fromkeys(
        (
            "BadRequest",
            "BindError",
            "BrokerError",
            "BrokerLost",
            "BrokerNotFound",
            "Busy",
            "Cancelled",
            "InternalError",
            "LoadFailed",
            "Mismatch",
            "NoSession",
            "NotFound",
            "OverBudget",
            "ProtocolMismatch",
            "RequestTimeout",
            "ShuttingDown",
            "StaleEpoch",
            "UnknownOperation",
            "UnsupportedPlatformForIPCError",
            "UnsupportedQuantForIPCError",
            "UsageError",
        ),
        "broker.errors",
    ),
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine_client' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
