"""What a user may say in vLLM's `--model-loader-extra-config`. Pure: imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from broker.errors import UsageError

LOAD_FORMAT = "weight_broker"

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
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise UsageError(
            f"--model-loader-extra-config: load format {LOAD_FORMAT} knows no "
            f"{', '.join(unknown)}; it knows {', '.join(known)}"
        )
    for name, value in given.items():
        fault = _fault(name, value)
        if fault:
            raise UsageError(f"--model-loader-extra-config: {name} must be {fault}, not {value!r}")
    return Options(**given)


def _fault(name: str, value: Any) -> str:
    """What a value should have been, "" if it is."""
    if name in _CHOICES:
        choices = _CHOICES[name]
        return "" if value in choices else " or ".join(repr(choice) for choice in choices)
    if name == "fallback":
        return "" if isinstance(value, bool) else "true or false"
    if name == "timeout":
        return "" if value is None or _is_seconds(value) else "a positive number of seconds"
    return "" if value is None or (isinstance(value, str) and value) else "a text"


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
