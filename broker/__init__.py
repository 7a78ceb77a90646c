"""The weight broker: one daemon per node holds model weights for many inference engines.

Names are imported when they are first used: `import broker` alone loads neither zmq nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.config import BrokerConfig as BrokerConfig
    from broker.errors import UnsupportedPlatformForIPCError as UnsupportedPlatformForIPCError
    from broker.errors import UnsupportedQuantForIPCError as UnsupportedQuantForIPCError
    from broker.platform import check_ipc_platform_support as check_ipc_platform_support
    from broker.quantization import check_ipc_quant_support as check_ipc_quant_support
    from broker.quantization import register_ipc_quantization as register_ipc_quantization
    from broker.service import Broker as Broker

VERSION = "0.1.0"

_HOMES = {
    "Broker": "broker.service",
    "BrokerConfig": "broker.config",
    "UnsupportedPlatformForIPCError": "broker.errors",
    "UnsupportedQuantForIPCError": "broker.errors",
    "check_ipc_platform_support": "broker.platform",
    "check_ipc_quant_support": "broker.quantization",
    "register_ipc_quantization": "broker.quantization",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'broker' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
