"""A held claim: the right to write one weight set, from `reserve` to `seal`. No torch.

Engines that publish and loaders do the same steps; whoever holds a claim and dies leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from broker import wire
from broker.errors import BrokerError
from broker.memfd import sealed_memfd
from broker.weights import Manifest, encode_manifest
from engine_client.deadline import Deadline
from engine_client.session import Session

ATTACH_SECONDS = 30.0


class HeldClaim:
    """What may be done with a claim. Every method blocks until the broker has answered."""

    def __init__(self, session: Session, claim: str) -> None:
        self._session = session
        self.claim = claim

    @contextmanager
    def reserve(
        self, manifest: Manifest, dtype: str, quantization: str = ""
    ) -> Iterator[tuple[int, int]]:
        """Have a slab created for this manifest: its writable descriptor, and its size in bytes.

        The descriptor is closed at the end of the block; nothing may be mapped then.

        Raises:
            OverBudget: it does not fit; the claim is still held.
        """
        blob = sealed_memfd("weight-broker-manifest", encode_manifest(manifest))
        request = wire.Reserve(
            self.claim, manifest.nbytes, manifest.tensor_count, dtype, quantization
        )
        try:
            reserved = self._session.call(
                "reserve", request, wire.Reserved, deliver=("manifest", blob)
            )
        finally:
            os.close(blob)
        _nbytes, (slab,) = self._session.attach(self.claim, Deadline(ATTACH_SECONDS))
        try:
            yield slab, reserved.nbytes
        finally:
            os.close(slab)

    def seal(
        self, checkpoint: str = "", files: Sequence[wire.FileStamp] = (), *, keep: bool = False
    ) -> wire.Sealed:
        """Publish what was written. The claim is over, or with `keep` a lease from now on.

        Raises:
            BadRequest: the slab is still mapped writable somewhere; the set is discarded.
        """
        request = wire.Seal(self.claim, checkpoint, list(files), keep)
        return self._session.call("seal", request, wire.Sealed)

    def resolve(self, checkpoint: str, files: Sequence[wire.FileStamp]) -> bool:
        """Whether this content is resident already; if it is, the claim is over."""
        request = wire.Resolve(self.claim, checkpoint, list(files))
        return self._session.call("resolve", request, wire.Resolved).resident

    def abandon(self, error: BrokerError) -> None:
        """Give up; those who wait are told why, or one of them takes the claim over."""
        payload = error.to_payload().decode()
        self._session.call("abandon", wire.Abandon(self.claim, error.status, payload), wire.Done)

    def reporter(self, stage: str) -> Callable[[int, int], None]:
        """A callback (done, total) in bytes that tells everybody who waits. Does not block."""
        return lambda done, total: self._session.notify(
            "report", wire.Report(self.claim, stage, done, total)
        )
