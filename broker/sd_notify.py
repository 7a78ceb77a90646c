"""Tell systemd how we are (sd_notify(3)), where it asked to be told."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("weight-broker")


def watchdog_seconds(pid: int) -> float | None:
    """After how many seconds without `WATCHDOG=1` the service manager ends the process `pid`.

    None: it does not, or it watches another one (sd_watchdog_enabled(3)).
    """
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    watched = os.environ.get("WATCHDOG_PID", str(pid))
    if not microseconds.isdecimal() or int(microseconds) == 0 or watched != str(pid):
        return None
    return int(microseconds) / 1e6


def notify(state: str) -> None:
    """Send a state such as "READY=1" to $NOTIFY_SOCKET; nothing happens without one.

    A name that begins with "@" is in the abstract namespace, where the byte is NUL. A socket that
    cannot be reached is a warning: a broker is not there for those who watch it.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        with socket.socket(socket.AF_UNIX, kind) as notifier:
            notifier.sendto(state.encode(), address)
    except OSError as error:
        log.warning("NOTIFY_SOCKET=%r was not told %s: %s", address, state, error)
