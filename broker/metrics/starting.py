"""A server begins to serve metrics, if it was given a listener; only then is what that needs
imported."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import TYPE_CHECKING

from broker.logs import log_event

if TYPE_CHECKING:
    from broker.metrics.endpoint import Endpoint
    from broker.server import Server


def serve_metrics(broker: Server, listener: int | None) -> Endpoint | None:
    """Answer scrapers on the server's loop; None where nobody asked for it, or it cannot be.

    Args:
        listener: descriptor of the listening socket; owned from now on.
    """
    if listener is None:
        return None
    given = socket.socket(fileno=listener)
    try:
        from broker.metrics.endpoint import Endpoint
        from broker.metrics.snapshot import take_snapshot
    except ImportError as error:  # the keeper has found it, so it has gone since
        log_event("metrics-failed", level=logging.ERROR, cause=error)
        given.close()
        return None
    return Endpoint(broker.loop, given, partial(take_snapshot, broker))
