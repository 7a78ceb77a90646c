"""`weight-broker serve --print-config`: every setting's value, and where it comes from."""

from __future__ import annotations

import json
from typing import Any

from broker.configuration import DEFAULT, PRECEDENCE, Configuration, Found
from broker.limits import DEFAULTS, LIMITS
from broker.settings import SETTINGS, Kind


def as_toml(configuration: Configuration) -> str:
    """The whole configuration as a file for `--config` that says the same."""
    plain = [setting for setting in SETTINGS if setting.kind is not Kind.LIMITS]
    settings = [(s.name, configuration.settings[s.name]) for s in plain]
    limits = [
        (name, configuration.limits.get(name, Found(getattr(DEFAULTS, name), DEFAULT)))
        for name in LIMITS
    ]
    return "\n".join([f"# {PRECEDENCE}", "", *_lines(settings), "", "[limit]", *_lines(limits), ""])


def _lines(rows: list[tuple[str, Found]]) -> list[str]:
    """`name = value  # source`, the sources below each other."""
    entries = [
        f"# {name} is not given" if found.value is None else f"{name} = {_value(found.value)}"
        for name, found in rows
    ]
    width = max(map(len, entries))
    return [
        f"{entry:<{width}}  # {found.source}"
        for entry, (_name, found) in zip(entries, rows, strict=True)
    ]


def _value(value: Any) -> str:
    """As TOML writes it; JSON writes these kinds in the same way, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
