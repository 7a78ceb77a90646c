"""The command line, from its parser: broker/cli.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from broker.cli import make_parser
from scripts.docs.tables import table


def commands() -> str:
    """A section for each command: what it does, its arguments, examples."""
    return "\n\n".join(_section(name, parser) for name, parser in _parsers().items())


def _parsers() -> dict[str, argparse.ArgumentParser]:
    for action in make_parser()._actions:  # noqa: SLF001 - argparse has no public way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return dict(action.choices)
    raise AssertionError("the command line has no commands")


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    examples, _blank, notes = (parser.epilog or "").partition("\n\n")
    _title, _newline, shown = examples.partition("\n")
    parts = [f"## {name}", parser.description or ""]
    rows = list(_rows(parser._actions))  # noqa: SLF001
    if rows:
        parts.append(table(["argument", "what it is"], rows))
    parts.append(f"```\n{_dedented(shown)}\n```")
    if notes:
        parts.append(notes.strip())
    return "\n\n".join(parts)


def _dedented(shown: str) -> str:
    return "\n".join(line.removeprefix("  ") for line in shown.splitlines())


def _rows(actions: Iterable[argparse.Action]) -> Iterable[list[str]]:
    for action in actions:
        if not isinstance(action, argparse._HelpAction):  # noqa: SLF001
            yield [_argument(action), _help(action)]


def _argument(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if not action.option_strings else "")
    if action.choices:
        value = " or ".join(map(str, action.choices))
    if action.nargs == 0:
        value = ""
    shown = " ".join(filter(None, [", ".join(action.option_strings), str(value)]))
    return f"`{shown.replace('|', ' or ')}`"  # a bar would end the cell


def _help(action: argparse.Action) -> str:
    # An argument's help has the parser's own placeholders, as `%(default)s`.
    return (action.help or "") % {**vars(action), "prog": "weight-broker"}
