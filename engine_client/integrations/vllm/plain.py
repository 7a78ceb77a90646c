"""Plain data: what two processes can compare, and one can tell another without running its code.

Two uses. A key is built from settings (`canonical`), of any type whose value can be written down;
attributes of modules are carried (`encode`, `decode`) if they are of the few types that arrive as
what they were. Pure; torch only for its dtypes and sizes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec
import torch

from broker.errors import UsageError

_MAX_DEPTH = 32


class NotPlainError(Exception):
    """A value that is more than data."""


# --- settings ----------------------------------------------------------------------------------


def canonical(value: Any, what: str) -> Any:
    """A value as JSON has it, the same in every process that has the same settings.

    Args:
        what: where it was found, for the sentence.

    Raises:
        UsageError: it cannot be written down, so no key could tell it from another one.
    """
    try:
        return _canonical(value, 0)
    except NotPlainError as error:
        raise UsageError(
            f"{what} holds {error}, which no key can tell from another one: weights that depend "
            "on it cannot be shared; leave it out or load the ordinary way"
        ) from None


def _canonical(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NotPlainError("something that contains itself")
    if isinstance(value, enum.Enum):
        return [_name_of(type(value)), value.name]
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, str):
        return str(value)  # of torch's version, which is more than a text
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, torch.dtype | torch.device | PurePath):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, type):
        return _name_of(value)
    return _canonical_of_many(value, depth + 1)


def _canonical_of_many(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        items = sorted((str(key), _canonical(item, depth)) for key, item in value.items())
        return dict(items)
    if isinstance(value, list | tuple):
        return [_canonical(item, depth) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_canonical(item, depth) for item in value), key=repr)
    if callable(getattr(value, "to_dict", None)):
        return [_name_of(type(value)), _canonical(value.to_dict(), depth)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [_name_of(type(value)), _canonical(fields, depth)]
    raise NotPlainError(f"a {_name_of(type(value))}")


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- attributes --------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A value as JSON that `decode` makes the same value from, of the same types.

    Raises:
        NotPlainError: it is not None, a bool, a number, a text, bytes, a torch dtype or size, or a
            list, tuple, set or dict of those.
    """
    return _encode(value, 0)


def _encode(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if depth > _MAX_DEPTH:
        raise NotPlainError("something that contains itself")
    if kind in (list, tuple, torch.Size):
        return [_SEQUENCES[kind], [_encode(item, depth + 1) for item in value]]
    if kind is set:
        return ["set", sorted((_encode(item, depth + 1) for item in value), key=repr)]
    if kind is dict:
        pairs = [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]
        return ["dict", pairs]
    raise NotPlainError(f"a {_name_of(kind)}")


def decode(encoded: Any) -> Any:
    """The value that `encode` was given. Runs no code of anybody's.

    Raises:
        UsageError: `encode` did not write this.
    """
    try:
        return _decode(encoded)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"this is no encoded attribute: {str(encoded)[:80]}") from error


def _decode(encoded: Any) -> Any:
    if not isinstance(encoded, list):
        return encoded
    kind, held = encoded
    return _DECODERS[kind](held)


def _decode_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_DECODERS: dict[str, Any] = {
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "dtype": _decode_dtype,
    "list": lambda items: [_decode(item) for item in items],
    "tuple": lambda items: tuple(_decode(item) for item in items),
    "size": lambda items: torch.Size(_decode(item) for item in items),
    "set": lambda items: {_decode(item) for item in items},
    "dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
}


def as_text(value: Any) -> bytes:
    """Canonical JSON of what `canonical` or `encode` returned."""
    return msgspec.json.encode(value, order="sorted")
