"""What an engine gives us, looked at where it does: a mistake gets a sentence before anything
begins. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from broker.errors import UsageError
from broker.rundir import default_name
from broker.weights import WeightKey
from engine_client.dtypes import dtype_name

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
    if given is not None:
        check_name(given, what)


def check_name(given: str, what: str) -> None:
    """Raise `UsageError` unless it is text."""
    if not isinstance(given, str):
        raise UsageError(f"{what} must be text, not {said_of(given)}")


def broker_of(name: str | None) -> str:
    """The broker's name, also where none is given. Raise `UsageError` unless it is text, or None.

    Whether it can be one, others say.
    """
    check_text(name, "broker")
    return default_name() if name is None else name


def directory_of(given: str | os.PathLike[str] | None) -> Path | None:
    """Raise `UsageError` unless it can be a path of text, or is None."""
    return None if given is None else path_of(given, "directory")


def path_of(given: str | os.PathLike[str], what: str) -> Path:
    """Raise `UsageError` unless it can be a path of text."""
    try:
        path = Path(given)
    except TypeError as error:
        raise UsageError(f"{what} must be a path, not {said_of(given)}") from error
    try:
        has_nul = b"\0" in os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} must be a path, and none has such letters: {error}") from error
    if has_nul:
        raise UsageError(f"{what} must be a path, and none has a NUL character in it")
    return path


def check_function(given: object, what: str, does: str) -> None:
    """Raise `UsageError` unless it can be called.

    Args:
        does: what it is for, as the sentence goes on: "a function that …".
    """
    if not callable(given):
        raise UsageError(f"{what} must be a function that {does}, not {said_of(given)}")


def check_progress(given: object) -> None:
    """Raise `UsageError` unless it can be called, or is None."""
    if given is not None:
        check_function(given, "progress", "takes how far the load is")


def check_seconds(given: float) -> None:
    """Raise `UsageError` unless it is a time that a process may take."""
    if isinstance(given, bool) or not (isinstance(given, int | float) and given > 0):
        raise UsageError(f"seconds must be a number above 0, not {given!r:.40}")


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


def check_texts(given: Iterable[str], what: str, example: str) -> None:
    """Raise `UsageError` unless it is several texts; one alone would be taken letter by letter."""
    if (
        isinstance(given, str | bytes)
        or not isinstance(given, Collection)
        or not all(isinstance(text, str) for text in given)
    ):
        raise UsageError(f"{what} must be a list of text, {example}, not {given!r:.100}")


def check_text_by_name(given: Mapping[str, str] | None, what: str) -> None:
    """Raise `UsageError` unless it gives texts by texts, or is None."""
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in given.items()
    ):
        raise UsageError(f"{what}, text by text, not {given!r:.100}")


def checked_key(given: WeightKey) -> WeightKey:
    """The key, torch's own dtype by its name.

    Raises:
        UsageError: a field is of a type that cannot be one.
    """
    for field in ("device", "name", "checkpoint", "format", "quantization"):
        if not isinstance(getattr(given, field), str):
            raise UsageError(
                f"WeightKey: {field} must be text, not {said_of(getattr(given, field))}"
            )
    if not isinstance(given.layout, Mapping):
        raise UsageError(f"WeightKey: layout must be a dict, not {said_of(given.layout)}")
    check_layout(given.layout)
    return msgspec.structs.replace(given, dtype=dtype_name(given.dtype, "WeightKey: dtype"))


def said_of(given: object) -> str:
    """A value of the wrong type in a sentence: its type, and a number as it is."""
    kind = type(given).__name__
    return f"the {kind} {given}" if isinstance(given, int | float) else kind
