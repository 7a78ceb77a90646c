"""Load a checkpoint: plan, (hash,) reserve, fill, seal. No torch."""

from __future__ import annotations

import msgspec

from broker.checkpoints.plan import plan_checkpoint
from broker.checkpoints.reading import LoadResult, hash_pieces, load_pieces
from broker.devices.base import Device
from broker.errors import LoadFailed, NotFound
from broker.loaders import CheckpointWork
from broker.quantization import check_ipc_quant_support
from engine_client.claim import HeldClaim

RING_BUFFERS_PER_THREAD = 2


def load_checkpoint(
    claim: HeldClaim, device: Device, work: CheckpointWork, folder: int, threads: int
) -> None:
    """Do the whole load.

    Raises:
        BrokerError: what everybody who waits is to be told.
    """
    source = work.source
    try:
        plan = plan_checkpoint(folder, source.only, source.path, source.conversion)
    except NotFound as error:  # whoever asked has seen weights there
        raise LoadFailed(error.sentence, **error.fields) from error
    quantization = check_ipc_quant_support(plan.quantization, where="broker")
    if work.hash_first:
        hashed = hash_pieces(plan, folder, threads, claim.reporter("hashing"))
        _check_unchanged(work, hashed)
        if claim.resolve(hashed.checkpoint, hashed.stamps):
            return
    buffers = RING_BUFFERS_PER_THREAD * threads
    with (
        claim.reserve(plan.manifest, plan.dtype, quantization) as (slab, nbytes),
        device.open_writer(slab, nbytes, buffers=buffers) as writer,
    ):
        result = load_pieces(plan, folder, writer, threads, claim.reporter("copying"))
    _check_unchanged(work, result)
    claim.seal(result.checkpoint, result.stamps)


def _check_unchanged(work: CheckpointWork, result: LoadResult) -> None:
    """The bytes that were read are of the files the engine described, not of newer ones.

    The device's number is left out: an engine in another container sees another one.
    """
    read, described = (
        [msgspec.structs.replace(stamp, device=0) for stamp in stamps]
        for stamps in (result.stamps, work.source.files)
    )
    if read != described:
        path = work.source.path
        raise LoadFailed(
            f"{path} was changed between the request and its load; ask again",
            reason="changed",
            file=path,
        )
