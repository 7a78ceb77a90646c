"""Limits: what `--limit` takes, what is said when one is met, and that the docs have them all."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from broker import wire
from broker.errors import BadRequest
from broker.limits import DEFAULTS, LIMITS, Limits, parse_limits

DOCS = Path(__file__).parents[1] / "docs" / "limits.md"


def refusal(*options: str) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_limits(options)
    return caught.value.sentence


def test_no_option_means_the_defaults() -> None:
    """Without any option everything is as documented."""
    assert parse_limits([]) == DEFAULTS == Limits()


def test_options() -> None:
    """Each option sets one limit; a later one wins; k, m and g are powers of 1024."""
    limits = parse_limits(
        ["sessions=7", "sessions=9", "manifest_bytes=2m", "request_bytes=1G", "waiting=2K"]
    )
    assert (limits.sessions, limits.manifest_bytes) == (9, 2 << 20)
    assert (limits.request_bytes, limits.waiting) == (1 << 30, 2048)
    assert limits.loaders == DEFAULTS.loaders


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_an_option(name: str) -> None:
    """Whatever the dataclass has can be given, at both of its bounds and not beyond."""
    least, most = LIMITS[name]["least"], LIMITS[name]["most"]
    for value in (least, most):
        assert asdict(parse_limits([f"{name}={value}"]))[name] == value
    for value in (least - 1, most + 1):
        if value >= 0:
            sentence = refusal(f"{name}={value}")
            assert sentence.startswith(f"--limit {name}={value}: {least} to {most} ")


def test_unknown_limit() -> None:
    """A name that is none is refused with the nearest ones, or with all."""
    assert "did you mean sessions" in refusal("sesions=1")
    assert "did you mean all_waiting or waiting" in refusal("al_waiting=1")
    assert "seal_seconds" in refusal("qqq=1")


@pytest.mark.parametrize("text", ["", "x", "1.5", "-1", "1x", "0x10", "\u0661", "1kk", "k", "1 2"])
def test_values_that_are_no_numbers(text: str) -> None:
    """A value is a whole number."""
    assert "give a whole number" in refusal(f"sessions={text}")


@pytest.mark.parametrize("option", ["sessions", "", "sessions:1"])
def test_options_that_are_none(option: str) -> None:
    """An option without an equals sign is refused with an example."""
    assert refusal(option) == f"--limit {option!r}: give NAME=VALUE, e.g. sessions=1000"


def test_what_is_said_when_a_limit_is_met() -> None:
    """Name, value, the unit unless the name ends in it, and how to change it."""
    limits = Limits(sessions=3, request_bytes=5, waiting=7)
    assert limits.reached("sessions") == "(limit sessions=3; serve --limit sessions=… changes it)"
    assert limits.reached("request_bytes").startswith("(limit request_bytes=5; ")
    assert limits.reached("waiting").startswith("(limit waiting=7 requests; ")


def test_defaults_suit_the_node_they_are_for() -> None:
    """Sixteen engines of eight processes with sets of 200,000 tensors are far from every limit."""
    assert DEFAULTS.sessions >= 4 * 16 * 8
    assert DEFAULTS.connections > DEFAULTS.sessions
    assert DEFAULTS.tensors >= 4 * 200_000
    assert DEFAULTS.manifest_bytes >= 8 * (17 << 20)
    assert DEFAULTS.frame_bytes == wire.MAX_FRAME_BYTES
    assert DEFAULTS.frames == wire.MAX_ENVELOPE_FRAMES + 2


def test_docs_have_every_limit() -> None:
    """The table in docs/limits.md is the code's, row for row."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) (\w+) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    assert rows == [
        (name, f"{getattr(DEFAULTS, name):,}", facts["unit"], facts["meaning"])
        for name, facts in LIMITS.items()
    ]


def test_limits_import_little() -> None:
    """The command line reads limits without loading zmq or torch."""
    script = "import sys, broker.limits; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    ).stdout.split()
    assert {"zmq", "torch", "numpy"}.isdisjoint(loaded)
