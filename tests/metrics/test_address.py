"""Where metrics are served: what can be said, and what is refused before anything is started."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from broker.errors import BadRequest, Busy
from broker.metrics.address import listen, name_of, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),  # noqa: S104 - only read
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    """An IP address and a port, IPv6 in brackets."""
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "9464", ":9464", "127.0.0.1", "127.0.0.1:", "::1:9464", "[127.0.0.1]:9464"),
        *("node:9464", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:9 ", "127.0.0.1:+9"),
        *("127.0.0.1:²", "[::1:9"),
    ],
)
def test_no_address(text: str) -> None:
    """Anything else is one sentence with an example."""
    with pytest.raises(
        BadRequest, match=r"give an IP address .* 127\.0\.0\.1:9464 or \[::1\]:9464"
    ):
        parse_address(text)


def test_a_port_in_use() -> None:
    """A port at which somebody listens is said to be in use, also if that is another broker."""
    with listen("127.0.0.1:0") as first, pytest.raises(Busy, match="the port is in use"):
        listen(name_of(first))


def test_a_port_whose_listener_has_ended() -> None:
    """The port can be had again at once, though a connection to it has just ended."""
    with listen("127.0.0.1:0") as first:
        where = name_of(first)
        with socket.create_connection(first.getsockname()):
            accepted, _address = first.accept()
            accepted.close()  # this end closes first, so it is the one that lingers
    listen(where).close()


def test_an_address_of_another_machine() -> None:
    """What cannot be bound is said with the system's word."""
    with pytest.raises(BadRequest, match=r"listen there \(Cannot assign requested address\)"):
        listen("192.0.2.1:9464")


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prometheus-client the sentence says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BadRequest, match="not installed: pip install prometheus-client"):
        listen("127.0.0.1:0")
