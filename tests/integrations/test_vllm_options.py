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
        ({"mod": "map"}, r"knows no mod; it knows broker, directory, device, mode"),
        ({"mode": "share"}, r"mode must be 'map' or 'copy', not 'share'"),
        ({"stage": True}, r"stage must be 'processed' or 'loaded', not True"),
        ({"device": "cuda:1"}, r"device must be 'cuda' or 'simulated', not 'cuda:1'"),
        ({"timeout": 0}, r"timeout must be a positive number of seconds, not 0"),
        ({"timeout": True}, r"timeout must be a positive number"),
        ({"timeout": float("nan")}, r"timeout must be a positive number"),
        ({"fallback": "yes"}, r"fallback must be true or false, not 'yes'"),
        ({"broker": ""}, r"broker must be a text, not ''"),
        ({"directory": 7}, r"directory must be a text, not 7"),
        (["mode"], r"must be a mapping, not list"),
    ],
)
def test_what_is_of_no_use_is_refused(given: Any, said: str) -> None:
    """One sentence that names the option, what it may be and what it was."""
    with pytest.raises(UsageError, match=said):
        parse_options(given)
