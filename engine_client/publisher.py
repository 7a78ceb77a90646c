"""Weights that come from engines: `publish`, `get_or_publish`, `get_or_load`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle
import msgspec

from broker import wire
from broker.devices.base import Device
from broker.errors import (
    BadRequest,
    BrokerError,
    InternalError,
    LoadFailed,
    StaleEpoch,
    UsageError,
    text_of,
)
from broker.loader.code import ShippedCode
from broker.memfd import sealed_memfd
from broker.weights import WeightKey
from engine_client.arguments import (
    check_function,
    check_progress,
    check_seconds,
    check_text,
    checked_key,
    said_of,
)
from engine_client.claim import HeldClaim
from engine_client.deadline import Deadline
from engine_client.lease import Lease, attach
from engine_client.mapping import compare_canary_once
from engine_client.progress import Show, shown
from engine_client.room import told_of_the_limit
from engine_client.session import Session
from engine_client.shielded import shielded
from engine_client.stage import Stage
from engine_client.weight_set import WeightSet

if TYPE_CHECKING:
    import torch

    from engine_client.publishing import Publication

    Publishable: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]

LOAD_SECONDS = 3600.0
"""Default deadline of a shipped loader."""
SERVER_TRIES = 3
"""How often `get_or_publish` tries: a claim ends when the broker's server is replaced."""
GIVE_UP_SECONDS = 2.0
"""How long a publisher that failed waits for the broker to confirm that nothing is left."""


class Publisher:
    """The part of a client that makes weight sets. Every method blocks.

    Usable from several threads, also for different keys at once.
    """

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
        timeout: float | None = None,
    ) -> WeightSet:
        """Make the weights a new generation of the key's name, and map it.

        Strides, ties, views of one storage and buffers of both kinds are kept. A module's
        parameters are rebound to the shared views, which frees its private copies; its buffers stay
        its own. Older generations are freed with their last lease.

        Args:
            key: or just a name, for a key of it whose format is "published" (a WeightKey's own is
                "hf" where none is given: another key). dtype is filled in; device is this client's.
            weights: a module, or named tensors, on any device.
            generation: a label that nobody has given yet; None: the next number.
            metadata: small and msgpack-able; `weights.metadata` of everybody who maps the set. It
                arrives as msgpack has it: tuples as lists.
            timeout: seconds for what the broker has to do; the copying is not interrupted. None:
                as long as it takes and the broker lives.

        Raises:
            Busy: another is publishing under this name now, or the label is taken. Nothing of yours
                was published; acquire theirs, or try again.
            OverBudget: it does not fit; the sentence says what is held by whom.
            UsageError: tensors that cannot be published, each with its reason; or bad metadata.
            RequestTimeout: nothing of yours is left at the broker.
            StaleEpoch: the broker's server was replaced meanwhile; publish again.
            BrokerLost.
        """
        check_text(generation, "generation")
        own, deadline = self._own_key(key), Deadline(timeout)
        publication = _plan(own, weights, metadata)  # a mistake in it concerns nobody else
        what = "the right to publish"
        claim = self._claim(own, generation, deadline, fresh=True, what=what)
        if isinstance(claim, WeightSet):
            raise InternalError("the broker granted a lease on what was to be published anew")
        return self._write(claim, weights, lambda: publication, deadline)

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
        A module that was built here is rebound to the shared views. If the broker's server is
        replaced meanwhile, all ask again: another engine may build too, and what is there first
        counts.

        Args:
            build: called without arguments, in this thread, once, in one engine at a time.
            generation: the label demanded, and given if this engine builds; None: the newest, or
                the next number.
            metadata: as for `publish`, if this engine builds.
            timeout: seconds to wait for another engine's weights; None: as long as it builds. Does
                not interrupt this engine's own `build`.
            progress: called in this thread with what the builder reports, at most 4 times a second;
                None: a line on the terminal, if standard error is one.

        Raises:
            UsageError: `build` is no function, or an argument is of a type that cannot be used.
            RequestTimeout: names the stage; nothing is left at the broker.
            LoadFailed: the last engine that was willing to build failed; its cause.
            What `build` raises, in the engine that ran it, and the errors of `publish`.
        """
        check_text(generation, "generation")
        _require_builder(build, "build")
        check_progress(progress)
        own, deadline = self._own_key(key), Deadline(timeout)
        with shown(progress, own.name or own.checkpoint) as show:
            return self._get_or_publish(own, build, generation, metadata, deadline, show)

    def _get_or_publish(
        self,
        own: WeightKey,
        build: Callable[[], Publishable],
        generation: str | None,
        metadata: Mapping[str, Any] | None,
        deadline: Deadline,
        show: Show,
    ) -> WeightSet:
        what = "another engine's weights"
        built: Publishable | None = None
        tries = 0
        while True:
            claim = self._claim(own, generation, deadline, fresh=False, what=what, show=show)
            if isinstance(claim, WeightSet):
                return claim
            if built is None:
                built = self._build(claim, build)
            try:
                plan = partial(_plan, own, built, metadata)
                return self._write(claim, built, plan, Deadline(None))
            except StaleEpoch:
                tries += 1
                if tries == SERVER_TRIES:
                    raise

    def _build(self, claim: HeldClaim, build: Callable[[], Publishable]) -> Publishable:
        try:
            claim.report("building")
            return build()
        except BaseException as error:
            self._give_up(claim, _builder_failed(error))
            raise

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

        A loader that has begun goes on although nobody waits any more: what it makes is for whoever
        asks next, and `evict` (by the key's name) ends it.

        Args:
            loader: called without arguments; returns a module or named tensors.
            seconds: the loader process is ended when it has not finished by then.
            timeout: seconds that this engine waits; None: as long as the loader runs.
            progress: called in this thread with what the loader reports, at most 4 times a second;
                None: a line on the terminal, if standard error is one.

        Raises:
            BadRequest: the broker runs no such loaders (`serve --allow-loaders`).
            LoadFailed: it raised (`traceback`), exited, crashed, was killed, or took too long; the
                sentence and `reason` say which, `last_words` is the end of what it printed.
            UsageError: it is no function, cloudpickle cannot pack it, or an argument is of a type
                that cannot be used.
            RequestTimeout, OverBudget, BrokerLost.
        """
        _require_builder(loader, "loader")
        check_progress(progress)
        check_seconds(seconds)
        own, deadline = self._own_key(key), Deadline(timeout)
        description = _describe(loader)
        code = wire.encode(_packed(loader, description))
        load = partial(self._get_or_load, own, description, code, seconds, deadline)
        with shown(progress, own.name or own.checkpoint) as show:
            return shielded(load, deadline, show)

    def _get_or_load(
        self,
        own: WeightKey,
        description: str,
        code: bytes,
        seconds: float,
        deadline: Deadline,
        show: Show,
    ) -> WeightSet:
        lease = str(next(self._leases))
        stage = Stage("the loader's weights", show)
        with told_of_the_limit("the loader's code"):
            descriptor = sealed_memfd("weight-broker-code", code)
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
        if key == "":
            raise UsageError("the name of what is to be published is empty")
        if isinstance(key, str):
            return WeightKey(device=uuid, name=key, format="published")
        if not isinstance(key, WeightKey):
            raise UsageError(f"the key must be a name or a WeightKey, not {said_of(key)}")
        if key.device not in ("", uuid):
            raise BadRequest(f"the key is for device {key.device}, this client is on {uuid}")
        return msgspec.structs.replace(checked_key(key), device=uuid)

    def _claim(
        self,
        key: WeightKey,
        generation: str | None,
        deadline: Deadline,
        *,
        fresh: bool,
        what: str,
        show: Show | None = None,
    ) -> HeldClaim | WeightSet:
        """The right to write, or, if the set is there, a lease on it."""

        def claim(told: Show) -> HeldClaim | WeightSet:
            return self._claim_now(key, generation, fresh, Stage(what, told), deadline)

        return shielded(claim, deadline, show)

    def _claim_now(
        self, key: WeightKey, generation: str | None, fresh: bool, stage: Stage, deadline: Deadline
    ) -> HeldClaim | WeightSet:
        lease = str(next(self._leases))
        try:
            payload = self._session.ask(
                "claim",
                wire.Claim(lease, key, generation=generation, fresh=fresh),
                deadline=deadline,
                stage=stage,
                on_progress=stage.on_progress,
            )
            right = wire.decode_right(payload)
            if isinstance(right, wire.Claimed) and right.claim == lease:
                return HeldClaim(self._session, right.claim)
            if isinstance(right, wire.Claimed) or right.lease != lease:
                raise InternalError("the broker answered a claim with another claim's right")
            return self._hold(attach(self._session, self._device, right, deadline))
        except BaseException:
            self._withdraw(lease)
            raise

    def _write(
        self,
        claim: HeldClaim,
        weights: Publishable,
        plan: Callable[[], Publication],
        deadline: Deadline,
    ) -> WeightSet:
        """Fill and seal a claim, map it, and rebind a module."""
        from engine_client.publishing import rebind

        try:
            granted = self._fill(claim, plan, deadline)
            held = shielded(lambda _show: self._attached(claim, granted, deadline), deadline)
        except BaseException as error:
            self._give_up(claim, _publisher_failed(error))
            raise
        rebind(weights, held)
        return held

    def _attached(self, claim: HeldClaim, granted: wire.Granted, deadline: Deadline) -> WeightSet:
        held = self._hold(attach(self._session, self._device, granted, deadline))
        claim.settle()  # its lease is these weights'
        return held

    def _fill(
        self,
        claim: HeldClaim,
        plan: Callable[[], Publication],
        deadline: Deadline,
    ) -> wire.Granted:
        """Everything between the claim and the lease that it becomes."""
        from engine_client.publishing import write_publication

        compare_canary_once(self._session, self._device, deadline)
        publication = plan()
        reserving = claim.reserve(publication.manifest, publication.dtype, deadline=deadline)
        with reserving as (slab, nbytes):
            report = claim.reporter("copying")
            write_publication(publication, self._device, slab, nbytes, report)
        sealed = claim.seal(keep=True, deadline=deadline)
        if sealed.granted is None:
            raise InternalError("the broker sealed the weights and gave no lease on them")
        return sealed.granted

    def _give_up(self, claim: HeldClaim, cause: BrokerError) -> None:
        """The claim is over, whatever has become of it, and who waits knows why."""
        if not self._session.is_usable:
            return
        try:
            claim.abandon(cause, Deadline(GIVE_UP_SECONDS))
        except BrokerError:
            # Evicted meanwhile, or sealed and a lease by now.
            self._withdraw(claim.claim)
        claim.settle()


def _require_builder(given: Callable[[], Publishable], what: str) -> None:
    """A module can be called too, and is what it would make."""
    does = "takes no arguments and returns a module or named tensors"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.nn.Module):
        raise UsageError(f"{what} must be a function that {does}, not the module itself")
    check_function(given, what, does)


def _plan(key: WeightKey, weights: Publishable, metadata: Mapping[str, Any] | None) -> Publication:
    from engine_client.publishing import plan_publication

    plan = plan_publication(weights, metadata)
    if key.dtype not in ("", plan.dtype):
        raise UsageError(
            f"the key says dtype {key.dtype!r} and the weights are {plan.dtype!r}: convert them, "
            "or leave it out of the key"
        )
    return plan


def _describe(loader: Callable[[], object]) -> str:
    name = getattr(loader, "__qualname__", type(loader).__name__)
    text = f"{getattr(loader, '__module__', '?')}.{name}"
    printable = "".join(character for character in text if character.isprintable())
    return printable[:100] or "?"


def _packed(loader: Callable[[], object], description: str) -> ShippedCode:
    path = [os.path.abspath(entry) for entry in sys.path]
    try:
        return ShippedCode(path, cloudpickle.dumps(loader))
    except Exception as error:  # whatever the objects it refers to raise
        raise UsageError(
            f"the loader {description} cannot be shipped: {type(error).__name__}: {error}; open "
            "what it needs (files, locks, connections) inside of it"
        ) from error


def _builder_failed(error: BaseException) -> BrokerError:
    """What those who wait are told of an exception of the engine's own code."""
    sentence = error.sentence if isinstance(error, BrokerError) else text_of(error)
    said = f"{type(error).__name__}: {sentence}".removesuffix(": ")
    return LoadFailed(f"the engine that built the weights failed: {said}", reason="builder-failed")


def _publisher_failed(error: BaseException) -> BrokerError:
    """What those who wait are told of a publication that did not come to its end."""
    if isinstance(error, BrokerError) and not isinstance(error, UsageError):
        return error
    return _builder_failed(error)
