"""A bound module moves to another generation of its weights: every tensor or none."""

from __future__ import annotations

from typing import Any, NamedTuple

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

    Names, dtypes, shapes, strides, which names share a storage where, and which are buffers that no
    state dict holds; not the places in the slab.
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
            ("of another dtype, shape, stride or tie", sorted(mismatched)),
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
        # A state dict does not tell parameters from buffers, and a module that is bound need not.
        is_private = group.kind == "non-persistent-buffer"
        what = (group.dtype, tuple(group.shape), tuple(group.stride), is_private)
        for name, offset in zip(group.names, group.offsets, strict=True):
            first, start = tied.get(name, ("", offset))
            structure[name] = (*what, first, offset - start)
    return structure


def swap_module(binding: Binding, new: SlabTensors) -> None:
    """Point every shared parameter at the same place in the new weights; buffers get new copies.

    For between two forward passes: a pass that runs meanwhile in another thread may see both. Every
    Parameter stays the same object. Structures must be equal (`check_same_structure`). What was
    replaced or converted since the bind is left alone.

    Raises:
        UsageError: the module was detached or is gone.
        Anything else: there is no memory for the buffers, or an interrupt. Nothing was changed.
    """
    module = binding.module
    if module is None or not binding.is_bound:
        raise UsageError("swap: the module is not bound any more")
    # Everything that can fail comes before the first assignment.
    steps = list(_parameter_steps(binding, module, new)) + _buffer_steps(binding, module, new)
    before = [held.data for held, _data in steps]
    try:
        for held, data in steps:
            held.data = data
        binding.tensors = new
    except BaseException:  # an interrupt between two of them
        for (held, _data), data in zip(steps, before, strict=True):
            held.data = data
        raise


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
            name = binding.stored_name(path + key)
            if buffer is None or name not in copied or id(buffer) in steps:
                continue
            stored = new.tensor(name)
            if (buffer.dtype, buffer.shape, buffer.device) == (
                stored.dtype,
                stored.shape,
                stored.device,
            ):
                steps[id(buffer)] = _Step(buffer, stored.clone())
    return list(steps.values())


class PrivateWeights(dict[str, Tensor]):
    """Tensors of the engine's own, writable, with the ties of the set they were copied from.

    Attributes:
        checkpoint: the content's identity, or "".
        generation: the label of the generation, or None.
        metadata: what the publisher gave along.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        checkpoint: str,
        generation: str | None,
        metadata: dict[str, Any],
    ) -> None:
        super().__init__(tensors)
        self.checkpoint = checkpoint
        self.generation = generation
        self.metadata = metadata


def private_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of every tensor; what shared a storage shares one again. Blocks for the copies."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not storage.nbytes():
            copies[name] = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            continue
        if address not in storages:
            storages[address] = storage.clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies[name] = copy.set_(
            storages[address], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return copies
