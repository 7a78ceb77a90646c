"""Stand-ins for the tensors of a checkpoint that is not there yet.

A stand-in has name, shape and dtype, and no memory. It goes through the library's code in place of
the tensor, and says at the end whether it is still the stored one.
"""
# ruff: noqa: SLF001 - torch's dispatch of tensor subclasses is told by such names

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from broker.errors import UsageError

_aten = torch.ops.aten
_SAME = frozenset({_aten.detach.default, _aten.alias.default})


@dataclass
class Origin:
    """Where what a stand-in stands for comes from.

    Attributes:
        stored: the tensor's name in the checkpoint; "" if it is made of several, or of parts.
        viewed: what this is a part or another shape of, in the same memory.
        was_written: the library's code wrote to it, so it is not what is stored any more.
    """

    stored: str
    viewed: Origin | None = None
    was_written: bool = False

    def note_write(self) -> None:
        """What is written to a view is written to what it is a view of."""
        origin: Origin | None = self
        while origin is not None:
            origin.was_written = True
            origin = origin.viewed


class StandIn(torch.Tensor):
    """A tensor of a checkpoint before it is there. Says it is on the CPU, and has no memory.

    Casting and aliasing keep its origin; anything else gives a stand-in that is computed.
    """

    origin: Origin
    equalities: list[tuple[str, str]]
    """Stored names that the library has taken for equal, on our word: to be verified."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, origin: Origin, equalities: list[tuple[str, str]]) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.origin, made.equalities = origin, equalities
        return made

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device="meta")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.equal.default:
            return _take_for_equal(*args)
        written = _written(func, args, kwargs)
        _note_writes(func, written)
        if written and all(_is_written(one) for one in func._schema.returns):
            return _what_in_place_gives(func, written)
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, _on_meta(kwargs)))
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, StandIn)]
        origin = _origin_of_result(func, given)
        equalities = given[0].equalities if given else []
        return tree_map(
            lambda item: StandIn(item, origin, equalities) if isinstance(item, Tensor) else item,
            result,
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<StandIn {self.origin.stored or 'computed'} {self.dtype} {list(self.shape)}>"


def _is_written(one: Any) -> bool:
    """Of an argument or a result in an operation's schema: whether it is written in place."""
    return one.alias_info is not None and one.alias_info.is_write


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to: tensors, and lists of tensors."""
    named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}
    given = {**named, **kwargs}
    written = [given.get(one.name) for one in func._schema.arguments if _is_written(one)]
    return [value for value in written if value is not None]


def _note_writes(func: Any, written: list[Any]) -> None:
    """Note what is not as it is stored any more.

    Raises:
        UsageError: what is stored would be written into a tensor that is real already.
    """
    for tensor in tree_leaves(written):
        if isinstance(tensor, StandIn):
            tensor.origin.note_write()
        elif isinstance(tensor, Tensor) and not tensor.is_meta:
            raise UsageError(
                "from_pretrained: the model's class writes what is computed from stored weights "
                f"into a tensor that is not stored ({func}), before the weights are there; load "
                "this model privately and share it with client.get_or_publish"
            )


def _what_in_place_gives(func: Any, written: list[Any]) -> Any:
    """An operation that writes in place gives what it has written to, or nothing."""
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _origin_of_result(func: Any, given: list[StandIn]) -> Origin:
    if not given:
        return Origin("")
    if func in _SAME or func is _aten._to_copy.default:
        return given[0].origin
    is_view = any(one.alias_info is not None for one in func._schema.arguments)
    return Origin("", given[0].origin if is_view or func is _aten._unsafe_view.default else None)


def _take_for_equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if isinstance(one, StandIn) and isinstance(other, StandIn):
        one.equalities.append((one.origin.stored, other.origin.stored))
        return True
    return False


def _to_meta(item: Any) -> Any:
    if isinstance(item, StandIn):
        return item.on_meta()
    return item.to("meta") if isinstance(item, Tensor) else item


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever it makes, and wherever that was to be, has no memory."""
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") else dict(kwargs)
