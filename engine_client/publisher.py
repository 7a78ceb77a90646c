"""Weights that come from engines: `publish`, `get_or_publish`, `get_or_load`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle
import msgspec

from broker import wire
from broker.devices.base import Device, DeviceError, DeviceOutOfMemory
from broker.errors import BadRequest, BrokerError, InternalError, LoadFailed, OverBudget
from broker.loader.code import ShippedCode
from broker.memfd import sealed_memfd
from broker.weights import WeightKey
from engine_client.claim import HeldClaim
from engine_client.deadline import Deadline
from engine_client.lease import Lease, attach
from engine_client.progress import progress_printer
from engine_client.session import Session
from engine_client.stage import Stage
from engine_client.weight_set import WeightSet

if TYPE_CHECKING:
    import torch

    Publishable: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]

ATTACH_SECONDS = 30.0
LOAD_SECONDS = 3600.0
"""Default deadline of a shipped loader."""

Show: TypeAlias = Callable[[wire.Progress], None]


class Publisher:
    """The part of a client that makes weight sets. Every method blocks."""

    _session: Session
    _device: Device
    _leases: itertools.count[int]

    def _withdraw(self, lease: str) -> None:
        raise NotImplementedError

    def _hold(self, lease: Lease) -> WeightSet:
        raise NotImplementedError

    def publish(
        self,
        key: WeightKey | str,
        weights: Publishable,
        *,
        generation: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> WeightSet:
        """Make the weights a new generation of the key's name, and map it.

        Strides, ties, views of one storage and buffers of both kinds are kept. A module's
        parameters are rebound to the shared views, which frees its private copies; its buffers stay
        its own. Older generations are freed with their last lease.

        Args:
            key: or just a name, for a key of nothing else. dtype is filled in; device is this
                client's.
            weights: a module, or named tensors, on any device.
            generation: a label that nobody has given yet; None: the next number.
            metadata: small and msgpack-able; `weights.metadata` of everybody who maps the set.

        Raises:
            Busy: another is publishing under this name now, or the label is taken. Nothing of yours
                was published; acquire theirs, or try again.
            OverBudget: it does not fit.
            UsageError: tensors that cannot be published, each with its reason.
            BrokerLost.
        """
        claim = self._claim(self._own_key(key), generation, fresh=True, stage=Stage("a claim"))
        if isinstance(claim, WeightSet):
            raise InternalError("the broker granted a lease on what was to be published anew")
        return self._write(claim, weights, metadata)

    def get_or_publish(
        self,
        key: WeightKey | str,
        build: Callable[[], Publishable],
        *,
        generation: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        progress: Show | None = None,
    ) -> WeightSet:
        """Map the set of this key; if there is none, one of all who ask builds it for all.

        The others wait; if the builder dies or raises, one of them is asked to build in its place.
        A module that was built here is rebound to the shared views.

        Args:
            build: called without arguments, in this thread, in one engine at a time.
            timeout: seconds to wait for another engine's weights; None: as long as it builds.

        Raises:
            RequestTimeout: names the stage; nothing is left at the broker.
            What `build` raises, in the engine that ran it, and the errors of `publish`.
        """
        stage = Stage("another engine's weights", progress or progress_printer(_name_of(key)))
        claim = self._claim(
            self._own_key(key), generation, fresh=False, stage=stage, deadline=Deadline(timeout)
        )
        if isinstance(claim, WeightSet):
            return claim
        try:
            built = build()
        except BaseException as error:
            claim.abandon(_cause(error, "the engine that built the weights"))
            raise
        return self._write(claim, built, metadata)

    def get_or_load(
        self,
        key: WeightKey | str,
        loader: Callable[[], Publishable],
        *,
        seconds: float = LOAD_SECONDS,
        timeout: float | None = None,
        progress: Show | None = None,
    ) -> WeightSet:
        """Map the set of this key; if there is none, the broker runs `loader` in its own process.

        The callable travels by cloudpickle, so it may be a closure or come from a notebook; what it
        refers to by module name is imported from this process's import path. The broker itself
        never opens it.

        Args:
            loader: called without arguments; returns a module or named tensors.
            seconds: the loader process is ended when it has not finished by then.
            timeout: seconds that this engine waits; None: as long as the loader runs.

        Raises:
            BadRequest: the broker runs no such loaders (`serve --allow-loaders`).
            LoadFailed: it raised (`traceback`), exited, crashed, was killed, or took too long; the
                sentence says which.
            RequestTimeout, OverBudget, BrokerLost.
        """
        own = self._own_key(key)
        lease = str(next(self._leases))
        description = _describe(loader)
        code = ShippedCode(
            [os.path.abspath(entry) for entry in sys.path], cloudpickle.dumps(loader)
        )
        descriptor = sealed_memfd("weight-broker-code", wire.encode(code))
        stage = Stage("the loader's weights", progress or progress_printer(_name_of(key)))
        deadline = Deadline(timeout)
        try:
            granted = self._session.call(
                "load",
                wire.Load(lease, own, description, seconds),
                wire.Granted,
                deadline=deadline,
                stage=stage,
                on_progress=stage.on_progress,
                deliver=("code", descriptor),
            )
            return self._hold(attach(self._session, self._device, granted, deadline))
        except BaseException:
            self._withdraw(lease)
            raise
        finally:
            os.close(descriptor)

    def _own_key(self, key: WeightKey | str) -> WeightKey:
        uuid = self._device.properties.uuid
        if isinstance(key, str):
            return WeightKey(device=uuid, name=key, format="published")
        if key.device not in ("", uuid):
            raise BadRequest(f"the key is for device {key.device}, this client is on {uuid}")
        return msgspec.structs.replace(key, device=uuid)

    def _claim(
        self,
        key: WeightKey,
        generation: str | None,
        *,
        fresh: bool,
        stage: Stage,
        deadline: Deadline | None = None,
    ) -> HeldClaim | WeightSet:
        """The right to write, or, if the set is there, a lease on it."""
        lease = str(next(self._leases))
        deadline = deadline or Deadline(None)
        try:
            payload = self._session.ask(
                "claim",
                wire.Claim(lease, key, generation=generation, fresh=fresh),
                deadline=deadline,
                stage=stage,
                on_progress=stage.on_progress,
            )
            right = wire.decode_right(payload)
            if isinstance(right, wire.Claimed):
                return HeldClaim(self._session, right.claim)
            return self._hold(attach(self._session, self._device, right, deadline))
        except BaseException:
            self._withdraw(lease)
            raise

    def _write(
        self, claim: HeldClaim, weights: Publishable, metadata: Mapping[str, Any] | None
    ) -> WeightSet:
        """Fill and seal a claim, map it, and rebind a module."""
        from engine_client.publishing import plan_publication, rebind, write_publication

        try:
            publication = plan_publication(weights, metadata)
            with claim.reserve(publication.manifest, publication.dtype) as (slab, nbytes):
                write_publication(publication, self._device, slab, nbytes)
            del publication
            sealed = claim.seal(keep=True)
        except BaseException as error:
            self._give_up(claim, error)
            raise
        if sealed.granted is None:
            raise InternalError("the broker sealed the weights and gave no lease on them")
        granted = sealed.granted
        held = self._hold(attach(self._session, self._device, granted, Deadline(ATTACH_SECONDS)))
        rebind(weights, held)
        return held

    def _give_up(self, claim: HeldClaim, error: BaseException) -> None:
        if self._session.is_usable:
            try:
                claim.abandon(_cause(error, "the engine that published the weights"))
            except BrokerError:
                return  # evicted meanwhile: the claim is over already


def _name_of(key: WeightKey | str) -> str:
    return key if isinstance(key, str) else key.name or key.checkpoint


def _describe(loader: Callable[[], object]) -> str:
    name = getattr(loader, "__qualname__", type(loader).__name__)
    text = f"{getattr(loader, '__module__', '?')}.{name}"
    printable = "".join(character for character in text if character.isprintable())
    return printable[:100] or "?"


def _cause(error: BaseException, who: str) -> BrokerError:
    if isinstance(error, BrokerError):
        return error
    if isinstance(error, DeviceOutOfMemory):
        return OverBudget(f"{who} found no memory for them: {error}")
    if isinstance(error, DeviceError):
        return InternalError(f"{who} could not write them: {error}")
    return LoadFailed(
        f"{who} failed: {type(error).__name__}: {error}".strip(), reason="builder-failed"
    )
