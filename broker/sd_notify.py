"""Tell systemd how we are (sd_notify(3)), where it asked to be told."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Send a state such as "READY=1" to $NOTIFY_SOCKET; nothing happens without one.

    A name that begins with "@" is in the abstract namespace, where the byte is NUL.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.sendto(state.encode(), address)
