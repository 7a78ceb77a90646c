"""The command line: `weight-broker COMMAND`. The commands are in broker/commands/.

Exit codes are those of the error classes (errors.py), described in docs/exit-codes.md; 0 is
success.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from broker import VERSION
from broker.commands import (
    completion,
    doctor,
    life,
    names,
    ping,
    report,
    serving,
    sets,
    status,
)
from broker.errors import BrokerError
from broker.logs import printable, shown_sentence
from broker.suggest import did_you_mean

EXIT_INTERRUPTED = 130
GROUPS = (serving, status, ping, sets, names, life, report, doctor, completion)
"""In the order in which `--help` shows them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    options = _parsed(sys.argv[1:] if arguments is None else arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        sys.stdout.flush()  # here, where a reader that went away is no error
        return code
    except BrokerError as error:
        print(shown_sentence(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _say_interrupted(str(interrupt))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, but nothing may be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say_interrupted(what: str) -> None:
    """On a line of its own: the terminal has written `^C` into the last one."""
    start = "\n" if sys.stderr.isatty() else ""
    print(f"{start}weight-broker: interrupted{what and ': ' + printable(what)}", file=sys.stderr)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parser_and_commands()
    word = next((word for word in arguments if not word.startswith("-")), "")
    near = "" if word in commands else did_you_mean(word, commands)
    if near:
        parser.error(f"there is no command {word!r}; {near}")
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """Refuses what was typed without sending it to the terminal as it is."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; `command` of what is parsed carries the command out."""
    return _parser_and_commands()[0]


def _parser_and_commands() -> tuple[argparse.ArgumentParser, Collection[str]]:
    parser = _Parser(
        prog="weight-broker",
        description="Inference engines on one GPU node share one copy of the model weights.",
        epilog="`weight-broker COMMAND --help` explains a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"weight-broker {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_to(commands)
    return parser, commands.choices.keys()
