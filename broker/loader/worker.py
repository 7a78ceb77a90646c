"""A loader process from its first to its last word.

It is an ordinary client whose session was handed to it at birth together with a claim. No torch,
unless the code it was shipped needs it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from broker.devices import open_device
from broker.devices.base import DeviceError, DeviceOutOfMemory
from broker.errors import BrokerError, InternalError, OverBudget
from broker.loader.checkpoint import load_checkpoint
from broker.loader.shipped import run_shipped
from broker.loaders import CheckpointWork, Job
from engine_client.claim import HeldClaim
from engine_client.session import Session

HELLO_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Run one job. Arguments: descriptors of session socket, job, and what the work is about.

    Returns 0 if the broker has its answer: weights, or the sentence why not.
    """
    _die_with_parent()
    session_fd, job_fd, given = map(int, arguments)
    job = _read_job(job_fd)
    session = Session(
        socket.socket(fileno=session_fd),
        Path(job.socket),
        platform=job.platform,
        label=f"loader of {_subject(job)}",
        timeout=HELLO_SECONDS,
    )
    session.on_lost(lambda: os._exit(1))  # nobody is left to load for
    claim = HeldClaim(session, job.claim)
    try:
        _work(claim, job, given)
        return 0
    except Exception as error:  # noqa: BLE001 - becomes the answer of everybody who waits
        return _give_up(claim, _cause(error, job))
    finally:
        session.close()


def _die_with_parent() -> None:
    """A server that is gone cannot end us, should we be stopped or hang (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _cause(error: Exception, job: Job) -> BrokerError:
    """What everybody who waits for the weights is told."""
    if isinstance(error, DeviceOutOfMemory):
        said = f"device {job.device} has no room for what a loader itself needs: {error}"
        error = OverBudget(said)
    if isinstance(error, OverBudget):
        error.fields.setdefault("free", _free_bytes(job))
    if isinstance(error, BrokerError):
        return error
    if isinstance(error, DeviceError):
        return InternalError(f"the loader of {_subject(job)} failed on its device: {error}")
    traceback.print_exception(error)
    said = f"the loader of {_subject(job)} failed: {type(error).__name__}: {error}"
    return InternalError(said)


def _free_bytes(job: Job) -> int | None:
    """What is free of the device that had no room; None: the driver does not say that either."""
    try:
        return open_device(job.device, job.platform).free_bytes()
    except DeviceError:
        return None


def _subject(job: Job) -> str:
    work = job.work
    return work.source.path if isinstance(work, CheckpointWork) else work.description


def _read_job(descriptor: int) -> Job:
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    os.close(descriptor)
    return msgspec.msgpack.decode(data, type=Job)


def _work(claim: HeldClaim, job: Job, given: int) -> None:
    device = open_device(job.device, job.platform)
    if isinstance(job.work, CheckpointWork):
        load_checkpoint(claim, device, job.work, given, job.threads)
    else:
        run_shipped(claim, device, job.work, given)


def _give_up(claim: HeldClaim, error: BrokerError) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # the broker passes on what was printed until now
    try:
        claim.abandon(error)
    except BrokerError as refusal:
        # Evicted or stopping: nobody waits for the reason any more.
        print(f"{error.sentence} ({refusal.sentence})", file=sys.stderr)
        return 1
    return 0
