"""What code computes a model's weights, as far as it is not the library's own, which has a version.

Two engines share what was computed only if their code is the same: the conversions that are
registered with the library, and the classes of the model and of its parts. Of a class that is
neither the library's nor torch's, its methods and attributes count as they are in memory, and the
source of its module. What these call in other modules is not looked at.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any
from uuid import uuid4

import msgspec
from blake3 import blake3

_VERSIONED = frozenset({"transformers", "torch"}) | sys.stdlib_module_names - {"__main__"}
"""Packages whose versions are in the key already, and the language's own."""
_SAYS_NOTHING = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl")
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Unknown(Exception):
    """Something whose meaning cannot be written down."""


def digest_of_code(model: Any, key_mapping: Any) -> str:
    """Equal in two engines only if the same code computes the model's weights.

    Where that cannot be told (a class that was typed in, an attribute that cannot be written
    down), it is another one each time: such weights are not shared.
    """
    try:
        transforms = [_transform(one) for one in _conversions(model, key_mapping)]
        classes = [_class(one) for one in _own_classes(model, key_mapping)]
        return blake3(msgspec.msgpack.encode([transforms, classes])).hexdigest()
    except (_Unknown, TypeError, ValueError):  # without attributes, an empty cell
        return f"unknown-{uuid4().hex}"


def _conversions(model: Any, key_mapping: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, key_mapping))


def _transform(transform: Any) -> list[Any]:
    patterns = getattr(transform, "compiled_sources", None)
    names = ("source_patterns", "target_patterns", "scope_prefix", "base_model_prefix", "force_cpu")
    return [
        _name(type(transform)),
        *(_written(getattr(transform, name, None), ()) for name in names),
        getattr(patterns, "pattern", ""),
        [
            [_name(type(one)), _written(vars(one), ())]
            for one in getattr(transform, "operations", None) or ()
        ],
    ]


def _own_classes(model: Any, key_mapping: Any) -> list[type]:
    """Of the model, its parts and the conversions: those that have no version, bases too."""
    used = {type(part) for part in model.modules()} | {type(model.config)}
    for transform in _conversions(model, key_mapping):
        operations = getattr(transform, "operations", None) or ()
        used |= {type(transform), *(type(one) for one in operations)}
    own = {base for one in used for base in one.__mro__ if not _has_version(base)}
    return sorted(own, key=_name)


def _has_version(one: type) -> bool:
    return one.__module__.partition(".")[0] in _VERSIONED


def _name(one: type) -> str:
    return f"{one.__module__}.{one.__qualname__}"


def _class(one: type) -> list[Any]:
    members = [item for item in vars(one).items() if item[0] not in _SAYS_NOTHING]
    said = [[name, _written(value, ())] for name, value in sorted(members)]
    return [_name(one), _source(one.__module__), [_name(base) for base in one.__bases__], said]


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError) as error:
        raise _Unknown(module) from error


def _written(value: Any, within: tuple[int, ...]) -> Any:
    """Anything, in a form whose equality means the same in every process."""
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, (FunctionType, CodeType, classmethod, staticmethod, property)):
        return [type(value).__name__, [_written(part, within) for part in _parts(value)]]
    if isinstance(value, dict):
        return _sorted([_written(item, within) for item in value.items()])
    if isinstance(value, (set, frozenset)):
        return _sorted([_written(item, within) for item in value])
    if isinstance(value, (list, tuple)):
        return [_written(item, within) for item in value]
    said = repr(value)
    if _ADDRESS.search(said):
        raise _Unknown(said)
    return said


def _sorted(items: Iterable[Any]) -> list[Any]:
    return sorted(items, key=repr)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, (classmethod, staticmethod)):
        yield value.__func__
    elif isinstance(value, CodeType):
        yield from (value.co_code, value.co_names, value.co_consts)
    else:
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or ())
