"""`weight-broker completion`: what makes a shell complete commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from broker.commands.parsing import Commands, Examples, add_plain

COMPLETED = {
    "dir": "DIRECTORY",
    "directory": "DIRECTORY",
    "preload": "FILE",
    "config": "FILE",
    "path": "FILE",
    "output": "FILE",
}
"""Options and arguments that are paths, and which paths a shell offers."""
SHELLS = ("bash", "zsh", "fish")
EXAMPLES: Examples = (
    ("completion bash > ~/.weight-broker.bash", "for bash, with `source` of it in ~/.bashrc"),
    ("completion zsh > ~/.zfunc/_weight-broker", "for zsh, with ~/.zfunc in its fpath"),
    ("completion fish > ~/.config/fish/completions/weight-broker.fish", "for fish"),
)


def add_to(commands: Commands) -> None:
    text = "print what makes a shell complete commands, options and paths"
    parser = add_plain(commands, "completion", print_completion, text, examples=EXAMPLES)
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")


def print_completion(options: argparse.Namespace) -> int:
    """The script does not run weight-broker: print it again after an upgrade."""
    import shtab

    from broker.cli import make_parser

    parser = make_parser()
    for each in _parsers(parser):
        for action in each._actions:  # noqa: SLF001 - as shtab itself does; there is no other way
            kind = COMPLETED.get(action.dest)
            if kind is not None:
                action.complete = getattr(shtab, kind)  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its commands."""
    yield parser
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            yield from action.choices.values()
