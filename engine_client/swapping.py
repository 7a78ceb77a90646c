"""A bound module moves to another generation of its weights: every tensor or none."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from broker.errors import BindError, UsageError
from broker.weights import Manifest
from engine_client.binding import Binding
from engine_client.matching import walk
from engine_client.views import SlabTensors

_NAMES_SHOWN = 10


class _Step(NamedTuple):
    """`held.data` becomes `data`."""

    held: Tensor
    data: Tensor


def check_same_structure(old: Manifest, new: Manifest) -> None:
    """Raise `BindError` with all differences unless the two describe the same tensors.

    Names, dtypes, shapes, strides, kinds and which names share a storage where; not the places in
    the slab.
    """
    ours, theirs = _structure(old), _structure(new)
    missing = sorted(ours.keys() - theirs.keys())
    unexpected = sorted(theirs.keys() - ours.keys())
    mismatched = {
        name: {"bound": str(ours[name]), "new": str(theirs[name])}
        for name in ours.keys() & theirs.keys()
        if ours[name] != theirs[name]
    }
    if not (missing or unexpected or mismatched):
        return
    said = [
        f"{len(names)} {what}: {', '.join(list(names)[:_NAMES_SHOWN])}"
        for what, names in (
            ("missing from the new generation", missing),
            ("only in the new generation", unexpected),
            ("of another dtype, shape, stride, kind or tie", sorted(mismatched)),
        )
        if names
    ]
    raise BindError(
        f"the new generation has another structure, so the module stays on the old one: "
        f"{'; '.join(said)}; build a module for it and bind that",
        reason="structure",
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
    )


def _structure(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    tied = {
        name: (alias.names[0], alias.offset) for alias in manifest.aliases for name in alias.names
    }
    structure: dict[str, tuple[object, ...]] = {}
    for group in manifest.groups:
        what = (group.dtype, tuple(group.shape), tuple(group.stride), group.kind)
        for name, offset in zip(group.names, group.offsets, strict=True):
            first, start = tied.get(name, ("", offset))
            structure[name] = (*what, first, offset - start)
    return structure


def swap_module(binding: Binding, new: SlabTensors) -> None:
    """Point every shared parameter at the same place in the new weights; buffers get new copies.

    For between two forward passes: a pass that runs meanwhile in another thread may see both. Every
    Parameter stays the same object. Structures must be equal (`check_same_structure`).

    Raises:
        UsageError: the module was detached or is gone. Nothing was changed.
    """
    module = binding.module
    if module is None or not binding.is_bound:
        raise UsageError("swap: the module is not bound any more")
    # Everything that can fail comes before the first assignment.
    steps = list(_parameter_steps(binding, module, new)) + _buffer_steps(binding, module, new)
    for held, data in steps:
        held.data = data
    binding.tensors = new


def _parameter_steps(binding: Binding, module: Module, new: SlabTensors) -> list[_Step]:
    old = binding.tensors
    steps: dict[int, _Step] = {}
    for _path, at in walk(module):
        for parameter in at._parameters.values():  # noqa: SLF001 - as torch's own parameters()
            if parameter is None or id(parameter) in steps:
                continue
            name = old.name_of(parameter)
            if name is not None:
                steps[id(parameter)] = _Step(parameter, _same_view(parameter, new.tensor(name)))
    return list(steps.values())


def _same_view(held: Tensor, stored: Tensor) -> Tensor:
    """What `held` is to its storage, over the storage of `stored`; hooks may have permuted it."""
    view = torch.empty(0, dtype=held.dtype, device=stored.device)
    return view.set_(stored.untyped_storage(), held.storage_offset(), held.size(), held.stride())


def _buffer_steps(binding: Binding, module: Module, new: SlabTensors) -> list[_Step]:
    copied = set(binding.copied)
    steps: dict[int, _Step] = {}
    for path, at in walk(module, binding.prefix):
        for key, buffer in at._buffers.items():  # noqa: SLF001 - as torch's own buffers()
            if buffer is not None and path + key in copied and id(buffer) not in steps:
                steps[id(buffer)] = _Step(buffer, new.tensor(path + key).clone())
    return list(steps.values())


class PrivateWeights(dict[str, Tensor]):
    """Tensors of the engine's own, writable, with the ties of the set they were copied from.

    Attributes:
        checkpoint: the content's identity, or "".
        generation: the label of the generation, or None.
    """

    def __init__(self, tensors: dict[str, Tensor], checkpoint: str, generation: str | None) -> None:
        super().__init__(tensors)
        self.checkpoint = checkpoint
        self.generation = generation


def private_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of every tensor; what shared a storage shares one again. Blocks for the copies."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not storage.nbytes():
            copies[name] = tensor.clone()
            continue
        if address not in storages:
            storages[address] = storage.clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies[name] = copy.set_(
            storages[address], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return copies
