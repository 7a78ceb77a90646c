"""Weights that sleep: unmapped, their lease given back, their addresses kept. No torch.

Tensors, modules and captured graphs over them stay as they are, and are usable again after `wake`,
which maps the very same bytes at the very same addresses or raises.
"""

from __future__ import annotations

from broker import wire
from broker.errors import BrokerError, Mismatch, NotFound, RequestTimeout
from engine_client.deadline import Deadline
from engine_client.lease import Lease, receive_set

ANSWER_SECONDS = 2.0
"""How long `sleep` waits for the broker to confirm that the lease is back."""


def put_to_sleep(lease: Lease) -> None:
    """Unmap a lease's slab, then give the lease back. Blocks for the device.

    Raises:
        UsageError: it cannot sleep now, and is as it was.
        BrokerLost, UsageError: the session has ended: nothing could be mapped again. As it was.
    """
    session = lease.session
    session.check_usable()
    lease.suspend()
    release = wire.Release(lease.granted.lease)
    try:
        session.call("release", release, wire.Done, deadline=Deadline(ANSWER_SECONDS))
    except RequestTimeout:
        # Too busy to confirm, or about to be replaced by a server that has not heard of it.
        session.notify("release", release)
    except BrokerError:
        return  # a broker that is gone holds no lease
    except BaseException:  # an interrupt, perhaps before it was said
        session.notify("release", release)
        raise


def wake_up(lease: Lease, deadline: Deadline) -> None:
    """Lease and map again what a sleeping lease had mapped. Blocks.

    Raises:
        NotFound: it is not resident any more; the sentence says what became of it.
        RequestTimeout, BrokerLost, InternalError, UsageError: it could not be done.
        In each case it is still asleep, holds no lease, and may be woken later.
    """
    session = lease.session
    try:
        granted = _ask_again(lease, deadline)
        with receive_set(session, granted, deadline) as (slab, manifest):
            ours = lease.manifest
            # Metadata may differ: another publisher may have given it along with equal bytes.
            if (manifest.nbytes, manifest.groups, manifest.aliases) != (
                ours.nbytes,
                ours.groups,
                ours.aliases,
            ):
                raise NotFound(
                    f"set {lease.granted.set} is gone, and set {granted.set}, of the same content, "
                    "is laid out in another way: these weights stay asleep; acquire them anew",
                    set=lease.granted.set,
                )
            lease.resume(granted, slab)
    except BaseException:
        if session.is_usable:
            session.notify("cancel", wire.Cancel(lease.granted.lease))
        raise


def _ask_again(lease: Lease, deadline: Deadline) -> wire.Granted:
    """A lease, of the id it had before, on the very set, or on one of the same content."""
    key, before = lease.granted.key, lease.granted
    very_set = wire.Demand(device=key.device, set=before.set, name=key.name or None)
    try:
        return _acquire(lease, very_set, deadline)
    except NotFound as gone:
        missing = NotFound(f"{gone.sentence}; these weights stay asleep", set=before.set)
    if not key.checkpoint:
        raise missing
    same_content = wire.Demand(
        device=key.device,
        checkpoint=key.checkpoint,
        dtype=key.dtype,
        layout=dict(key.layout),
        format=key.format,
        quantization=key.quantization,
    )
    try:
        return _acquire(lease, same_content, deadline)
    except (NotFound, Mismatch):
        raise missing from None


def _acquire(lease: Lease, demand: wire.Demand, deadline: Deadline) -> wire.Granted:
    request = wire.Acquire(lease.granted.lease, demand)
    return lease.session.call(
        "acquire", request, wire.Granted, deadline=deadline, stage="waking the weights"
    )
