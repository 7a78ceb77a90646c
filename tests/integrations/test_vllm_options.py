"""Options in `--model-loader-extra-config`: taken as they are, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import UsageError
from engine_client.integrations.vllm.options import Options, parse_options


def test_nothing_given_is_the_documented_defaults() -> None:
    """A GPU, mapped, processed, without fallback, waiting for as long as it takes."""
    assert parse_options({}) == Options(
        broker=None,
        directory=None,
        device="cuda",
        mode="map",
        timeout=None,
        fallback=False,
        stage="processed",
    )


def test_every_option_arrives() -> None:
    """What is given is what the loader goes by."""
    given = {
        "broker": "second",
        "directory": "/run/wb",
        "device": "simulated",
        "mode": "copy",
        "timeout": 5,
        "fallback": True,
        "stage": "loaded",
    }
    assert parse_options(given) == Options(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mod": "map"}, r"knows no 'mod'; it knows broker, directory, device, mode"),
        ({"mode": "share"}, r"mode must be 'map' or 'copy', not 'share'"),
        ({"stage": True}, r"stage must be 'processed' or 'loaded', not True"),
        ({"device": "cuda:1"}, r"device must be 'cuda' or 'simulated', not 'cuda:1'"),
        (
            {"timeout": 0},
            r"timeout must be a positive number of seconds, 1000000000 at most, not 0",
        ),
        ({"timeout": True}, r"timeout must be a positive number"),
        ({"timeout": float("nan")}, r"timeout must be a positive number"),
        ({"fallback": "yes"}, r"fallback must be true or false, not 'yes'"),
        ({"timeout": 10**400}, r"timeout must be a positive number of seconds, 1000000000 at most"),
        ({"timeout": 10**5000}, r"timeout must be .*, not that"),
        ({"broker": ""}, r"broker must be a broker's name, not ''"),
        ({"broker": "\ud800"}, r"broker must be a broker's name, not '\\ud800'"),
        ({"directory": 7}, r"directory must be a whole path, not 7"),
        ({"directory": "run/wb"}, r"directory must be a whole path, not 'run/wb'"),
        ({"directory": "/\0"}, r"directory must be a whole path, not '/\\x00'"),
        ({"\x1b[31m": 1}, r"knows no '\\x1b\[31m'; it knows"),
        (["mode"], r"must be a mapping, not list"),
    ],
)
def test_what_is_of_no_use_is_refused(given: Any, said: str) -> None:
    """One sentence that names the option, what it may be and what it was."""
    with pytest.raises(UsageError, match=said):
        parse_options(given)
