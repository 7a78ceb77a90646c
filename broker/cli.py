"""The command line: `weight-broker COMMAND`. The commands are in broker/commands/.

Exit codes are those of the error classes (errors.py), described in docs/exit-codes.md; 0 is
success.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from broker import VERSION
from broker.__main__ import EXIT_INTERRUPTED
from broker.commands.refusing import Parser
from broker.errors import BadRequest, BrokerError
from broker.logs import printable, shown_sentence
from broker.suggest import did_you_mean

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""How the writing of standard output fails; an error with a file's name is another one."""
GROUPS = ("serving", "status", "ping", "sets", "names", "life", "report", "doctor", "completion")
"""Modules of broker/commands/, in the order in which `--help` shows their commands."""
SERVE = ("serving",)
"""All that a keeper, which lives long, is to have in memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    try:
        _escape_what_cannot_be_written()
        return _run(sys.argv[1:] if arguments is None else arguments)
    except BrokerError as error:
        print(shown_sentence(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _say_interrupted(str(interrupt))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, but nothing may be printed.
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output()
        why = f"weight-broker: standard output cannot be written ({error.strerror})"
        print(why, file=sys.stderr)
        return BadRequest.exit_code


def _run(arguments: Sequence[str]) -> int:
    """Output is flushed here, where a reader that went away, or a full disk, is no mistake."""
    try:
        options = _parsed(arguments)
    finally:
        sys.stdout.flush()  # of --help
    command: Callable[[argparse.Namespace], int] = options.command
    code = command(options)
    sys.stdout.flush()
    return code


def _escape_what_cannot_be_written() -> None:
    """Names and paths may have letters that the terminal's encoding has not."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is still in the buffer goes nowhere, so that the end of the process is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_interrupted(what: str) -> None:
    """On a line of its own: the terminal has written `^C` into the last one."""
    start = "\n" if sys.stderr.isatty() else ""
    print(f"{start}weight-broker: interrupted{what and ': ' + printable(what)}", file=sys.stderr)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    groups = SERVE if arguments[:1] == ["serve"] else GROUPS
    parser, commands = _parser_and_commands(groups)
    word = next((word for word in arguments if not word.startswith("-")), "")
    begin = arguments.index(word) if word else len(arguments)
    parser.refuse_misspelt(arguments[:begin], " before COMMAND")
    if word not in commands:
        near = did_you_mean(word, commands)
        if near:
            parser.error(f"there is no command {word!r}; {near}")
        return parser.parse_args(arguments)
    command = commands[word]
    command.refuse_misspelt(arguments[begin + 1 :])
    options, more = parser.parse_known_args(arguments)
    if more:
        command.refuse_more(more, arguments[begin + 1 :])
    return options


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; `command` of what is parsed carries the command out."""
    return _parser_and_commands(GROUPS)[0]


def _parser_and_commands(groups: Sequence[str]) -> tuple[Parser, Mapping[str, Parser]]:
    parser = Parser(
        prog="weight-broker",
        description="Inference engines on one GPU node share one copy of the model weights.",
        epilog="`weight-broker COMMAND --help` explains a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"weight-broker {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in groups:
        importlib.import_module(f"broker.commands.{group}").add_to(commands)
    return parser, commands.choices
