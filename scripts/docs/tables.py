"""Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CODE = re.compile(r"(`[^`]*`)")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; what would end a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    # Inside code a `<` is a `<`; elsewhere it would begin a tag.
    parts = _CODE.split(" ".join(text.split()).replace("|", "\\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
