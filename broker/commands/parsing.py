"""How a command is added to the parser: what all of them have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from broker.rundir import DEFAULT_NAME, DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from engine_client.observer import Observer

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
"""What commands are added to; argparse has no public name for it."""
Command: TypeAlias = Callable[[argparse.Namespace], int]
"""Carries a command out and returns the exit code."""


def add_command(
    commands: Commands, name: str, command: Command, text: str, *, broker: str = "--name"
) -> argparse.ArgumentParser:
    """Add a command that is about one broker; its parser, for further options.

    Args:
        text: what it does, as a clause in lower case.
        broker: the option that says which broker, where `--name` means something else.
    """
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    parser.add_argument(
        broker, dest="name", default=DEFAULT_NAME, help="which broker (default: %(default)s)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        dest="directory",
        help=f"directory of its sockets (default: ${DIRECTORY_VARIABLE} or the user's own)",
    )
    return parser


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
