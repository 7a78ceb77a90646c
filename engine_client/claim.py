"""A held claim: the right to write one weight set, from `reserve` to `seal`. No torch.

Engines that publish and loaders do the same steps; whoever holds a claim and dies leaves nothing.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from broker import wire
from broker.errors import BrokerError
from broker.memfd import sealed_memfd
from broker.weights import Manifest, encode_manifest
from engine_client.deadline import Deadline
from engine_client.delivery import check_descriptors
from engine_client.descriptors import Descriptor, closed_after
from engine_client.room import told_of_the_limit
from engine_client.session import Session
from engine_client.shielded import shielded

ATTACH_SECONDS = 30.0
REPORT_SECONDS = 0.25
"""More often would only fill the broker's queue: it passes on four reports a second."""


class HeldClaim:
    """What may be done with a claim. Every method blocks until the broker has answered.

    A claim that is dropped before it has come to its end, because a handler's exception came
    between two steps, is given up.
    """

    def __init__(self, session: Session, claim: str) -> None:
        self._session = session
        self.claim = claim
        self._finalizer = weakref.finalize(self, _withdraw, session, claim)
        self._finalizer.atexit = False

    @contextmanager
    def reserve(
        self,
        manifest: Manifest,
        dtype: str,
        quantization: str = "",
        *,
        deadline: Deadline | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Have a slab created for this manifest: its writable descriptor, and its size in bytes.

        The descriptor is closed at the end of the block; nothing may be mapped then.

        Raises:
            OverBudget: it does not fit; the claim is still held.
            Busy: the generation's label has been given meanwhile; the claim is still held.
            RequestTimeout: only with a deadline.
        """
        request = wire.Reserve(
            self.claim, manifest.nbytes, manifest.tensor_count, dtype, quantization
        )
        limit = deadline or Deadline(None)
        nbytes, descriptors = shielded(
            lambda _show: self._reserve(request, encode_manifest(manifest), limit), limit
        )
        with closed_after(descriptors):
            check_descriptors(descriptors, 1, "a claim")
            yield descriptors[0].fileno(), nbytes

    def _reserve(
        self, request: wire.Reserve, manifest: bytes, deadline: Deadline
    ) -> tuple[int, list[Descriptor]]:
        """The slab's size in bytes, and its descriptor."""
        with told_of_the_limit("the manifest"):
            blob = sealed_memfd("weight-broker-manifest", manifest)
        try:
            reserved = self._session.call(
                "reserve",
                request,
                wire.Reserved,
                deadline=deadline,
                stage="waiting for memory",
                deliver=("manifest", blob),
            )
        finally:
            os.close(blob)
        _nbytes, descriptors = self._session.attach(self.claim, Deadline(ATTACH_SECONDS))
        return reserved.nbytes, descriptors

    def seal(
        self,
        checkpoint: str = "",
        files: Sequence[wire.FileStamp] = (),
        *,
        keep: bool = False,
        deadline: Deadline | None = None,
    ) -> wire.Sealed:
        """Publish what was written. The claim is over, or with `keep` a lease from now on.

        Args:
            checkpoint: the content's identity; "" for what the claim's key says.

        Raises:
            BadRequest: the slab is still mapped writable somewhere; the set is discarded.
            RequestTimeout: only with a deadline; it may be sealed all the same.
        """
        request = wire.Seal(self.claim, checkpoint, list(files), keep)
        sealed = self._session.call(
            "seal", request, wire.Sealed, deadline=deadline, stage="waiting for the seal"
        )
        if not keep:
            self.settle()
        return sealed

    def settle(self) -> None:
        """What it has become is somebody's, or it is over: nothing is left to be given up."""
        self._finalizer.detach()

    def resolve(self, checkpoint: str, files: Sequence[wire.FileStamp]) -> bool:
        """Whether this content is resident already; if it is, the claim is over."""
        request = wire.Resolve(self.claim, checkpoint, list(files))
        return self._session.call("resolve", request, wire.Resolved).resident

    def abandon(self, error: BrokerError, deadline: Deadline | None = None) -> None:
        """Give up; those who wait are told why, or one of them takes the claim over."""
        request = wire.Abandon(self.claim, error.status, error.to_payload().decode())
        self._session.call("abandon", request, wire.Done, deadline=deadline)
        self.settle()

    def report(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Tell everybody who waits, in bytes; a stage without an end has none. Does not block."""
        self._session.notify("report", wire.Report(self.claim, stage, done, total))

    def reporter(self, stage: str) -> Callable[[int, int], None]:
        """A callback (done, total) in bytes for `report`; most calls come to nothing."""
        told = float("-inf")

        def report(done: int, total: int) -> None:
            nonlocal told
            now = time.monotonic()
            if done >= total or now - told >= REPORT_SECONDS:
                told = now
                self.report(stage, done, total)

        return report


def _withdraw(session: Session, claim: str) -> None:
    """Whatever has become of it: a claim is abandoned, a lease given back. Does not block."""
    if session.is_usable:
        session.notify("cancel", wire.Cancel(claim))
