"""What an engine gives us, looked at where it does: a mistake gets a sentence before anything
begins. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from broker.errors import UsageError

if TYPE_CHECKING:
    import torch

    DeviceName: TypeAlias = str | torch.device


def device_name(given: DeviceName) -> str:
    """The name, "cuda:0" of `torch.device("cuda:0")` too; whether there is such a device, others
    say.

    Raises:
        UsageError: it is neither.
    """
    kind = type(given)
    if (kind.__module__, kind.__name__) == ("torch", "device"):
        return str(given)
    if not isinstance(given, str):
        raise UsageError(f'device must be a name or a torch.device, "cuda:0", not {said_of(given)}')
    return given


def check_text(given: str | None, what: str) -> None:
    """Raise `UsageError` unless it is text, or None."""
    if given is not None and not isinstance(given, str):
        raise UsageError(f"{what} must be text, not {said_of(given)}")


def path_of(given: str | os.PathLike[str], what: str) -> Path:
    """Raise `UsageError` unless it can be a path of text."""
    try:
        return Path(given)
    except TypeError as error:
        raise UsageError(f"{what} must be a path, not {said_of(given)}") from error


def check_function(given: object, what: str, does: str) -> None:
    """Raise `UsageError` unless it can be called.

    Args:
        does: what it is for, as the sentence goes on: "a function that …".
    """
    if not callable(given):
        raise UsageError(f"{what} must be a function that {does}, not {said_of(given)}")


def check_layout(given: Mapping[str, int] | None) -> None:
    """Raise `UsageError` unless it names whole numbers, or is None."""
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and type(size) is int for name, size in given.items()
    ):
        raise UsageError(
            'layout must give whole numbers by name, {"tp_rank": 0, "tp_size": 2}, not '
            f"{given!r:.100}"
        )


def said_of(given: object) -> str:
    """A value of the wrong type in a sentence: its type, and a number as it is."""
    kind = type(given).__name__
    return f"the {kind} {given}" if isinstance(given, int | float) else kind
