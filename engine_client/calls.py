"""What an engine says to its broker, and how a packet goes out."""

from __future__ import annotations

import array
import queue
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_client.descriptors import Descriptor


@dataclass(eq=False)
class Call:
    """Something said to the broker, until it is settled.

    Attributes:
        packet, descriptor: sent first on the session socket.
        frames: the request, its id first; None for an `attach`, which is a packet alone.
        lease: what an `attach` is for.
        is_repeated: a new server is asked again; if not, `StaleEpoch` answers one that was sent.
        arrived: what came, as (status, payload); None if nobody waits for it.
    """

    packet: bytes | None = None
    descriptor: Descriptor | None = None
    frames: list[bytes] | None = None
    lease: str = ""
    arrived: queue.SimpleQueue[tuple[str, Any]] | None = field(default_factory=queue.SimpleQueue)
    is_repeated: bool = True
    settled: bool = False
    packet_sent: bool = False
    is_sent: bool = False


def send_packet(connection: socket.socket, packet: bytes, descriptors: Sequence[int]) -> bool:
    """Send one packet without blocking; False if the socket is full. Descriptors are borrowed."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
    try:
        connection.sendmsg([packet], [rights] if descriptors else [])
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True  # end-of-file follows and ends the session
    return True
