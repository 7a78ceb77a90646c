"""The log: one line an event, to standard error."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """One line an event."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("weight-broker")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
