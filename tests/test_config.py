"""What a `BrokerConfig` may be given, whoever makes it, and with which words it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.config import BrokerConfig
from broker.errors import BadRequest
from broker.limits import Limits


class BytesPath:
    """A path, and yet no text."""

    def __fspath__(self) -> bytes:
        return b"/d"


def test_paths_as_text_or_not() -> None:
    """A directory and checkpoints may be either."""
    config = BrokerConfig(directory="/d", preload=("/a", Path("/b")))
    assert (config.directory, config.preload) == ("/d", ("/a", Path("/b")))
    assert BrokerConfig(directory=Path("/d")).directory == Path("/d")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": 5}, "BrokerConfig: name must be text, not 5"),
        ({"name": None}, "BrokerConfig: name must be text, not None"),
        ({"directory": 5}, "BrokerConfig: directory must be a path or None, not 5"),
        ({"directory": b"/d"}, "BrokerConfig: directory must be a path or None, not b'/d'"),
        ({"directory": BytesPath()}, "BrokerConfig: directory must be a path or None, not <"),
        ({"directory": ""}, "--dir is empty: name a directory, or leave it off"),
        ({"directory": "/\0"}, "--dir '/\\x00': no path has a NUL in it"),
        ({"device": None}, 'BrokerConfig: device must be text, such as "cuda:0", not None'),
        ({"device": ""}, "--device '': choose auto, cuda or simulated"),
        ({"memory_limit": 10**9}, "BrokerConfig: memory_limit must be text, such as "),
        ({"preload": "/path"}, "BrokerConfig: preload must be a tuple of paths, "),
        ({"preload": None}, "BrokerConfig: preload must be a tuple of paths, "),
        ({"preload": ("/a", 5)}, "BrokerConfig: each path of preload must be a path, not 5"),
        ({"allow_loaders": "no"}, "BrokerConfig: allow_loaders must be True or False, not 'no'"),
        ({"loader_threads": "x"}, "BrokerConfig: loader_threads must be a whole number, not 'x'"),
        ({"loader_threads": 2.5}, "BrokerConfig: loader_threads must be a whole number, not 2.5"),
        ({"loader_threads": True}, "BrokerConfig: loader_threads must be a whole number, not True"),
        ({"limits": {"sessions": 5}}, "BrokerConfig: limits must be a broker.limits.Limits, not {"),
        (
            {"group": "root"},
            "BrokerConfig: group must be the number of a group or None, not 'root'",
        ),
        ({"group": -1}, "there is no group '-1' on this machine"),
        ({"group": 1 << 32}, "there can be no group '4294967296'"),
        ({"log_format": "xml"}, "--log-format 'xml': choose text or json"),
        ({"metrics": 5}, "BrokerConfig: metrics must be text, such as "),
        ({"journal_limit": "4m"}, "BrokerConfig: journal_limit must be a whole number of bytes, "),
        ({"journal_limit": -1}, "--journal-limit -1: a journal needs 65536 bytes; "),
        ({"journal_limit": 1 << 63}, "9223372036854775807 bytes is the most; "),
    ],
)
def test_what_it_refuses(given: dict[str, Any], words: str) -> None:
    """At once, with a sentence that has the field or the option in it."""
    with pytest.raises(BadRequest) as caught:
        BrokerConfig(**given)
    assert words in caught.value.sentence
    assert "\n" not in caught.value.sentence


@pytest.mark.parametrize("value", ["5", 5.0, True, None])
def test_limits_are_whole_numbers(value: Any) -> None:
    """Of another type they are refused by name."""
    with pytest.raises(BadRequest, match=r"^Limits: sessions must be a whole number, not "):
        Limits(sessions=value)
