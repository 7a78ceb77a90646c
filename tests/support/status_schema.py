"""Whether a status is what docs/status.schema.json says, no less and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PATH = Path(__file__).parents[2] / "docs" / "status.schema.json"
SCHEMA: dict[str, Any] = json.loads(PATH.read_text())
OPEN = ("trouble",)
"""Parts that may have more than what is described."""


def check_status(report: dict[str, Any]) -> None:
    """Raise unless everything that is documented is there, and everything there is documented."""
    plain = json.loads(json.dumps(report))
    Draft202012Validator(_closed(SCHEMA)).validate(plain)


def _closed(part: Any, name: str = "") -> Any:
    """The schema, without room for what it does not name."""
    if isinstance(part, list):
        return [_closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    closed = {key: _closed(value, key) for key, value in part.items()}
    if isinstance(part.get("properties"), dict) and name not in OPEN:
        closed["additionalProperties"] = False
    return closed
