"""What loading and processing leave on a model beside its tensors: everything is looked at twice.

An *owner* is whatever keeps attributes: a module, a parameter, and the objects of vLLM's own
classes that a module holds (its `quant_method`, a kernel in it). Owners go by paths:

    model.layers.0.mlp              a module
    model.layers.0.mlp:quant_method.kernel    an object that it holds
    model.layers.0.mlp:weight       a parameter of it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from engine_client.integrations.vllm.plain import NotPlainError, encode

ABSENT = object()
"""What an owner has under a name it does not have."""

_OF_TORCH = frozenset(Module().__dict__)
"""Parameters, buffers, submodules, hooks: torch's own, not attributes that somebody set."""

_HELD_CLASSES = ("vllm.model_executor.", "vllm.v1.attention.", "vllm.models.")
_CONFIGURATION = "Config"
"""Configurations are the key's business, and lead everywhere."""

_MAX_DEPTH = 6


def owners(model: Module) -> Iterator[tuple[str, Any]]:
    """Every owner of a model once, with its path."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        yield path, module
        for name, parameter in module._parameters.items():  # noqa: SLF001 - with None and its name
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}:{name}", parameter
        yield from _held_by(module, f"{path}:", seen, 0)


def _held_by(owner: Any, prefix: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if depth == _MAX_DEPTH:
        return
    for name, value in list(vars(owner).items()):
        if _is_held(value) and id(value) not in seen:
            seen.add(id(value))
            yield prefix + name, value
            yield from _held_by(value, f"{prefix}{name}.", seen, depth + 1)


def _is_held(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Module | Tensor | type)
        and kind.__module__.startswith(_HELD_CLASSES)
        and not kind.__name__.endswith(_CONFIGURATION)
    )


def attributes_of(owner: Any) -> dict[str, Any]:
    """What somebody has set on an owner."""
    of_torch = _OF_TORCH if isinstance(owner, Module) else frozenset()
    return {name: value for name, value in vars(owner).items() if name not in of_torch}


@dataclass
class Changes:
    """What is different now.

    Attributes:
        plain: by owner and name the new value, encoded.
        removed: by owner the names that are gone.
        tensors: by "owner name" tensors that are no parameters and no buffers.
        opaque: "owner.name (a class)" of what is more than data.
    """

    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    opaque: dict[tuple[str, str], str] = field(default_factory=dict)


class Observation:
    """A model as it was. Keeps owners and attributes, so that no address is used again."""

    def __init__(self, model: Module) -> None:
        self._paths: dict[int, str] = {}
        self._marks: dict[str, dict[str, Any]] = {}
        self._kept: list[Any] = []
        for path, owner in owners(model):
            found = attributes_of(owner)
            self._kept.append((owner, list(found.values())))
            self._paths[id(owner)] = path
            self._marks[path] = _marks(owner, found)

    def changes(self, model: Module) -> Changes:
        """What has changed since, by the paths that owners had then.

        A parameter that was replaced counts as the one before. An object that is new shows as a
        change of the attribute that leads to it.
        """
        changes = Changes()
        for path, owner in owners(model):
            before = self._paths.get(id(owner), path if isinstance(owner, Parameter) else None)
            if before is not None:
                self._compare(changes, before, owner)
        return changes

    def _compare(self, changes: Changes, path: str, owner: Any) -> None:
        before, found = self._marks.get(path, {}), attributes_of(owner)
        marks = _marks(owner, found)
        for name, mark in marks.items():
            if before.get(name, ABSENT) == mark:
                continue
            if name in found:
                _note(changes, path, name, found[name])
            elif path in self._marks:
                changes.opaque[path, name] = "submodules or hooks"
        gone = [name for name in before if name not in marks]
        if gone:
            changes.removed[path] = gone


def _note(changes: Changes, path: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        changes.tensors[path, name] = value
        return
    try:
        changes.plain.setdefault(path, {})[name] = encode(value)
    except NotPlainError:
        kind = type(value)
        changes.opaque[path, name] = f"a {kind.__module__}.{kind.__qualname__}"


def _mark(value: Any, depth: int = 0) -> Any:
    """Differs for two values, or one value at two times, unless they are the same in all we see."""
    try:
        return ("plain", repr(encode(value)))
    except NotPlainError:
        pass
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version  # noqa: SLF001 - no other way to ask
        return ("tensor", id(value), version, value.is_meta or value.data_ptr())
    if depth < _MAX_DEPTH and type(value) in (list, tuple, set):
        return ("many", type(value), [_mark(item, depth + 1) for item in value])
    if depth < _MAX_DEPTH and type(value) is dict:
        return ("dict", [(_mark(k, depth + 1), _mark(v, depth + 1)) for k, v in value.items()])
    return ("object", id(value))


_STRUCTURE = ("_modules", "_forward_hooks", "_forward_pre_hooks")
"""What nobody can carry."""


def _marks(owner: Any, found: dict[str, Any]) -> dict[str, Any]:
    """A mark of each attribute; of a module also of its submodules and hooks."""
    marks = {name: _mark(value) for name, value in found.items()}
    if isinstance(owner, Module):
        for name in _STRUCTURE:
            marks[name] = [(key, id(value)) for key, value in vars(owner)[name].items()]
    return marks


def meta_tensors(model: Module) -> list[str]:
    """Where a tensor without values is left: parameters, buffers and attributes."""
    left = []
    for path, owner in owners(model):
        if isinstance(owner, Module):
            entries = {**owner._parameters, **owner._buffers}  # noqa: SLF001
            left += [f"{path}.{key}" for key, held in entries.items() if _is_meta(held)]
        left += [f"{path}.{key}" for key, held in attributes_of(owner).items() if _is_meta(held)]
    return left


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
