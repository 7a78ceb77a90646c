"""Which page has which generated part, and how a part gets into its page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from scripts.docs import commands, errors, messages, states

DOCS = Path(__file__).parents[2] / "docs"

PARTS: dict[str, Callable[[], str]] = {
    "requests": messages.requests,
    "replies": messages.replies,
    "packets": messages.packets,
    "structs": messages.structs,
    "manifest": messages.manifest,
    "dtypes": messages.dtypes,
    "constants": messages.constants,
    "statuses": errors.statuses,
    "errors": errors.summary,
    "commands": commands.commands,
    "transitions": states.transitions,
}
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(\n<!-- /generated -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page's text with every generated part as the code has it now.

    Raises:
        KeyError: the page asks for a part that there is not.
    """
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", text)


def pages() -> list[Path]:
    """Pages with generated parts."""
    return [page for page in sorted(DOCS.rglob("*.md")) if _PART.search(page.read_text())]


def outdated() -> list[str]:
    """Pages, by their names below docs/, that are not what the code says."""
    return [
        str(page.relative_to(DOCS))
        for page in pages()
        if page.read_text() != filled(page.read_text())
    ]


def write() -> None:
    """Bring every page up to date."""
    for page in pages():
        page.write_text(filled(page.read_text()))
