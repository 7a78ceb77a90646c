"""Which stored tensor belongs to which place of a module, and what does not fit.

Pure decision: looks at names, shapes and dtypes (and at bytes where a tied parameter is stored more
than once), changes nothing. `engine_client.binding` acts on the plan.
"""
# ruff: noqa: SLF001 - modules' own dictionaries: named_parameters() and setattr cost 10 times as much

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from broker.errors import UsageError
from engine_client.misfits import Misfits
from engine_client.storages import any_storage_lives, is_shared_address
from engine_client.views import Layout, SlabTensors, address_of

_MAX_PATH = 8192
"""A module with longer names than this contains itself."""

_LEFTOVERS = ("rotary_emb.inv_freq", "position_ids")
"""Endings of buffers that older releases of transformers stored and newer ones compute: rotary
frequencies of every layer (moved to the model) and the positions of BERT-like embeddings."""


class Place(NamedTuple):
    """One entry of a module's `_parameters` or `_buffers`."""

    name: str
    """The stored name that belongs here: prefix and path in the module."""
    held: Tensor
    entries: dict[str, Any]
    key: str
    module: Module


@dataclass
class Plan:
    """What a bind will do.

    Attributes:
        names, single: stored names, and for each the one place it goes to.
        tied: stored name → the places that get the same Parameter.
        buffers: stored name → the places that get the same private copy.
        moves: what the module keeps of its own and only has to come to the device.
        ignored: stored names that stay unused, by a rule or a pattern.
        watching: modules that want to see their parameters set (`__setattr__` of their own).
    """

    names: list[str] = field(default_factory=list)
    single: list[Place] = field(default_factory=list)
    tied: dict[str, list[Place]] = field(default_factory=dict)
    buffers: dict[str, list[Place]] = field(default_factory=dict)
    moves: list[Place] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    watching: list[Module] = field(default_factory=list)


def plan_bind(
    module: Module,
    tensors: SlabTensors,
    prefix: str,
    ignore: Sequence[str],
    names: Mapping[str, str] | None = None,
) -> Plan:
    """Find the stored tensor of every parameter and buffer.

    Args:
        prefix: what the stored names have in front of the module's.
        ignore: shell patterns of stored names that may stay unused.
        names: the module's name of every place that gets a stored tensor, and that tensor's; all
            other places keep what they have, and all other tensors stay unused.

    Raises:
        BindError: with everything that does not fit, if anything does not.
        UsageError: the module is bound already, or contains itself; or `names` gives one stored
            tensor to two places that are not tied.
    """
    return _Matching(module, tensors, names).plan(prefix, ignore)


class _Matching:
    def __init__(
        self, module: Module, tensors: SlabTensors, names: Mapping[str, str] | None
    ) -> None:
        self._module = module
        self._tensors = tensors
        self._names = names
        self._kept: list[Place] = []
        self._owners: dict[str, Tensor] = {}
        self._plan = Plan()
        self._misfits = Misfits()
        self._used: set[str] = set()
        self._named: set[str] = set()

    def plan(self, prefix: str, ignore: Sequence[str]) -> Plan:
        plan, layouts = self._plan, self._tensors.layouts
        odd, buffers = self._walk(prefix)
        self._refuse_bound(plan.single + odd)
        self._use(plan.names)
        for same in self._apart(odd):
            self._match(same, plan.tied)
        own = self._match_buffers(buffers)
        if self._names is not None:
            self._misfits.no_place = [name for name in self._names if name not in self._named]
        if len(self._used) != len(layouts):
            left = [name for name in layouts if name not in self._used]
            plan.ignored = left
            if self._names is None:
                is_ignored = _ignored_by(self._module, {place.name for place in own}, ignore)
                plan.ignored = [name for name in left if is_ignored(name, layouts[name])]
            ignored = set(plan.ignored)
            self._misfits.unexpected = [name for name in left if name not in ignored]
        if self._misfits:
            raise self._misfits.error(self._module, layouts)
        return plan

    def _walk(self, prefix: str) -> tuple[list[Place], list[Place]]:
        """Fill in what fits at first sight; the other places of parameters, and all of buffers.

        Plain tuples where speed counts: a `Place` costs ten times as much to make.
        """
        plan, find, names = self._plan, self._tensors.layouts.get, self._names
        single: list[Any] = plan.single
        odd: list[Place] = []
        buffers: list[Place] = []
        for path, at in walk(self._module, prefix):
            contents = at.__dict__
            entries = contents["_parameters"]
            if entries and type(at).__setattr__ is not Module.__setattr__:
                plan.watching.append(at)
            for key, held in entries.items():
                if held is None:
                    continue
                name = path + key
                if names is not None:
                    if name not in names:
                        self._kept.append(Place(name, held, entries, key, at))
                        continue
                    name = self._stored_for(name, held)
                layout = find(name)
                if (
                    layout is not None
                    and type(held) is Parameter
                    and held.dtype is layout[0]
                    and held.shape == layout[1]
                ):
                    single.append((name, held, entries, key, at))
                else:
                    odd.append(Place(name, held, entries, key, at))
            entries = contents["_buffers"]
            for key, held in entries.items():
                if held is not None:
                    buffers.append(Place(path + key, held, entries, key, at))
        if names is not None:
            self._kept += [place for place in buffers if place.name not in names]
            buffers = [
                place._replace(name=self._stored_for(place.name, place.held))
                for place in buffers
                if place.name in names
            ]
        plan.names = [place[0] for place in single]
        return odd, buffers

    def _stored_for(self, name: str, held: Tensor) -> str:
        self._named.add(name)
        stored = (self._names or {})[name]
        if self._owners.setdefault(stored, held) is not held:
            raise UsageError(
                f"bind: {stored!r} is to become {name!r} and another tensor of the module, which "
                "is not tied to it; tie the two, or give each a stored tensor of its own"
            )
        return stored

    def _apart(self, odd: list[Place]) -> list[list[Place]]:
        """Take what is tied out of what fits; all that is left to match, grouped by object."""
        plan = self._plan
        ids = [id(place[1]) for place in plan.single]
        tied = {id(place.held) for place in odd}
        if len(set(ids)) != len(ids):
            tied |= {key for key, count in Counter(ids).items() if count > 1}
        if tied.isdisjoint(ids):
            return _by_identity(odd)
        keep = [key not in tied for key in ids]
        taken = [Place(*place) for place, kept in zip(plan.single, keep, strict=True) if not kept]
        plan.single = [place for place, kept in zip(plan.single, keep, strict=True) if kept]
        plan.names = [place[0] for place in plan.single]
        return _by_identity(taken + odd)

    def _match(self, same: list[Place], matched: dict[str, list[Place]]) -> None:
        """Match one parameter or buffer, which may have several names."""
        layouts, misfits, first = self._tensors.layouts, self._misfits, same[0]
        names = [place.name for place in same if place.name in layouts]
        self._use(names)
        if not names:
            if first.entries is first.module._buffers:
                misfits.missing_buffers.append(first.name)
            else:
                misfits.missing.append([place.name for place in same])
            return
        differing = {name: _difference(first.held, layouts[name]) for name in names}
        wrong = {name: what for name, what in differing.items() if what is not None}
        if wrong:
            misfits.mismatched.update(wrong)
        elif not all(_is_same(names[0], name, self._tensors) for name in names[1:]):
            misfits.ties.append(names)
        else:
            matched[names[0]] = same

    def _match_buffers(self, buffers: list[Place]) -> list[Place]:
        """Match those that are to be stored; the others, which stay the module's own."""
        stored = [place for place in buffers if self._is_stored(place)]
        own = self._kept + [place for place in buffers if not self._is_stored(place)]
        for same in _by_identity(stored):
            self._match(same, self._plan.buffers)
        self._misfits.on_meta = [place.name for place in own if place.held.is_meta]
        self._plan.moves = [place for place in own if place.held.device != self._tensors.device]
        return own

    def _is_stored(self, place: Place) -> bool:
        """Whether a buffer is to come from the slab.

        A non-persistent one only if an engine published it as such: in a checkpoint its name is a
        leftover of another version, whose values are not this module's.
        """
        if self._names is not None or place.key not in place.module._non_persistent_buffers_set:
            return True
        layout = self._tensors.layouts.get(place.name)
        return layout is not None and layout.kind == "non-persistent-buffer"

    def _use(self, names: Iterable[str]) -> None:
        self._used.update(names)

    def _refuse_bound(self, places: Iterable[Place]) -> None:
        if not any_storage_lives():
            return  # the usual start of an engine, and half a microsecond saved for each parameter
        for place in places:
            held = place[1]
            if not held.is_meta and is_shared_address(address_of(held)):
                raise UsageError(
                    f"parameter {place[0]!r} is bound to shared weights already: detach the module "
                    "from them before binding it again"
                )


def walk(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """Every module with what its entries' names begin with; one with two paths comes twice.

    Raises:
        UsageError: the module contains itself.
    """
    stack = [(prefix, module)]
    while stack:
        path, at = item = stack.pop()
        yield item
        children = at.__dict__["_modules"]
        if children:
            if len(path) > _MAX_PATH:
                raise UsageError(f"{type(module).__name__} contains itself: it cannot be bound")
            last_first = reversed(children.items())
            stack += [(path + key + ".", child) for key, child in last_first if child is not None]


def _by_identity(places: Iterable[Place]) -> list[list[Place]]:
    groups: dict[int, list[Place]] = {}
    for place in places:
        groups.setdefault(id(place.held), []).append(place)
    return list(groups.values())


def _difference(held: Tensor, layout: Layout) -> dict[str, str] | None:
    stored = _described(layout.dtype, layout.shape)
    if torch.nn.parameter.is_lazy(held):
        return {"module": "uninitialised", "stored": stored}
    if type(held).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return {"module": f"{type(held).__name__}, made of other tensors", "stored": stored}
    if held.dtype is layout.dtype and held.shape == layout.shape:
        return None
    return {"module": _described(held.dtype, held.shape), "stored": stored}


def _described(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _is_same(one: str, other: str, tensors: SlabTensors) -> bool:
    """Whether two stored tensors of equal shape and dtype are the same bytes."""
    if tensors.storage_key(one) == tensors.storage_key(other):
        return True
    first, second = (
        tensors.tensor(name).contiguous().view(-1).view(torch.uint8) for name in (one, other)
    )
    return torch.equal(first, second)


def _ignored_by(
    module: Module, own: set[str], patterns: Sequence[str]
) -> Callable[[str, Layout], bool]:
    """A predicate: may this stored name stay unused?

    Args:
        own: buffers that the module keeps its own values of.
    """
    # transformers' own lists of obsolete names, searched as it does (modeling_utils.py).
    of_model: set[str] = set()
    for part in module.modules():
        of_model.update(getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ())
    searches = [re.compile(pattern).search for pattern in of_model]
    endings = tuple("." + ending for ending in _LEFTOVERS)

    def is_ignored(name: str, layout: Layout) -> bool:
        return (
            (name in own and layout.kind != "non-persistent-buffer")
            or ("." + name).endswith(endings)
            or any(search(name) for search in searches)
            or any(fnmatchcase(name, pattern) for pattern in patterns)
        )

    return is_ignored
