"""A module whose parameters are read-only views of shared weights, and private ones again.

What writes to a bound parameter kills the process: in-place initialisation, `.data +=` (merging a
LoRA adapter), optimiser steps, writing through `numpy()`, the forward pass of
`Embedding(max_norm=…)`. What does not write works as ever: forward passes, `deepcopy`, `.to()`,
`half()`, `state_dict()`, saving, compiling, training adapters beside, and
`load_state_dict(assign=True)`.
"""
# ruff: noqa: SLF001 - modules' own dictionaries: register_parameter costs twice as much

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from broker.errors import UsageError
from engine_client.construction import parameters_on_meta
from engine_client.guard import WriteGuard, guard_load_state_dict
from engine_client.matching import Place, Plan, plan_bind, walk
from engine_client.views import SlabTensors

__all__ = ["Binding", "bind_module", "binding_of", "parameters_on_meta"]


class Binding:
    """What `bind_module` did to a module. Does not keep the module alive.

    Attributes:
        tensors: the weights it is bound to.
        prefix: what the stored names have in front of the module's.
        ignored: stored names that stayed unused (leftovers of old releases, or by pattern).
        copied: stored names of which the module got private copies: its buffers.
        guard: the write guard, if one was asked for.
    """

    def __init__(
        self,
        module: Module,
        tensors: SlabTensors,
        plan: Plan,
        frozen: set[str],
        *,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.tensors = tensors
        self.ignored = plan.ignored
        self.copied = list(plan.buffers)
        self.guard: WriteGuard | None = None
        self.prefix = prefix
        self._names = names
        self._module = weakref.ref(module)
        self._frozen = frozen

    @property
    def module(self) -> Module | None:
        """The bound module, or None once it has died."""
        return self._module()

    @property
    def is_bound(self) -> bool:
        """False after `detach`, and once the module has died."""
        module = self._module()
        return module is not None and _bindings.get(module) is self

    def stored_name(self, path: str) -> str:
        """What a place is called in the stored weights, given prefix and path in the module."""
        return path if self._names is None else self._names.get(path, "")

    def detach(self) -> None:
        """Give the module private, writable copies of what it shares. Idempotent.

        Every Parameter stays the same object, so ties stay tied; two parameters over one storage
        still share one. `requires_grad` is again what it was before the bind. Parameters that were
        replaced or converted meanwhile are left alone.
        """
        module = self._module()
        if self.guard is not None:
            self.guard.stop()
        if module is None or _bindings.get(module) is not self:
            return
        copies: dict[int, torch.UntypedStorage] = {}
        for path, at in walk(module, self.prefix):
            for key, parameter in at._parameters.items():
                if parameter is None:
                    continue
                stored = self.stored_name(path + key)
                if self.tensors.owns(parameter):
                    _make_private(parameter, copies)
                elif parameter.numel() or stored not in self.tensors.layouts:
                    continue  # one without elements lies nowhere
                parameter.requires_grad_(stored not in self._frozen)
        del _bindings[module]


def bind_module(
    module: Module,
    tensors: SlabTensors,
    *,
    ignore: Sequence[str] = (),
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    guard: bool = False,
) -> Binding:
    """Replace the module's parameters with read-only views of shared weights, its buffers with
    private copies.

    Parameters become views with `requires_grad=False`, of the class and with the attributes of
    those they replace; tied ones stay one object. Persistent buffers become private copies, those
    that are not persistent keep their own values (unless an engine published them), and all end up
    on the weights' device. Not for two threads on one module. Blocks only for the buffers' copies.

    Args:
        module: usually built within `parameters_on_meta()`; one with real parameters gives its
            own up.
        ignore: shell patterns (`fnmatch`) of stored names that may stay unused.
        prefix: what the stored names have in front of the module's.
        names: instead of a prefix and patterns: the stored name for every place that gets a stored
            tensor, by the module's name of it. All other places keep what they have.
        guard: name in-place operations on shared parameters, in this thread, until `detach`.

    Raises:
        BindError: names, shapes, dtypes or ties do not fit; lists all of them. The module is as it
            was.
        UsageError: it is no module, or bound already, or the weights were released; or `names`
            gives one stored tensor to two places that are not tied.
    """
    check_module(module)
    with _no_collection():
        plan = plan_bind(module, tensors, prefix, ignore, names)
        views = tensors.take(plan.names + list(plan.tied))
        copies = [view.clone() for view in tensors.take(list(plan.buffers))]
        try:
            frozen = _replace(plan, views, copies, tensors.device)
        except BaseException:
            _restore(plan)
            raise
    binding = Binding(module, tensors, plan, frozen, prefix=prefix, names=names)
    guard_load_state_dict()
    _bindings[module] = binding
    if guard:
        binding.guard = WriteGuard(binding)
        binding.guard.start()
    return binding


def check_module(given: object) -> None:
    """Raise `UsageError` unless it is a torch module."""
    if not isinstance(given, Module):
        raise UsageError(f"only a torch module can be bound, not {type(given).__name__}")


def binding_of(module: Module) -> Binding | None:
    """The binding of a module that was passed to `bind_module` and not detached since."""
    return _bindings.get(module)


_bindings: weakref.WeakKeyDictionary[Module, Binding] = weakref.WeakKeyDictionary()


def _replace(
    plan: Plan, views: list[Tensor], copies: list[Tensor], device: torch.device
) -> set[str]:
    """Carry the plan out; the names of parameters that did not require a gradient."""
    frozen = set()
    # Turning a fresh view into a Parameter in place, as torch's lazy modules do, costs a tenth of
    # making a Parameter from it.
    for (name, held, entries, key, _), view in zip(plan.single, views, strict=False):
        view.__class__ = Parameter
        if held.__dict__:
            view.__dict__.update(held.__dict__)
        if not held.requires_grad:
            frozen.add(name)
        entries[key] = view
    for places, view in zip(plan.tied.values(), views[len(plan.single) :], strict=True):
        _fill(places, _as_parameter(view, places[0].held))
        if not places[0].held.requires_grad:
            frozen.update(place.name for place in places)
    for places, copy in zip(plan.buffers.values(), copies, strict=True):
        _fill(places, copy)
    for place in plan.moves:
        place.entries[place.key] = _moved(place.held, device)
    _tell(plan)
    return frozen


def _as_parameter(view: Tensor, held: Tensor) -> Tensor:
    try:
        view.__class__ = type(held)
    except TypeError:  # a class with slots of its own
        view = torch.Tensor._make_subclass(type(held), view, False)
    view.__dict__.update(held.__dict__)
    return view


def _moved(held: Tensor, device: torch.device) -> Tensor:
    if not isinstance(held, Parameter):
        return held.to(device)
    moved = _as_parameter(held.detach().to(device), held)
    return moved.requires_grad_(held.requires_grad)


def _fill(places: list[Place], tensor: Tensor) -> None:
    for place in places:
        place.entries[place.key] = tensor


def _tell(plan: Plan) -> None:
    # torch.nn.RNN and its like keep a list of their parameters, which their __setattr__ maintains.
    for module in plan.watching:
        for key, parameter in list(module._parameters.items()):
            setattr(module, key, parameter)


def _restore(plan: Plan) -> None:
    for places in (plan.single, *plan.tied.values(), *plan.buffers.values(), plan.moves):
        for _, held, entries, key, _ in places:
            entries[key] = held
    _tell(plan)


def _make_private(parameter: Parameter, copies: dict[int, torch.UntypedStorage]) -> None:
    storage = parameter.untyped_storage()
    address = storage.data_ptr()
    if address not in copies:
        copies[address] = storage.clone()  # type: ignore[no-untyped-call]
    private: Any = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    offset = parameter.storage_offset()
    parameter.data = private.set_(copies[address], offset, parameter.size(), parameter.stride())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic collector: ten thousand new tensors would start it again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
