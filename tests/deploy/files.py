"""The files of deploy/, read as what they are."""

from __future__ import annotations

import re
from typing import Any

import yaml

from broker.cli import make_parser
from tests.test_observability import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text()
UNIT = (DEPLOY / "systemd/weight-broker.service").read_text()


def loaded(path: str) -> dict[str, Any]:
    """A YAML file of one document."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / path).read_text())
    return document


def unit_values(key: str) -> list[str]:
    """What the systemd unit says under a key, each time."""
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def unit_seconds(key: str) -> float:
    """A time span of the unit."""
    (text,) = unit_values(key)
    number, unit = re.fullmatch(r"(\d+)(min|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"min": 60, "s": 1}[unit]


def check_command(words: list[str]) -> dict[str, Any]:
    """The command line takes these arguments of `weight-broker`; as what it understands them."""
    return vars(make_parser().parse_args(words))
