"""Giving a model on meta the parameters that another engine's model has after processing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn import Module, Parameter

from broker.errors import Mismatch
from broker.weights import Manifest
from engine_client.integrations.vllm.carried import NAME, Carried, class_name

_NAMES_SHOWN = 5
_PLAIN = f"{Parameter.__module__}.{Parameter.__qualname__}"
_BUFFERS = ("buffer", "non-persistent-buffer")


class Layout(NamedTuple):
    """What a stored tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str


Layouts = Mapping[str, Layout]
"""By stored name."""


def layouts_of(manifest: Manifest) -> dict[str, Layout]:
    """The layout of every tensor of a set."""
    return {
        name: Layout(getattr(torch, group.dtype), tuple(group.shape), group.kind)
        for group in manifest.groups
        for name in group.names
    }


def adopt_structure(
    model: Module, layouts: Layouts, carried: Carried, device: torch.device
) -> None:
    """Make the names, dtypes, shapes and classes of a model's tensors those that were published.

    What is there and fits stays the very object. What is new or has another shape is put there on
    meta; what the publisher has not is dropped. The model can then be bound.

    Args:
        device: where buffers are.

    Raises:
        Mismatch: a module is missing, or a parameter would have to be of a class of its own.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted: dict[str, dict[str, Layout]] = defaultdict(dict)
    for name, layout in layouts.items():
        path, _, leaf = name.rpartition(".")
        if path != NAME:
            wanted[path][leaf] = layout
    missing = sorted(set(wanted) - set(modules))
    if missing:
        shown = ", ".join(missing[:_NAMES_SHOWN])
        raise Mismatch(f"the published model has modules that this one has not: {shown}")
    for path, module in modules.items():
        _adopt(path, module, wanted[path], carried, device)
    for name in carried.empty:
        path, _, leaf = name.rpartition(".")
        modules[path].register_parameter(leaf, None)


def _adopt(
    path: str, module: Module, wanted: dict[str, Layout], carried: Carried, device: torch.device
) -> None:
    parameters, buffers = module._parameters, module._buffers  # noqa: SLF001 - to be rearranged
    for leaf in [leaf for leaf in parameters if not _is(wanted.get(leaf), "parameter")]:
        del parameters[leaf]
    for leaf in [leaf for leaf in buffers if not _is(wanted.get(leaf), *_BUFFERS)]:
        del buffers[leaf]
    for leaf, layout in wanted.items():
        name = f"{path}.{leaf}".lstrip(".")
        if layout.kind in _BUFFERS:
            _adopt_buffer(module, leaf, layout, device)
        else:
            _adopt_parameter(module, name, leaf, layout, carried.classes.get(name, _PLAIN))


def _is(layout: Layout | None, *kinds: str) -> bool:
    return layout is not None and layout.kind in kinds


def _adopt_buffer(module: Module, leaf: str, layout: Layout, device: torch.device) -> None:
    is_persistent = layout.kind == "buffer"
    is_private = leaf in module._non_persistent_buffers_set  # noqa: SLF001 - no other way to ask
    if is_persistent is is_private or not _fits(module._buffers.get(leaf), layout):  # noqa: SLF001
        module.register_buffer(leaf, _empty(layout, device), persistent=is_persistent)


def _adopt_parameter(module: Module, name: str, leaf: str, layout: Layout, kind: str) -> None:
    held = module._parameters.get(leaf)  # noqa: SLF001
    if held is not None and _fits(held, layout) and class_name(held) == kind:
        return
    if kind != _PLAIN:
        raise Mismatch(
            f"the published parameter {name} is a {kind}, which this model has not there; only "
            "plain parameters can be made anew"
        )
    module.register_parameter(leaf, Parameter(_empty(layout, "meta"), requires_grad=False))


def _empty(layout: Layout, device: torch.device | str) -> torch.Tensor:
    return torch.empty(layout.shape, dtype=layout.dtype, device=device)


def _fits(held: torch.Tensor | None, layout: Layout) -> bool:
    return held is not None and held.dtype is layout.dtype and held.shape == layout.shape


def require_structure(model: Module, layouts: Layouts) -> None:
    """Make sure that a model has the published tensors and no others, in dtype and shape.

    Raises:
        Mismatch: names what differs; the model must not be used.
    """
    ours = {
        name: (tensor.dtype, tuple(tensor.shape))
        for tensors in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in tensors
    }
    theirs = {
        name: (layout.dtype, tuple(layout.shape))
        for name, layout in layouts.items()
        if not name.startswith(f"{NAME}.")
    }
    differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if differing:
        more = f" and {len(differing) - _NAMES_SHOWN} more" if len(differing) > _NAMES_SHOWN else ""
        raise Mismatch(
            "after processing, these tensors are not what the publishing engine has: "
            f"{', '.join(differing[:_NAMES_SHOWN])}{more}; both must run the same version of vLLM"
        )
