"""What `weight-broker serve` can be told: one table of names.

Options (`--memory-limit`), variables (`WEIGHT_BROKER_MEMORY_LIMIT`) and keys of the file
(`memory-limit`) all come from it; configuration.py says where a value was found and which one
counts. A new setting is a row here and a field of `BrokerConfig`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any

from broker.device_names import AUTO
from broker.logs import LOG_FORMATS
from broker.rundir import DEFAULT_NAME

VARIABLE_PREFIX = "WEIGHT_BROKER_"

MOST_NUMBER = (1 << 63) - 1
"""What TOML says a whole number may be."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Kind(Enum):
    """What a value is, and so how it is written in a variable and in the file."""

    TEXT = "a text"
    TEXT_OR_NUMBER = "a text or a whole number"
    NUMBER = "a whole number"
    SWITCH = "true or false"
    LIST = "a list of texts"
    LIMITS = "a table of numbers"


@dataclass(frozen=True)
class Setting:
    """One thing that can be set.

    Attributes:
        name: as in the file, and after the dashes of the option.
        help: what it is, for `--help` and the documentation.
        default: what counts where nothing is given; None: what `help` says.
        metavar: what the value is called in `--help`.
        choices: the only possible values; none: any.
        separator: between the items of a list in a variable.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    separator: str = ","

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper().replace("-", "_")

    @property
    def field(self) -> str:
        """Under which the parser keeps the option's value."""
        return self.name.replace("-", "_")

    def from_variable(self, text: str) -> Any:
        """The value that a variable's text means. Raises `ValueError` with what it must be."""
        if self.kind is Kind.NUMBER:
            return _number(text)
        if self.kind is Kind.SWITCH:
            return _switch(text)
        if self.kind in (Kind.LIST, Kind.LIMITS):
            items = [item.strip() for item in text.split(self.separator)]
            return [item for item in items if item]
        return self._checked(text)

    def from_file(self, value: object) -> Any:
        """The value that the file's TOML value means. Raises `ValueError` with what it must be."""
        if self.kind is Kind.LIMITS and isinstance(value, dict):
            return [f"{name}={_limit(number)}" for name, number in value.items()]
        if self.kind is Kind.LIST and isinstance(value, str):
            return [value]
        if self.kind is Kind.LIST and isinstance(value, list):
            if all(isinstance(item, str) for item in value):
                return value
        elif (self.kind is Kind.SWITCH and isinstance(value, bool)) or (
            self.kind is Kind.NUMBER and isinstance(value, int) and not isinstance(value, bool)
        ):
            return _bounded(value)
        elif self.kind in (Kind.TEXT, Kind.TEXT_OR_NUMBER) and isinstance(value, str):
            return self._checked(value)
        elif self.kind is Kind.TEXT_OR_NUMBER and type(value) is int:
            return str(_bounded(value))  # as an option and a variable have it
        raise ValueError(f"must be {self.kind.value}")

    def _checked(self, text: str) -> str:
        if self.choices and text not in self.choices:
            raise ValueError(f"must be {' or '.join(self.choices)}")
        return text


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"must be {Kind.NUMBER.value}") from None
    return _bounded(number)


def _bounded(number: int) -> int:
    if abs(number) > MOST_NUMBER:
        raise ValueError(f"must be {MOST_NUMBER} at most")
    return number


def _limit(value: object) -> object:
    """A value of the table of limits, which limits.py reads and judges as text."""
    return _bounded(value) if isinstance(value, int) else value


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"must be {' or '.join(_TRUE)}, or {' or '.join(_FALSE)}")
    return word in _TRUE


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "name",
        Kind.TEXT,
        "which broker of the directory this is; engines name it to find it",
        default=DEFAULT_NAME,
        metavar="NAME",
    ),
    Setting(
        "dir",
        Kind.TEXT,
        "directory of the sockets; default: /run/user/<uid>/weight-broker (root: "
        "/run/weight-broker), else /tmp/weight-broker-<uid>",
        metavar="PATH",
    ),
    Setting(
        "device",
        Kind.LIST,
        "auto or cuda: every GPU this process sees, also AMD's; GPUs by number (cuda:1) or UUID; "
        "simulated: host memory, for trying out only",
        default=[AUTO],
        metavar="DEVICE",
    ),
    Setting(
        "memory-limit",
        Kind.TEXT_OR_NUMBER,
        "how much of each device the weights may take: bytes (8g, 512m) or a share (80%); default: "
        "what is free at the start less a sixteenth",
        metavar="BYTES|SHARE",
    ),
    Setting(
        "preload",
        Kind.LIST,
        "checkpoints to load at the start, and keep",
        default=[],
        metavar="PATH",
        separator=os.pathsep,
    ),
    Setting(
        "allow-loaders",
        Kind.SWITCH,
        "run loaders that engines ship: code of theirs, in a process of its own",
        default=False,
    ),
    Setting(
        "group",
        Kind.TEXT_OR_NUMBER,
        "members of this group (a name or number) may use the broker too; default: nobody else",
        metavar="GROUP",
    ),
    Setting(
        "limit",
        Kind.LIMITS,
        "what peers may use, e.g. sessions=1000; docs/limits.md has all names",
        default=[],
        metavar="NAME=VALUE",
    ),
    Setting(
        "loader-threads",
        Kind.NUMBER,
        "threads that read in one loader process",
        default=2,
        metavar="N",
    ),
    Setting(
        "log-format",
        Kind.TEXT,
        "how the log is written: text for people, json for programs, one object a line",
        default=LOG_FORMATS[0],
        metavar="FORMAT",
        choices=LOG_FORMATS,
    ),
    Setting(
        "metrics",
        Kind.TEXT,
        "IP address and port where Prometheus may fetch metrics, e.g. 127.0.0.1:9464; default: "
        "nowhere",
        metavar="ADDRESS:PORT",
    ),
    Setting(
        "journal-limit",
        Kind.TEXT_OR_NUMBER,
        "bytes that the journal of events beside the sockets may take; 0: keep none",
        default="4m",
        metavar="BYTES",
    ),
)
"""In the order in which they are shown."""

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
