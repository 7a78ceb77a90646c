"""The command line: `weight-broker COMMAND`. The commands are in broker/commands/.

Exit codes are those of the error classes (errors.py) and documented in README.md; 0 is success.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from broker.commands import doctor, life, names, ping, report, serving, sets, status
from broker.errors import BrokerError
from broker.logs import shown_sentence

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    options = make_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        sys.stdout.flush()  # here, where a reader that went away is no error
        return code
    except BrokerError as error:
        print(shown_sentence(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, but nothing may be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; `command` of what is parsed carries the command out."""
    parser = argparse.ArgumentParser(
        prog="weight-broker",
        description="Inference engines on one GPU node share one copy of the model weights.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (serving, status, ping, sets, names, life, report, doctor):
        group.add_to(commands)
    return parser
