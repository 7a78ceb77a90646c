"""A lease as engines see it: a mapping of names to read-only tensors.

torch is imported with the first tensor, not before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from broker.errors import UsageError
from broker.weights import ITEM_BYTES, Manifest, WeightKey, storage_extent
from engine_client.arguments import (
    check_name,
    check_text,
    check_text_by_name,
    check_texts,
    said_of,
)
from engine_client.deadline import Deadline
from engine_client.lease import Lease, LeasedMapping
from engine_client.shielded import shielded

if TYPE_CHECKING:
    import torch

    from engine_client.binding import Binding
    from engine_client.swapping import PrivateWeights
    from engine_client.views import SlabTensors

_NAMES_SHOWN = 3
_CLOSE_SECONDS = 1.0
"""How long a client that closes waits for another thread that is using its weights."""


class _Use:
    """Something in this thread that needs the weights mapped, as long as its frame lives."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class WeightSet(Mapping[str, "torch.Tensor"]):
    """Weights mapped read-only from the broker's one copy.

    Writing to a tensor is a fault of the process (SIGSEGV on the host, an illegal access on a GPU);
    `bind(…, guard=True)` names such operations first. Tensors stay readable as long as anybody
    holds them, whatever becomes of this object, its client or the broker.

    Attributes:
        key: the set's identity; `key.checkpoint` is its content's.
        generation: its label in its line, or None for a set of no line.
        set_id: the broker's number for it.
        nbytes: bytes of its slab.
        how: "resident", "loaded", "shared", "hashed" or "published": how this process came by it.
    """

    def __init__(
        self,
        lease: Lease,
        newest: Callable[[WeightKey, str | None], WeightSet],
        device_index: int = 0,
    ) -> None:
        granted = lease.granted
        self.key: WeightKey = granted.key
        self.generation = granted.generation
        self.set_id = granted.set
        self.nbytes = granted.nbytes
        self.how = granted.how
        self._lease = lease
        self._newest = newest
        self._device_index = device_index
        self._lock = threading.RLock()
        self._slab: SlabTensors | None = None
        self._released = False
        self._use: weakref.ref[_Use] | None = None  # dead once an interrupt has ended that use
        self._is_unwanted = False  # let go of in a handler that has interrupted such a use
        self._offsets: dict[str, tuple[int, int]] | None = None
        # Without tensors nothing else keeps the mapping; with them they take it over.
        self._finalizer = weakref.finalize(self, lease.end)
        self._finalizer.atexit = False

    @property
    def metadata(self) -> dict[str, Any]:
        """What the publisher gave along."""
        return self._lease.manifest.metadata

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes, shapes and places of all tensors. Needs no torch."""
        return self._lease.manifest

    # --- tensors --------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors().tensor(name)

    def __iter__(self) -> Iterator[str]:
        for group in self.manifest.groups:
            yield from group.names

    def __len__(self) -> int:
        return self._lease.granted.tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors at once; faster than one by one."""
        return self._tensors().all()

    def memory(self, name: str) -> memoryview:
        """A tensor's bytes, read-only, from its first to its last element. Needs no torch.

        Only where the host can read the device's memory (the simulated device).

        Raises:
            KeyError: there is no such tensor.
            UsageError: released.
        """
        with self._changing():
            self._check_readable()
            if self._offsets is None:
                self._offsets = dict(_extents(self.manifest))
            return self._lease.memory(*self._offsets[name])

    def slab_memory(self) -> memoryview:
        """All bytes of the slab, padding included, read-only; as `memory`."""
        with self._changing():
            self._check_readable()
            return self._lease.whole_slab()

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of bytes of the slab in host memory, from any device. Needs no torch. Blocks.

        Raises:
            UsageError: released or asleep, or there are no such bytes.
            InternalError: the device failed.
        """
        if not (isinstance(offset, int) and isinstance(nbytes, int)):
            raise UsageError(
                f"read: offset and size must be whole numbers, not {said_of(offset)} and "
                f"{said_of(nbytes)}"
            )
        with self._changing():
            self._check_held()
            return self._lease.read(offset, nbytes)

    def _check_readable(self) -> None:
        self._check_held()
        if self._lease.platform != "simulated":
            raise UsageError("memory() reads host memory; these weights are on a GPU")

    def live_tensors(self) -> list[str]:
        """Names of tensors (or views of them) that are alive and keep the memory mapped."""
        if self._lease.has_views:
            return ["(a memory view)"]
        return [] if self._slab is None else self._slab.live_tensors()

    # --- modules --------------------------------------------------------------------------

    def bind(
        self,
        module: torch.nn.Module,
        *,
        guard: bool = False,
        ignore: Sequence[str] = (),
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ) -> Binding:
        """Make the module's parameters read-only views of these weights, its buffers clones.

        Args:
            module: its parameters may be on the meta device (`parameters_on_meta`).
            guard: name in-place operations on shared parameters before they fault; slower.
            ignore: patterns (`fnmatch`) of stored names the module need not have.
            prefix: what the stored names have in front of the module's.
            names: instead of both, where names differ otherwise: the module's name of each place
                that gets a stored tensor, and that tensor's. All other places keep what they have.

        Raises:
            BindError: with every missing, unexpected and mismatched name, and whatever `names` has
                that the module has not; the module is unchanged.
            UsageError: released, the module is bound already, or an argument is of a type that
                cannot be used.
        """
        from engine_client.binding import bind_module

        check_name(prefix, "bind: prefix")
        check_texts(ignore, "bind: ignore", '["lm_head.*"]')
        check_text_by_name(
            names, "bind: names must give the stored name of each place by the module's"
        )
        if names is not None and not names:
            raise UsageError(
                "bind: names gives no place a stored tensor; leave it out where names are the same"
            )
        return bind_module(
            module, self._tensors(), ignore=ignore, prefix=prefix, names=names, guard=guard
        )

    def detach(self, module: torch.nn.Module) -> None:
        """Give a bound module private, writable copies; its ties stay tied.

        Raises:
            UsageError: it is not bound to these weights, or they are asleep.
        """
        self._check_held()
        self._binding_of(module).detach()

    def _binding_of(self, module: torch.nn.Module) -> Binding:
        from engine_client.binding import binding_of, check_module

        check_module(module)
        binding = binding_of(module)
        if binding is None or binding.tensors is not self._slab:
            raise UsageError("this module is not bound to these weights")
        return binding

    def swap(self, module: torch.nn.Module, generation: str | None = None) -> WeightSet:
        """Move a bound module to the newest generation of these weights' name, between two passes.

        Every tensor or none; each Parameter stays the same object. Buffers that came with the old
        generation get the new one's values. The old lease ends when nothing holds its tensors any
        more, which is at once if only this module did. Addresses change: a captured graph has to be
        captured again.

        Args:
            generation: the label of another one, on which tensor-parallel ranks have agreed.

        Returns:
            The other generation's weights; these very ones if they are the one that is meant.

        Raises:
            UsageError: the module is not bound to these weights, or they have no name.
            BindError: the new generation has another structure; lists all differences, and the
                module stays where it was.
            NotFound, BrokerLost: as `acquire` by name; nothing has changed.
        """
        from engine_client.swapping import check_same_structure, swap_module

        self._check_held()
        check_text(generation, "swap: generation")
        binding = self._binding_of(module)
        if not self.key.name:
            raise UsageError("swap: these weights have no name, so there is no newer generation")
        newest = self._newest(self.key, generation)
        try:
            if newest.set_id == self.set_id:
                newest.release()
                return self
            check_same_structure(self.manifest, newest.manifest)
            swap_module(binding, newest._tensors())  # noqa: SLF001 - of this class
        except BaseException:
            newest.let_go()
            raise
        self.let_go()
        return newest

    def copy(self) -> PrivateWeights:
        """Private, writable copies of all tensors, ties kept; this lease is not needed for them."""
        from engine_client.swapping import PrivateWeights, private_copies

        copies = private_copies(self.tensors())
        return PrivateWeights(copies, self.key.checkpoint, self.generation, self.metadata)

    # --- sleeping -------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether the weights are unmapped for now."""
        return self._lease.is_asleep

    def sleep(self) -> None:
        """Unmap the weights and give the lease back, but keep their addresses. Idempotent.

        Tensors, bound modules and captured graphs stay as they are, and whoever touches them
        meanwhile faults (SIGSEGV on the host, an illegal access on a GPU). The broker may free the
        weights while everybody sleeps: pin them, or keep one engine awake. Blocks until the device
        has done all it was asked; not while another thread uses the weights.

        Raises:
            UsageError: released; a memory view is alive; or other weights of this process share
                the addresses. Still awake.
            BrokerLost: they could never wake up. Still awake.
        """
        from engine_client.sleeping import put_to_sleep

        self._check_idle("sleep")
        with self._changing():
            self._check_process_and_lease()
            if not self._lease.is_asleep:
                shielded(lambda _show: put_to_sleep(self._lease), Deadline(None))

    def wake(self, timeout: float | None = None) -> None:
        """Map the same weights at the same addresses again. Idempotent. Blocks.

        Args:
            timeout: seconds; None: as long as it takes and the broker lives.

        Raises:
            NotFound: neither this set nor another of the same content and layout is resident; the
                sentence says what became of it.
            RequestTimeout, BrokerLost, InternalError. In each case still asleep, holding no lease,
                and to be woken later.
            UsageError: released.
        """
        self._check_idle("wake")
        with self._changing():
            self._check_process_and_lease()
            if self._lease.is_asleep:
                deadline = Deadline(timeout)
                shielded(lambda _show: self._wake_up(deadline), deadline)

    def _wake_up(self, deadline: Deadline) -> None:
        from engine_client.sleeping import wake_up

        wake_up(self._lease, deadline)
        self.set_id = self._lease.granted.set

    # --- giving back ----------------------------------------------------------------------

    @property
    def is_released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Unmap and give the lease back. Idempotent.

        Raises:
            UsageError: tensors are alive; some are named, nothing has changed. Or this is a forked
                child: the lease is its parent's.
        """
        self._lease.check_process()
        self._check_idle("release")
        with self._lock:
            if self._released:
                return
            alive = self.live_tensors()
            if alive:
                shown = ", ".join(alive[:_NAMES_SHOWN])
                more = f" and {len(alive) - _NAMES_SHOWN} more" if len(alive) > _NAMES_SHOWN else ""
                raise UsageError(
                    f"release: tensors of these weights are still alive: {shown}{more}; drop them, "
                    "or detach() the modules that hold them",
                    alive=len(alive),
                )
            self._let_go()

    def let_go(self) -> None:
        """Give the lease back as soon as the last tensor dies, which may be now. Idempotent."""
        is_in_use = self._is_in_use()
        with self._lock:
            if is_in_use:
                self._is_unwanted = True
            elif not self._released:
                self._let_go()

    def release_unused(self) -> None:
        """For a client that closes: release, unless there are tensors or a thread is at work here.

        Never raises, and waits no longer than a moment: the other thread may be waiting for what
        this one was doing when a signal's handler closed the client.
        """
        if self._is_in_use() or not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return
        try:
            if not (self._released or self.live_tensors()):
                self._let_go()
        finally:
            self._lock.release()

    def _let_go(self) -> None:
        self._released = True
        if self._slab is not None:
            self._slab.close()
        elif self._finalizer.alive:  # or tensors are just being made, and take the mapping over
            self._lease.end()
            self._finalizer.detach()

    def _tensors(self) -> SlabTensors:
        if self._slab is not None:  # it never goes again, and refuses by itself once it is closed
            self._check_held()
            return self._slab
        with self._changing():
            self._check_held()
            if self._slab is None:
                self._slab = self._taken_over()
            return self._slab

    def _taken_over(self) -> SlabTensors:
        """The mapping as tensors; it is theirs from now on, or this object's as before."""
        from engine_client.views import SlabTensors

        lease = self._lease
        try:
            self._finalizer.detach()
            return SlabTensors(
                LeasedMapping(lease),
                lease.manifest,
                lease.platform,
                device_index=self._device_index,
            )
        except BaseException:
            self._finalizer = weakref.finalize(self, lease.end)
            self._finalizer.atexit = False
            raise

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Under the lock, and nothing is given back meanwhile by a handler in this very thread."""
        self._lease.check_process()  # a forked child may find the lock held for ever
        use, before = _Use(), self._use
        with self._lock:
            try:
                self._use = weakref.ref(use)
                yield
            finally:
                self._use = before
                if self._is_unwanted:
                    self.let_go()

    def _is_in_use(self) -> bool:
        """Whether this is a signal's handler that has interrupted a use of these weights."""
        use = None if self._use is None else self._use()
        return use is not None and use.thread == threading.get_ident()

    def _check_idle(self, call: str) -> None:
        """Raise `UsageError` in a handler that has interrupted another use of these weights."""
        if self._is_in_use():
            raise UsageError(
                f"{call}: these weights are in use by what this signal's handler has interrupted; "
                "do it when the handler has returned"
            )

    def _check_held(self) -> None:
        self._check_process_and_lease()
        self._lease.check_awake()

    def _check_process_and_lease(self) -> None:
        self._lease.check_process()
        if self._released:
            raise UsageError("these weights have been released; acquire them again")

    def __enter__(self) -> WeightSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.release()
        else:
            self.let_go()  # the block's own error is the one to report

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "weights that are mapped here cannot be copied or pickled as a whole: copy() gives "
            "private tensors, and another process acquires them by itself"
        )

    def __repr__(self) -> str:
        name = self.key.name or self.key.checkpoint[:19]
        return f"<WeightSet {name} {len(self)} tensors {self.nbytes} bytes set={self.set_id}>"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _extents(manifest: Manifest) -> Iterator[tuple[str, tuple[int, int]]]:
    for group in manifest.groups:
        extent = storage_extent(group.shape, group.stride, ITEM_BYTES[group.dtype])
        for name, offset in zip(group.names, group.offsets, strict=True):
            yield name, (offset, extent)
