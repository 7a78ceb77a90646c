"""Fenced blocks of a page that are to be run: those under `<!-- run -->`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^<!-- run -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PROMPT = "$ "


@dataclass
class Step:
    """A command of a page, and what the page says that it prints."""

    command: str
    printed: list[str] = field(default_factory=list)


def blocks(page: Path, language: str) -> list[str]:
    """The text of each block to be run in this language."""
    return [text for found, text in _BLOCK.findall(page.read_text()) if found == language]


def steps(page: Path) -> list[Step]:
    """All commands of a page's `console` blocks, in order."""
    found: list[Step] = []
    for line in "".join(blocks(page, "console")).splitlines():
        if line.startswith(_PROMPT):
            found.append(Step(line.removeprefix(_PROMPT)))
        else:
            found[-1].printed.append(line)
    return found


_AMOUNT = re.compile(r"\d[\d.,:]*( (?:[KMGT]i?B|B|ms|s|min|h|d)\b)?")


def is_as_printed(line: str, page: str) -> bool:
    """Whether a line is the page's, but for numbers, times, sizes, host and width of columns.

    `…` in the page stands for anything.
    """
    parts = [re.escape(_levelled(part)) for part in page.split("…")]
    return re.fullmatch(".*".join(parts), _levelled(line)) is not None


def _levelled(text: str) -> str:
    text = re.sub(r"(engine \d+ on) [^\s:,]+", r"\1 node", text)
    text = re.sub(r"/tmp/wb-\w+", "/tmp/wb-", text)
    text = re.sub("█+░*", "bar", text)
    text = re.sub(r"\bUID\b|(?<=blake3:)[0-9a-f]{64}", "", text)
    return " ".join(_AMOUNT.sub("#", text).split())
