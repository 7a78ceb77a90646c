"""What a loader process does: plan, (hash,) reserve, fill, seal. No torch.

It is an ordinary client whose session was handed to it at birth together with a claim.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from broker import wire
from broker.checkpoints.plan import CheckpointPlan, plan_checkpoint
from broker.checkpoints.reading import LoadResult, hash_pieces, load_pieces
from broker.devices import open_devices
from broker.devices.base import Device
from broker.errors import BrokerError, InternalError, LoadFailed
from broker.loaders import Job
from broker.memfd import sealed_memfd
from broker.quantization import check_ipc_quant_support
from broker.weights import encode_manifest
from engine_client.deadline import Deadline
from engine_client.session import Session

RING_BUFFERS_PER_THREAD = 2
HELLO_SECONDS = 30.0


def main(arguments: list[str]) -> int:
    """Run one job. Arguments: descriptors of session socket, job and checkpoint folder.

    Returns 0 if the broker has its answer: weights, or the sentence why not.
    """
    session_fd, job_fd, folder = map(int, arguments)
    job = _read_job(job_fd)
    session = Session(
        socket.socket(fileno=session_fd),
        Path(job.socket),
        platform=job.platform,
        label=f"loader of {job.source.path}",
        timeout=HELLO_SECONDS,
    )
    session.on_lost(lambda: os._exit(1))  # nobody is left to load for
    try:
        _load(session, job, folder)
        return 0
    except BrokerError as error:
        return _give_up(session, job, error)
    except Exception as error:  # noqa: BLE001 - becomes the answer of everybody who waits
        traceback.print_exc()
        return _give_up(
            session,
            job,
            InternalError(
                f"the loader of {job.source.path} failed: {type(error).__name__}: {error}"
            ),
        )
    finally:
        session.close()


def _read_job(descriptor: int) -> Job:
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    os.close(descriptor)
    return msgspec.msgpack.decode(data, type=Job)


def _give_up(session: Session, job: Job, error: BrokerError) -> int:
    payload = error.to_payload().decode()
    try:
        session.call("abandon", wire.Abandon(job.claim, error.status, payload), wire.Done)
    except BrokerError as refusal:
        # Evicted or stopping: nobody waits for the reason any more.
        print(f"{error.sentence} ({refusal.sentence})", file=sys.stderr)
        return 1
    return 0


def _load(session: Session, job: Job, folder: int) -> None:
    plan = plan_checkpoint(folder, job.source.only, job.source.path)
    quantization = check_ipc_quant_support(plan.quantization, where="broker")
    if job.hash_first:
        hashed = hash_pieces(plan, folder, job.threads, _reporter(session, job, "hashing"))
        _check_unchanged(job, hashed)
        resolve = wire.Resolve(job.claim, hashed.checkpoint, list(hashed.stamps))
        if session.call("resolve", resolve, wire.Resolved).resident:
            return
    result = _fill(session, job, plan, folder, quantization)
    _check_unchanged(job, result)
    seal = wire.Seal(job.claim, result.checkpoint, list(result.stamps))
    session.call("seal", seal, wire.Sealed)


def _fill(
    session: Session, job: Job, plan: CheckpointPlan, folder: int, quantization: str
) -> LoadResult:
    manifest = sealed_memfd("weight-broker-manifest", encode_manifest(plan.manifest))
    reserve = wire.Reserve(
        job.claim, plan.manifest.nbytes, plan.manifest.tensor_count, plan.dtype, quantization
    )
    try:
        reserved = session.call("reserve", reserve, wire.Reserved, deliver=("manifest", manifest))
    finally:
        os.close(manifest)
    _nbytes, (slab,) = session.attach(job.claim, Deadline(HELLO_SECONDS))
    try:
        buffers = RING_BUFFERS_PER_THREAD * job.threads
        with _device(job).open_writer(slab, reserved.nbytes, buffers=buffers) as writer:
            progress = _reporter(session, job, "copying")
            return load_pieces(plan, folder, writer, job.threads, progress)
    finally:
        os.close(slab)


def _device(job: Job) -> Device:
    kind = "simulated" if job.platform == "simulated" else "cuda"
    for device in open_devices(kind):
        if device.properties.uuid == job.device:
            return device
    raise InternalError(f"the loader cannot see device {job.device}")


def _reporter(session: Session, job: Job, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: session.notify("report", wire.Report(job.claim, stage, done, total))


def _check_unchanged(job: Job, result: LoadResult) -> None:
    """The bytes that were read are of the files the engine described, not of newer ones."""
    if list(result.stamps) != list(job.source.files):
        raise LoadFailed(
            f"{job.source.path} was changed between the request and its load; ask again",
            reason="changed",
            file=job.source.path,
        )
