"""Mapping granted slabs, and letting go of them, in a process that shares a GPU. No torch."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from broker import wire
from broker.devices.base import Device, DeviceError, Mapping
from broker.errors import InternalError, UnsupportedPlatformForIPCError
from engine_client.deadline import Deadline
from engine_client.session import Session

log = logging.getLogger("weight-broker.client")

RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
"""Between tries to unmap from a device that cannot be waited for; doubled each time."""

_compared: set[tuple[str, str]] = set()
"""Epochs and devices of which this process has compared the canary."""
_comparing = threading.Lock()


def map_granted(
    session: Session, device: Device, granted: wire.Granted, slab: int, deadline: Deadline
) -> Mapping:
    """Map a granted set's slab read-only. Blocks; opens the device's context if it is the first.

    Raises:
        UnsupportedPlatformForIPCError: as `compare_canary_once`.
        InternalError: the slab cannot be mapped.
        RequestTimeout, BrokerLost.
    """
    try:
        name = (session.epoch, granted.set)
        mapping = device.map(slab, granted.nbytes, writable=False, slab=name)
    except DeviceError as error:
        compare_canary_once(session, device, deadline)  # knows whether anything can be mapped
        raise InternalError(f"the weights cannot be mapped: {error}") from error
    try:
        # Now that the context is open, which may have taken longest; nobody has an address yet.
        compare_canary_once(session, device, deadline)
    except BaseException:
        let_go(mapping.close)
        raise
    return mapping


def compare_canary_once(session: Session, device: Device, deadline: Deadline) -> None:
    """Before a GPU's memory is first used: make sure that this process sees what others wrote.

    The broker has proven that two processes of its own can; an engine may live in another
    container, or under another driver library. Blocks; nothing to do on the simulated device, and
    after the first time.

    Raises:
        UnsupportedPlatformForIPCError: the bytes differ ("canary-wrong-bytes") or cannot be mapped
            and read ("canary-failed").
        RequestTimeout, BrokerLost.
    """
    if device.properties.platform == "simulated":
        return
    key = (session.epoch, device.properties.uuid)
    with _comparing:
        if key not in _compared:
            _compare(session, device, deadline)
            _compared.add(key)


def _compare(session: Session, device: Device, deadline: Deadline) -> None:
    from broker.devices.roundtrip import RoundTripFailed, compare_canary  # GPUs only

    try:
        with session.canary(device.properties.uuid, deadline) as canary:
            compare_canary(device, canary)
    except RoundTripFailed as error:
        raise _unsupported(device, error, f"canary-{error.reason}") from error
    except DeviceError as error:
        raise _unsupported(device, error, "canary-failed") from error


def _unsupported(device: Device, error: DeviceError, reason: str) -> UnsupportedPlatformForIPCError:
    platform = device.properties.platform
    return UnsupportedPlatformForIPCError(
        f"[weight-broker:engine] found platform {platform}: this process cannot read what the "
        f"broker's own processes wrote to device {device.properties.uuid}: {error}; only CUDA and "
        "ROCm devices can share memory between processes; run engine and broker under the same "
        "driver, or load the checkpoint the ordinary way on this platform",
        where="engine",
        platform=platform,
        reason=reason,
    )


def let_go(close: Callable[[], None], delay: float = RETRY_SECONDS) -> None:
    """Call `close` now and, as long as it raises `DeviceError`, again later, in another thread.

    A device cannot be waited for during the capture of a CUDA graph, nor after a fault. Never
    raises that: it may be called from a finaliser.
    """
    try:
        close()
    except DeviceError as error:
        log.warning("weights stay mapped and leased for now, next try in %g s: %s", delay, error)
        again = threading.Timer(delay, let_go, (close, min(2 * delay, LONGEST_RETRY_SECONDS)))
        again.daemon = True
        try:
            again.start()
        except RuntimeError:  # the interpreter ends, and the mapping with the process
            return


def _forget_in_child() -> None:
    global _comparing  # another thread of the parent may have held it
    _comparing = threading.Lock()
    _compared.clear()


os.register_at_fork(after_in_child=_forget_in_child)
