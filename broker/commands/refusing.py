"""What somebody is told whose command line is none: the usage of that command, and what is wrong.

Words of the command line are shown so that they cannot move a terminal's cursor.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from broker.logs import printable
from broker.suggest import did_you_mean

_MISSING = "the following arguments are required: "
"""How argparse begins to say so, where it speaks English."""
_NO_VALUE = re.compile(r"argument (\S+): expected one argument")
_NO_NUMBER = re.compile(r"argument (\S+): invalid int value: (.*)", re.DOTALL)
"""So do these: it names the option, and has no cure."""


class Parser(argparse.ArgumentParser):
    """Of `weight-broker` and of each of its commands. Refusals end the process with 2."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            names = message.removeprefix(_MISSING).split(", ")
            message = "; ".join(map(self._missing, names))
        elif no_value := _NO_VALUE.fullmatch(message):
            given = f"{no_value[1]}=VALUE"
            message = f"{no_value[1]} lacks its value; one that begins with a dash goes in {given}"
        elif no_number := _NO_NUMBER.fullmatch(message):
            message = f"{no_number[1]} must be a whole number, not {no_number[2]}"
        super().error(printable(message))

    def _missing(self, name: str) -> str:
        """With the text of `--help` on it: a name alone does not say what belongs there."""
        helps = {_name_of(action): action.help for action in self._actions}
        text = helps.get(name)
        return f"{name} is missing: {text}" if text else f"{name} is missing"

    def refuse_misspelt(self, words: Sequence[str], where: str = "") -> None:
        """End with a suggestion if one of the words is a long option that does not exist.

        argparse itself tells that last, if at all, and with the usage of another parser.

        Args:
            words: those that only this parser is to understand.
            where: what to add where the option could exist elsewhere, e.g. " before COMMAND".
        """
        known = list(self._option_string_actions)
        for word in words:
            if word == "--":
                return
            option = word.partition("=")[0]
            # As argparse decides: what has a space is no option, what begins one stands for it.
            is_option = option.startswith("--") and " " not in option
            if is_option and not any(each.startswith(option) for each in known):
                near = did_you_mean(option, known, most=1)
                self.error(f"there is no option {option}{where}{near and '; ' + near}")

    def refuse_more(self, more: Sequence[str], words: Sequence[str]) -> NoReturn:
        """End with the words that are one too many: perhaps further values of an option.

        Args:
            words: all that this parser was to understand.
        """
        hint = ""
        before = words[: words.index(more[0])] if more[0] in words else ()
        option = next((word.partition("=")[0] for word in reversed(before) if word[:2] == "--"), "")
        if isinstance(self._option_string_actions.get(option), argparse._AppendAction):  # noqa: SLF001
            hint = f"; {option} is given once for each value"
        self.error(f"it has no argument for {' '.join(map(repr, more))}{hint}")


def _name_of(action: argparse.Action) -> str:
    """What argparse calls an argument that is missing."""
    named = action.metavar if isinstance(action.metavar, str) else action.dest
    return "/".join(action.option_strings) or named
