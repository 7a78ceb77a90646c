"""How a command is added to the parser: what all of them have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from broker.rundir import DEFAULT_NAME, DIRECTORY_VARIABLE, NAME_VARIABLE, default_name

if TYPE_CHECKING:
    from engine_client.observer import Observer

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
"""What commands are added to; argparse has no public name for it."""
Command: TypeAlias = Callable[[argparse.Namespace], int]
"""Carries a command out and returns the exit code."""
Examples: TypeAlias = tuple[tuple[str, str], ...]
"""What may be typed after `weight-broker`, and what it does."""


def add_command(
    commands: Commands,
    name: str,
    command: Command,
    text: str,
    *,
    examples: Examples,
    notes: str = "",
    broker: str = "--name",
) -> argparse.ArgumentParser:
    """Add a command that asks a running broker; its parser, for further options.

    Args:
        text: what it does, as a clause in lower case.
        notes: what else there is to say, at the end of `--help`.
        broker: the option that says which broker, where `--name` means something else.
    """
    parser = add_plain(commands, name, command, text, examples=examples, notes=notes)
    parser.add_argument(
        broker,
        dest="name",
        metavar="NAME",
        default=default_name(),
        help=f"which broker (default: ${NAME_VARIABLE} or {DEFAULT_NAME})",
    )
    parser.add_argument(
        "--dir",
        type=_directory,
        dest="directory",
        metavar="PATH",
        help=f"directory of its sockets (default: ${DIRECTORY_VARIABLE} or the user's own)",
    )
    return parser


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a directory, or leave it off")
    return Path(text)


def add_plain(
    commands: Commands,
    name: str,
    command: Command,
    text: str,
    *,
    examples: Examples,
    notes: str = "",
) -> argparse.ArgumentParser:
    """Add a command that needs no running broker; as `add_command`."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="\n".join([*_shown(examples), *(["", notes] if notes else [])]),
        formatter_class=_Formatter,
    )
    parser.set_defaults(command=command)
    return parser


def _shown(examples: Examples) -> list[str]:
    lines = [f"  weight-broker {typed}\n      {meaning}" for typed, meaning in examples]
    return ["examples:", *lines]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the examples as they are, and the options' names on lines with their texts."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`, for commands that open devices themselves."""
    parser.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help="auto or cuda: every GPU this process sees, also AMD's; GPUs by number (cuda:1) or "
        "UUID, several with commas or by giving this several times; simulated: host memory, for "
        "trying out only (default: auto)",
    )


def observe(options: argparse.Namespace) -> Observer:
    """A connection to the broker that is meant, without a device; a context manager."""
    from engine_client.observer import Observer

    return Observer(options.name, options.directory)
