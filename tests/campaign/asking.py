"""`status` from whatever server answers first, however many die meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import zmq

from broker import wire
from tests.support.clock import SCALE

TRY_SECONDS = 1.0


def ask_status(directory: Path, seconds: float = 20.0) -> dict[str, Any]:
    """The books of the broker in this directory, without a session that would be on them.

    Raises:
        AssertionError: no server has answered.
    """
    limit = time.monotonic() + seconds * SCALE
    context = zmq.Context()
    try:
        while time.monotonic() < limit:
            report = _ask_once(context, directory)
            if report is not None:
                return report
    finally:
        context.term()
    raise AssertionError(f"status had no answer in {seconds * SCALE} s")


def _ask_once(context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> dict[str, Any] | None:
    with context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"ipc://{directory}/default.zmq")
        dealer.send_multipart([b"status", b""])
        if not dealer.poll(int(TRY_SECONDS * SCALE * 1000)):
            return None
        status, payload = dealer.recv_multipart()
    assert status == b"ok", (status, payload)
    return wire.as_plain(wire.decode_reply(wire.StatusReport, payload))
