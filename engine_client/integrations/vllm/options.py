"""What a user may say in vLLM's `--model-loader-extra-config`. Pure: imports nothing heavy."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from broker.errors import BadRequest, UsageError
from broker.rundir import check_name

LOAD_FORMAT = "weight_broker"
MOST_SECONDS = 10**9
"""Of a timeout, some thirty years: more than any clock here can wait."""

Stage = Literal["processed", "loaded"]
Mode = Literal["map", "copy"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("cuda", "simulated"),
    "mode": ("map", "copy"),
    "stage": ("processed", "loaded"),
}


@dataclass(frozen=True)
class Options:
    """How one engine uses the broker.

    Attributes:
        broker: the broker's name; None: the client's default.
        directory: where its sockets are; None: $WEIGHT_BROKER_DIR or the documented defaults.
        device: "cuda" is the GPU that vLLM gave this rank (also on ROCm); "simulated" has to be
            asked for by name.
        mode: "map" shares the broker's copy, read-only; "copy" makes a private, writable one.
        timeout: seconds to wait for another engine's weights; None: as long as it builds them.
        fallback: load the ordinary way, with a warning, when the broker cannot be used.
        stage: what is shared: tensors as processing left them, or as loading left them.
    """

    broker: str | None = None
    directory: str | None = None
    device: str = "cuda"
    mode: Mode = "map"
    timeout: float | None = None
    fallback: bool = False
    stage: Stage = "processed"


def parse_options(given: object) -> Options:
    """Check what the user gave; nothing is converted or guessed.

    Raises:
        UsageError: it is no mapping, has a key that nobody knows, or a value of no use. Raised
            whatever `fallback` says: a typing error must not cost memory unnoticed.
    """
    if not isinstance(given, Mapping):
        raise UsageError(
            f"--model-loader-extra-config must be a mapping, not {type(given).__name__}"
        )
    known = [field.name for field in dataclasses.fields(Options)]
    unknown = sorted(repr(name) for name in given if name not in known)
    if unknown:
        raise UsageError(
            f"--model-loader-extra-config: load format {LOAD_FORMAT} knows no "
            f"{', '.join(unknown)}; it knows {', '.join(known)}"
        )
    for name, value in given.items():
        fault = _fault(name, value)
        if fault:
            raise UsageError(
                f"--model-loader-extra-config: {name} must be {fault}, not {_shown(value)}"
            )
    return Options(**given)


def _fault(name: str, value: Any) -> str:
    """What a value should have been, "" if it is."""
    if name in _CHOICES:
        choices = _CHOICES[name]
        return "" if value in choices else " or ".join(repr(choice) for choice in choices)
    if name == "fallback":
        return "" if isinstance(value, bool) else "true or false"
    if name == "timeout":
        wanted = f"a positive number of seconds, {MOST_SECONDS} at most"
        return "" if value is None or _is_seconds(value) else wanted
    if name == "broker":
        return "" if value is None or _is_name(value) else "a broker's name"
    return "" if value is None or _is_whole_path(value) else "a whole path"


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= MOST_SECONDS


def _is_name(value: Any) -> bool:
    try:
        check_name(value)
    except (BadRequest, TypeError):
        return False
    return True


def _is_whole_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


def _shown(value: Any) -> str:
    """A value that may be anything, in no more room than a sentence has."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "that"
