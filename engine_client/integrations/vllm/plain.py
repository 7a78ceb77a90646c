"""Plain data: what two processes can compare, and one can tell another without running its code.

Two uses. A key is built from settings (`canonical`), of any type whose value can be written down;
attributes of modules are carried (`encode`, `decode`) if they are of the few types that arrive as
what they were. Pure; torch only for its dtypes and sizes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec
import torch

from broker.errors import UsageError

_MAX_DEPTH = 32
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
"""What msgspec writes."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class NotPlainError(Exception):
    """A value that is more than data."""


# --- settings ----------------------------------------------------------------------------------


def canonical(value: Any, what: str) -> Any:
    """A value as JSON has it, the same in every process that has the same settings.

    Different values are different JSON: whatever JSON has not is a list that begins with its kind,
    and so is every list. Alike on purpose are only lists and tuples, sets of both kinds, and
    mappings of any class: a configuration read from a file has another kind than one in code.

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
        # Not every version of Python has names for combined flags.
        member = value.value if isinstance(value, enum.Flag) else value.name
        return ["enum", _name_of(type(value)), member]
    if _is_json(value):
        return value
    kind = type(value)
    if kind is int:
        return ["int", hex(value)]
    if isinstance(value, str):  # also torch's version, which is more than a text
        return ["str", _name_of(kind), _hex_of(value)]
    if isinstance(value, float):
        return ["float", _name_of(kind), float.hex(value)]
    if isinstance(value, torch.dtype | torch.device):
        return [_name_of(kind), str(value)]
    if isinstance(value, PurePath):
        return ["path", _hex_of(str(value))]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, type):
        return ["type", _name_of(value)]
    return _canonical_of_many(value, depth + 1)


def _canonical_of_many(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        pairs = [[_canonical(key, depth), _canonical(item, depth)] for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return dict(sorted(pairs))
        return ["dict", sorted(pairs, key=as_text)]
    if isinstance(value, list | tuple):
        return ["list", [_canonical(item, depth) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted((_canonical(item, depth) for item in value), key=as_text)]
    if callable(getattr(value, "to_dict", None)):
        return ["object", _name_of(type(value)), _canonical(value.to_dict(), depth)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["dataclass", _name_of(type(value)), _canonical(fields, depth)]
    raise NotPlainError(f"a {_name_of(type(value))}")


def _is_json(value: Any) -> bool:
    """Whether JSON has this very value, and msgspec writes it."""
    if value is None or type(value) is bool:
        return True
    if type(value) is int:
        return _LEAST_INT <= value <= _MOST_INT
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is str and not _SURROGATES.search(value)


def _hex_of(text: str) -> str:
    """Of any text, also of one that is no Unicode: half a pair, or a byte of a file's name."""
    return text.encode("utf-8", "surrogatepass").hex()


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
    if kind is not float and _is_json(value):
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind is str:
        return ["str", _hex_of(value)]
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
        return ["set", sorted((_encode(item, depth + 1) for item in value), key=as_text)]
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
    except _NOT_OURS as error:
        raise UsageError(f"this is no encoded attribute: {reprlib.repr(encoded)}") from error


_NOT_OURS = (*(KeyError, ValueError, TypeError, AttributeError), OverflowError, RecursionError)


def _decode(encoded: Any) -> Any:
    if not isinstance(encoded, list):
        if encoded is None or type(encoded) in (bool, int, str):
            return encoded
        raise TypeError(type(encoded))
    kind, held = encoded
    return _DECODERS[kind](held)


def _decode_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


def _decode_size(sizes: list[int]) -> torch.Size:
    if any(abs(size) >> 63 for size in sizes):  # torch takes those, and fails when they are read
        raise OverflowError(sizes)
    return torch.Size(sizes)


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_DECODERS: dict[str, Any] = {
    "int": lambda digits: int(digits, 16),
    "str": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "dtype": _decode_dtype,
    "list": lambda items: [_decode(item) for item in items],
    "tuple": lambda items: tuple(_decode(item) for item in items),
    "size": lambda items: _decode_size([_decode(item) for item in items]),
    "set": lambda items: {_decode(item) for item in items},
    "dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
}


def as_text(value: Any) -> bytes:
    """Canonical JSON of what `canonical` or `encode` returned."""
    return msgspec.json.encode(value, order="sorted")
