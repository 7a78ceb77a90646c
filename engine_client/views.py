"""Tensors over mapped slab memory.

Each alias group is a storage of its own, exactly as large as what it holds, so that saving one
tensor writes one tensor and ties are seen as ties. Views are made when they are asked for; a whole
set at once costs 1.6 us a tensor.

A tensor made here is read-only by the protection of its pages: a write to it kills the process
(`engine_client.guard` names some writes first). In a child forked after the mapping was made its
memory is not there at all.
"""

from __future__ import annotations

import gc
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from broker.devices.base import Mapping
from broker.errors import UsageError
from broker.weights import (
    AliasGroup,
    Manifest,
    TensorGroup,
    storage_extent,
)
from engine_client.storages import DTYPES, SlabStorages, imports, torch_device

_BYTES = DTYPES["uint8"]


class Layout(NamedTuple):
    """What the tensors of one group of a manifest have in common."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str
    is_direct: bool
    """Whether this torch imports the dtype, or bytes have to be viewed as it afterwards."""


class _Part(NamedTuple):
    """A tensor that is not a whole storage of its own dtype: where in which storage it lies."""

    storage: int
    """The storage's number; -1 for one without bytes."""
    offset: int
    """In elements of the tensor's dtype."""
    siblings: Sequence[str]
    """Every name over the same storage."""


class SlabTensors:
    """The tensors of one weight set, made over its slab as they are asked for.

    Takes the mapping over: it is closed when `close` was called (or this object died) and the last
    storage has died, whichever is later, so a tensor that outlives everything else stays readable.
    Usable from several threads at once.

    Tensors are cached weakly: while the caller keeps one, asking again gives the same object, so
    `weights[name] is weights[name]`; one that nobody keeps is made anew. Tied names give different
    tensors over one storage.

    Attributes:
        device: where the tensors live, as torch names it.
        layouts: for each name dtype, shape, stride and kind. Not to be changed.
    """

    def __init__(
        self,
        mapping: Mapping,
        manifest: Manifest,
        platform: str,
        *,
        device_index: int = 0,
        on_last_release: Callable[[], None] | None = None,
    ) -> None:
        """Describe every tensor; makes none.

        Args:
            mapping: read-only and at least as large as the manifest says.
            manifest: validated against the slab by `decode_manifest`.
            platform: "simulated", "cuda" or "rocm".
            device_index: which GPU of this process.
            on_last_release: called once, when the mapping has been closed. In whatever thread let
                go last, possibly inside a garbage collection: it must be short and wait for nobody.

        Raises:
            UsageError: a platform that this client does not know, or a dtype that this torch does
                not have. The mapping is closed in the second case, and untouched in the first.
        """
        self.device = torch_device(platform, device_index)
        self.layouts: dict[str, Layout] = {}
        self._whole: dict[str, int] = {}
        self._parts: dict[str, _Part] = {}
        self._cache: dict[str, weakref.ref[torch.Tensor]] = {}
        self._starts: list[tuple[int, int]] | None = None
        self._storage_names: list[str | list[str]] = []
        self._offsets: list[int] = []
        self._storages = SlabStorages(mapping, self.device, on_last_release)
        try:
            ties = self._describe_aliases(manifest.aliases)
            for group in manifest.groups:
                self._describe_group(group, ties)
        except BaseException:
            self._storages.close()
            raise

    # --- tensors -------------------------------------------------------------------------------

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name, read-only.

        Raises:
            KeyError: there is none.
            UsageError: the weights were released, or this is a forked child.
        """
        cached = self._cached(name) if name in self._cache else None
        if cached is None:
            number = self._whole.get(name)
            if number is None or torch.is_inference_mode_enabled():
                return self._make([name])[0]
            return self._remember(name, self._storages.make_one(number))
        if type(cached) is torch.Tensor:
            return cached
        return self._remember(name, cached.detach())  # bound: a Parameter of some module

    def all(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, in the order of the manifest. As `tensor`, made in bulk."""
        if self._cache:
            return {name: self.tensor(name) for name in self.layouts}
        return dict(zip(self.layouts, self._make(list(self.layouts)), strict=True))

    def take(self, names: list[str]) -> list[torch.Tensor]:
        """A fresh tensor object for each of these different names, for a module to own.

        The caller may turn it into a Parameter in place. Storages are shared with what was handed
        out before.

        Raises:
            KeyError, UsageError: as `tensor`.
        """
        if not self._cache:
            return self._make(names)
        cached = [self._cached(name) for name in names]
        missing = [name for name, tensor in zip(names, cached, strict=True) if tensor is None]
        made = iter(self._make(missing))
        return [next(made) if tensor is None else tensor.detach() for tensor in cached]

    def storage_key(self, name: str) -> tuple[int, ...]:
        """Equal for two names exactly if their tensors are the same bytes seen in the same way."""
        return (*self._place(name), *self.layouts[name].stride)

    # --- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand out no more tensors; unmap once the last storage has died, which may be now.

        Idempotent. Tensors that were handed out stay readable.
        """
        self._cache.clear()
        self._storages.close()

    def live_count(self) -> int:
        """How many storages somebody still holds: tensors, views of them, saved activations."""
        return self._storages.live_count()

    def live_tensors(self) -> list[str]:
        """The names whose storage somebody still holds, also if only through a view.

        Ends with a remark in parentheses if there are storages that no tensor in Python leads to
        (saved for backward, say). Cheap when nobody holds any; looks through all objects of the
        process when views have to be found.
        """
        count = self.live_count()
        if not count:
            return []
        cached = [name for name in list(self._cache) if self._cached(name) is not None]
        numbers = {self._place(name)[0] for name in cached} - {-1}
        if len(numbers) < count:
            numbers |= self._numbers_in_use()
        names: list[str] = []
        for number in sorted(numbers):
            name = self._storage_names[number]
            names += [name] if isinstance(name, str) else name
        more = count - len(numbers)
        return names + ([f"({more} more)"] if more > 0 else [])

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements lie in this slab. False for one without elements, and for all
        once the slab is unmapped: its addresses may be anybody's."""
        if tensor.device != self.device or not self._storages.is_mapped:
            return False
        return 0 <= address_of(tensor) - self._storages.address < self._storages.nbytes

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The (first) name of the storage that a tensor of this slab lies in, or None."""
        number = self._number_of(tensor)
        name = None if number is None else self._storage_names[number]
        return name[0] if isinstance(name, list) else name

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        if not self.owns(tensor):
            return None
        if self._starts is None:
            self._starts = sorted(zip(self._offsets, range(len(self._offsets)), strict=True))
        offset = address_of(tensor) - self._storages.address
        at = bisect_right(self._starts, (offset, len(self._offsets))) - 1
        return self._starts[at][1] if at >= 0 else None

    def _numbers_in_use(self) -> set[int]:
        spanning = self._storages.whole()
        tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
        numbers = {self._number_of(tensor) for tensor in tensors if tensor is not spanning}
        return {number for number in numbers if number is not None}

    # --- making --------------------------------------------------------------------------------

    def _make(self, names: list[str]) -> list[torch.Tensor]:
        if torch.is_inference_mode_enabled():
            # An inference tensor could never be used for training beside it (LoRA).
            with torch.inference_mode(False):
                return self._make(names)
        whole = self._whole
        if not self._parts:
            made = self._storages.make([whole[name] for name in names])
        else:
            direct = [name for name in names if name in whole]
            numbers = [whole[name] for name in direct]
            found = dict(zip(direct, self._storages.make(numbers), strict=True))
            made = [found[name] if name in found else self._make_part(name) for name in names]
        self._cache.update(zip(names, map(weakref.ref, made), strict=True))
        return made

    def _make_part(self, name: str) -> torch.Tensor:
        part, layout = self._parts[name], self.layouts[name]
        tensor = torch.empty(0, dtype=layout.dtype, device=self.device)
        if part.storage < 0:
            return tensor.set_(tensor.untyped_storage(), 0, layout.shape, layout.stride)
        storage = self._live_storage(part) or self._bytes(part.storage).untyped_storage()
        tensor.set_(storage, part.offset, layout.shape, layout.stride)
        if len(part.siblings) > 1:
            self._remember(name, tensor)  # so that the next of them finds the storage
        return tensor

    def _live_storage(self, part: _Part) -> torch.UntypedStorage | None:
        for name in part.siblings if len(part.siblings) > 1 else ():
            tensor = self._cached(name)
            if tensor is not None:
                return tensor.untyped_storage()
        return None

    def _bytes(self, number: int) -> torch.Tensor:
        return self._storages.make_one(number)

    def _cached(self, name: str) -> torch.Tensor | None:
        """What was handed out under this name, if it lives and still is what it was then."""
        reference = self._cache.get(name)
        tensor = None if reference is None else reference()
        if tensor is None:
            return None
        # `.data = …`, `.to()` of a module or `t_()` may have made something else of it.
        layout = self.layouts[name]
        same = tensor.dtype is layout.dtype and tensor.shape == layout.shape
        if same and tensor.stride() == layout.stride and self._lies_at(tensor, name):
            return tensor
        return None

    def _place(self, name: str) -> tuple[int, int]:
        """The number of a name's storage, and where in it the tensor begins, in elements."""
        part = self._parts.get(name)
        return (self._whole[name], 0) if part is None else (part.storage, part.offset)

    def _lies_at(self, tensor: torch.Tensor, name: str) -> bool:
        number, start = self._place(name)
        if number < 0:
            return True
        address = tensor.untyped_storage().data_ptr()
        at = self._storages.address + self._offsets[number]
        return address == at and tensor.storage_offset() == start

    def _remember(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._cache[name] = weakref.ref(tensor)
        return tensor

    # --- describing ----------------------------------------------------------------------------

    def _describe_aliases(self, aliases: list[AliasGroup]) -> dict[str, tuple[int, AliasGroup]]:
        ties: dict[str, tuple[int, AliasGroup]] = {}
        for alias in aliases:
            number = -1
            if alias.nbytes:
                [number] = self._describe(_BYTES, [alias.nbytes], [1], [alias.offset])
                self._storage_names.append(alias.names)
            ties.update(zip(alias.names, repeat((number, alias))))
        return ties

    def _describe_group(self, group: TensorGroup, ties: dict[str, tuple[int, AliasGroup]]) -> None:
        dtype = _torch_dtype(group)
        layout = Layout(
            dtype, tuple(group.shape), tuple(group.stride), group.kind, imports(group.dtype)
        )
        self.layouts.update(zip(group.names, repeat(layout)))
        names, offsets = group.names, group.offsets
        if ties and not ties.keys().isdisjoint(names):
            names, offsets = self._describe_tied(names, offsets, layout, ties)
        extent = storage_extent(group.shape, group.stride, dtype.itemsize)
        if not extent:
            self._parts.update(zip(names, repeat(_Part(-1, 0, ()))))
        elif layout.is_direct:
            numbers = self._describe(DTYPES[group.dtype], group.shape, group.stride, offsets)
            self._whole.update(zip(names, numbers, strict=True))
            self._storage_names += names
        else:
            numbers = self._describe(_BYTES, [extent], [1], offsets)
            self._parts.update(
                (name, _Part(number, 0, ())) for name, number in zip(names, numbers, strict=True)
            )
            self._storage_names += names

    def _describe_tied(
        self,
        names: list[str],
        offsets: list[int],
        layout: Layout,
        ties: dict[str, tuple[int, AliasGroup]],
    ) -> tuple[list[str], list[int]]:
        """Describe the tied ones; the others' names and offsets."""
        own_names, own_offsets = [], []
        for name, offset in zip(names, offsets, strict=True):
            if name not in ties:
                own_names.append(name)
                own_offsets.append(offset)
                continue
            number, alias = ties[name]
            elements = (offset - alias.offset) // layout.dtype.itemsize
            self._parts[name] = _Part(number, elements if number >= 0 else 0, alias.names)
        return own_names, own_offsets

    def _describe(
        self,
        dtype: tuple[int, int, int],
        shape: Sequence[int],
        stride: Sequence[int],
        offsets: Sequence[int],
    ) -> Iterable[int]:
        self._offsets += offsets
        return self._storages.describe(dtype, shape, stride, offsets)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's first element lies; 0 for one that has no memory here.

    Meta, fake, wrapper, sparse and uninitialised tensors have none, and torch says so by raising.
    """
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):
        return 0


def _torch_dtype(group: TensorGroup) -> torch.dtype:
    dtype = getattr(torch, group.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"tensor {group.names[0]!r} is {group.dtype}, which torch {torch.__version__} does not "
            "have: use a newer torch in this engine"
        )
    return dtype
