"""Writes to shared weights, named before they kill the process.

`WriteGuard` sees every operation of its thread and costs accordingly; it is for finding out who
writes. The guard of `load_state_dict` costs nothing elsewhere and is always there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from broker.errors import UsageError
from engine_client.storages import any_storage_lives, is_shared_address
from engine_client.views import SlabTensors, address_of

_WRITES_NO_MEMORY = frozenset({"aten::record_stream"})
"""Declared as writing to a tensor, but only notes its use."""


class Bound(Protocol):
    """What the guard needs of a binding."""

    tensors: SlabTensors


class WriteGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before an operation writes to a tensor of these weights. A context manager.

    Sees what torch dispatches in the thread that entered it: in-place operations, `out=`, foreach
    and fused optimiser steps, also through `.data`, views and detached tensors. Does not see writes
    around torch: through `numpy()`, raw pointers, kernels of other libraries.
    """

    def __init__(self, binding: Bound) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._binding = binding  # whose tensors change when the module moves to other weights
        self._is_active = True

    def start(self) -> None:
        """Guard this thread until `stop`."""
        self._is_active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Guard no longer. From another thread, or under a mode entered later, it stays in place
        and lets everything through. Idempotent."""
        self._is_active = False
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_active:
            for tensor in _written(func, args, kwargs):
                name = self._binding.tensors.name_of(tensor)
                if name is not None:
                    raise UsageError(
                        f"{func} would write to {name!r}, which is shared with other engines and "
                        "mapped read-only: detach() the module first, or write to a copy",
                        operation=str(func),
                        tensor=name,
                    )
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operation writes memory of."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name in _WRITES_NO_MEMORY:
        return ()
    if torch.Tag.inplace_view in func.tags:
        return ()  # t_(), squeeze_(), set_(): changes the tensor object, not its memory
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


# --- load_state_dict ---------------------------------------------------------------------------


def guard_load_state_dict() -> None:
    """Make `load_state_dict` of every module refuse to write to shared weights.

    A hook on the bound module would not do: torch calls a child's hooks after it has copied the
    parent's own parameters, a call on a submodule passes its parents' hooks by, and hooks are
    copied and pickled with the module. So the method itself looks, before anything is written, at
    where the parameters lie; a private copy or a detached module is not concerned. Idempotent.
    """
    global _installed
    if Module.load_state_dict is not _installed:
        _installed = _guarded(Module.load_state_dict)
        Module.load_state_dict = _installed  # type: ignore[method-assign]


_installed: Callable[..., Any] | None = None


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(
        self: Module, state_dict: Any, strict: bool = True, assign: bool = False, **kwargs: Any
    ) -> Any:
        if any_storage_lives() and not assign:
            _refuse_shared(self, state_dict, strict)
        return original(self, state_dict, strict=strict, assign=assign, **kwargs)

    return load_state_dict


def _refuse_shared(module: Module, state_dict: Any, strict: bool) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        # Not strict, and not in it: loading adapters beside shared weights is fine.
        if not strict and name not in state_dict:
            continue
        if not parameter.is_meta and is_shared_address(address_of(parameter)):
            raise UsageError(
                f"load_state_dict would write to {name!r} of {type(module).__name__}, which is "
                "shared with other engines and mapped read-only: detach() the bound module first",
                tensor=name,
            )
