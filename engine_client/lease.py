"""One lease: slab memory mapped into this process, and its giving back. No torch."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from broker import wire
from broker.device_names import SIMULATED_UUID
from broker.devices.base import Device, DeviceError, Mapping
from broker.errors import InternalError, UsageError
from broker.weights import Manifest
from engine_client.deadline import Deadline
from engine_client.delivery import check_descriptors, check_frozen, read_manifest
from engine_client.descriptors import closed_after
from engine_client.mapping import let_go, map_granted
from engine_client.session import Session


class Lease:
    """A granted lease with its slab mapped read-only.

    Attributes:
        granted: what the broker said of the set.
        manifest: validated against the slab.
        mapping: valid until `end`, and until no memory view is left; not while it is asleep.
        device: where it is mapped.
        session: whose lease it is.
        is_asleep: the slab is not mapped and no lease is held, but the addresses are kept.
    """

    def __init__(
        self,
        session: Session,
        granted: wire.Granted,
        mapping: Mapping,
        manifest: Manifest,
        device: Device,
    ) -> None:
        self.granted = granted
        self.manifest = manifest
        self.mapping = mapping
        self.device = device
        self.session = session
        self.is_asleep = False
        # Reentrant: a garbage collection inside may find the last view.
        self._lock = threading.RLock()
        self._is_wanted = True
        self._ended = False
        self._is_given_back = False
        self._views: set[object] = set()

    def check_process(self) -> None:
        """Raise `UsageError` in a forked child: the slab is not mapped there."""
        if self.session.is_inherited:
            raise UsageError(
                "these weights were mapped before a fork and are not mapped in this child process: "
                "make a client in the child and acquire them there"
            )

    def end(self) -> None:
        """Unmap, then give the lease back, as soon as no memory view is left. Idempotent.

        In a forked child it does nothing: mapping and lease are the parent's.
        """
        try:
            self._is_wanted = False
            self._end_if_unused()
        except BaseException:  # an interrupt: nobody may come by again to do the rest
            self._is_wanted = False
            self._end_if_unused()
            raise

    def _end_if_unused(self) -> None:
        """Every step may be done again, so that an end which was interrupted can be completed."""
        if self.session.is_inherited:
            return  # the lock may have been held at the fork, and then it is for ever
        with self._lock:
            if self._is_wanted or self._views or self._is_given_back:
                return
            self._ended = True
        let_go(self._unmap_and_release)

    def _unmap_and_release(self) -> None:
        """The lease goes back when nothing is mapped any more, and not before."""
        if self._is_given_back:
            return
        self.mapping.close()
        if not self.is_asleep:
            self.session.notify("release", wire.Release(self.granted.lease))
        self._is_given_back = True

    def suspend(self) -> None:
        """Unmap, keeping the addresses; the lease is the caller's to give back.

        Waits for the device.

        Raises:
            UsageError: a memory view is alive, the lease has ended, or the device cannot. Still
                mapped.
        """
        with self._lock:
            if self._ended or not self._is_wanted:
                raise UsageError("these weights have been released; acquire them again")
            if self._views:
                raise UsageError(
                    "sleep: memory views of these weights are alive and would fault; drop them"
                )
            try:
                self.mapping.suspend()
            except DeviceError as error:
                raise UsageError(f"these weights cannot sleep now: {error}") from error
            self.is_asleep = True

    def resume(self, granted: wire.Granted, slab: int) -> None:
        """Map the slab of a new lease where the old one was.

        Raises:
            UsageError: the last tensor has died meanwhile and the addresses are given back.
            InternalError: it cannot be mapped. Still asleep.
        """
        with self._lock:
            if self._ended:
                raise UsageError("these weights have been released; acquire them again")
            try:
                self.mapping.resume(slab)
            except DeviceError as error:
                raise InternalError(f"the weights cannot be mapped again: {error}") from error
            self.granted = granted
            self.is_asleep = False

    @property
    def platform(self) -> str:
        """ "cuda", "rocm" or "simulated"."""
        return self.device.properties.platform

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of bytes of the slab, from any device. Waits for the device.

        Raises:
            UsageError: the lease has ended or is asleep, or there are no such bytes.
            InternalError: the device failed.
        """
        with self._lock:
            if self._ended or not self._is_wanted:
                raise UsageError("these weights have been released; acquire them again")
            self.check_awake()
            end = self.mapping.nbytes
            if offset < 0 or nbytes < 0 or offset + nbytes > end:
                raise UsageError(
                    f"read: {nbytes} bytes from {offset} are not inside these weights: name a "
                    f"range from 0 to {end}"
                )
            try:
                return self.device.read(self.mapping, offset, nbytes)
            except DeviceError as error:
                raise InternalError(f"the weights cannot be read: {error}") from error

    def whole_slab(self) -> memoryview:
        """All bytes of the slab, read-only, as `memory`."""
        return self.memory(0, self.mapping.nbytes)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes of the slab, on devices whose memory the host can read.

        The view and whatever is made of it keep the slab mapped, and the lease with it.
        """
        with self._lock:
            if not self._is_wanted:
                raise UsageError("these weights have been released; acquire them again")
            self.check_awake()
            array = (ctypes.c_char * nbytes).from_address(self.mapping.address + offset)
            view = object()
            # In this order: a view that was counted and never noticed to die would keep the lease.
            weakref.finalize(array, self._view_died, view).atexit = False
            self._views.add(view)
        return memoryview(array).cast("B").toreadonly()

    def check_awake(self) -> None:
        """Raise `UsageError` while the weights are asleep."""
        if self.is_asleep:
            raise UsageError("these weights are asleep: wake() them first")

    def _view_died(self, view: object) -> None:
        if self.session.is_inherited:
            return
        with self._lock:
            self._views.discard(view)
        self._end_if_unused()

    @property
    def has_views(self) -> bool:
        """Whether a memory view handed out is still alive."""
        return bool(self._views)


class LeasedMapping(Mapping):
    """The mapping as tensors own it: that they are done with it ends the lease."""

    def __init__(self, lease: Lease) -> None:
        self.address = lease.mapping.address
        self.nbytes = lease.mapping.nbytes
        self._lease = lease

    def close(self) -> None:
        self._lease.end()


def attach(session: Session, device: Device, granted: wire.Granted, deadline: Deadline) -> Lease:
    """Fetch a granted lease's descriptors, validate and map. Blocks.

    Raises:
        RequestTimeout, BrokerLost, InternalError: the broker delivered something else than the set
            it granted, or it cannot be mapped; nothing stays mapped.
        UnsupportedPlatformForIPCError: this process does not see what others write to the device.
    """
    with receive_set(session, granted, deadline) as (slab, manifest):
        mapping = map_granted(session, device, granted, slab, deadline)
        return Lease(session, granted, mapping, manifest, device)


@contextmanager
def receive_set(
    session: Session, granted: wire.Granted, deadline: Deadline
) -> Iterator[tuple[int, Manifest]]:
    """A granted set's slab, as a descriptor that is closed after the block, and its manifest.

    Raises:
        RequestTimeout, BrokerLost, InternalError: the broker delivered something else than the set
            it granted.
    """
    nbytes, descriptors = session.attach(granted.lease, deadline)
    with closed_after(descriptors):
        check_descriptors(descriptors, 2, "a lease")
        if nbytes != granted.nbytes:
            raise InternalError(
                f"the broker granted {granted.nbytes} bytes and delivered {nbytes}; nothing was "
                "mapped"
            )
        slab, manifest = descriptors
        if granted.key.device == SIMULATED_UUID:  # a GPU's memory cannot be frozen
            check_frozen(slab.fileno())
        yield slab.fileno(), read_manifest(manifest.fileno(), nbytes)
