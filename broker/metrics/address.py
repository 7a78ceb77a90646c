"""Where metrics are served: the listening socket that the keeper makes and every server gets."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import socket

from broker.errors import BadRequest, Busy

LISTEN_BACKLOG = 64
LIBRARY = "prometheus_client"


def parse_address(text: str) -> tuple[str, int]:
    """The address and port of `--metrics`; port 0: one that is free.

    Raises:
        BadRequest: no IP address and port.
    """
    host, colon, port = text.rpartition(":")
    is_six = host.startswith("[") and host.endswith("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(host[1:-1] if is_six else host)
        if (address.version == 6) is not is_six or not colon or not port.isascii():
            raise ValueError(text)
        number = int(port)
        if not (port.isdecimal() and number < 1 << 16):
            raise ValueError(text)
    except ValueError as error:
        raise BadRequest(
            f"--metrics {text!r}: give an IP address of this machine and a port, e.g. "
            "127.0.0.1:9464 or [::1]:9464",
            setting="metrics",
        ) from error
    return str(address), number


def listen(text: str) -> socket.socket:
    """Bind and listen where `--metrics` says. Non-blocking.

    Raises:
        BadRequest: as `parse_address`; the library is not installed; not an address of this
            machine, or one that this user may not use.
        Busy: the port is in use.
    """
    host, port = parse_address(text)
    if importlib.util.find_spec(LIBRARY) is None:
        raise BadRequest(
            "--metrics needs a package that is not installed: pip install prometheus-client",
            setting="metrics",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last broker has just ended is not in use; one with a listener still is.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(text, error) from error
    return listener


def _unusable(text: str, error: OSError) -> BadRequest | Busy:
    if error.errno == errno.EADDRINUSE:
        return Busy(
            f"--metrics {text}: the port is in use, perhaps by another broker; give another one",
            setting="metrics",
        )
    return BadRequest(
        f"--metrics {text}: the broker cannot listen there ({os.strerror(error.errno or 0)})",
        setting="metrics",
    )


def name_of(listener: socket.socket) -> str:
    """Where it listens, as one would write it into a scraper's configuration."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
