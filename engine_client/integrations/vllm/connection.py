"""One client a process and device, for as long as the process lives: it holds the leases."""

from __future__ import annotations

import logging
import os
import threading

from engine_client.client import EngineClient
from engine_client.integrations.vllm.options import Options

_clients: dict[tuple[int, str, str | None, str | None], EngineClient] = {}
_lock = threading.Lock()


def client_for(options: Options, device: str, logger: logging.Logger) -> EngineClient:
    """This process's client, made when it is first needed and when its broker was lost.

    Args:
        device: as `EngineClient` takes it.

    Raises:
        What `EngineClient` raises.
    """
    key = (os.getpid(), device, options.broker, options.directory)
    with _lock:
        client = _clients.get(key)
        if client is None or not client.is_connected:
            client = _connect(options, device)
            client.on_broker_lost(lambda: _warn(logger))
            _clients[key] = client
        return client


def _connect(options: Options, device: str) -> EngineClient:
    if options.broker is None:
        return EngineClient(device, directory=options.directory, label="vllm")
    return EngineClient(device, broker=options.broker, directory=options.directory, label="vllm")


def _warn(logger: logging.Logger) -> None:
    logger.warning(
        "weight broker: the broker is gone. Weights that are mapped stay valid and this engine "
        "goes on serving; it will load anew when it is started again."
    )
