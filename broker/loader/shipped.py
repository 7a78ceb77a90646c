"""Run code that an engine shipped, and publish what it returns.

The only place where anything is unpickled: a process of its own, started for this one piece of
code, by a broker that was told to (`--allow-loaders`).
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

import msgspec

from broker.devices.base import Device
from broker.errors import LoadFailed, UsageError, text_of
from broker.loader.code import ShippedCode
from broker.loaders import ShippedWork
from engine_client.claim import HeldClaim

MAX_TRACEBACK_BYTES = 6000


def run_shipped(claim: HeldClaim, device: Device, work: ShippedWork, descriptor: int) -> None:
    """Call the code without arguments and publish the module or mapping of tensors it returns.

    Raises:
        LoadFailed: the code could not be unpacked, raised, or returned what cannot be published.
        BrokerError: its weights do not fit, or the broker is gone.
    """
    result = _call(work, _read(descriptor))
    from engine_client.publishing import plan_publication, write_publication  # imports torch

    try:
        publication = plan_publication(result)
    except UsageError as error:
        raise LoadFailed(
            f"what the loader {work.description} returned cannot be published: {error.sentence}",
            reason="loader-returned",
        ) from error
    except Exception as error:
        how = "returned what raised when it was looked at:"
        raise _failed(work, how, "loader-returned", error) from error
    with claim.reserve(publication.manifest, publication.dtype) as (slab, nbytes):
        write_publication(publication, device, slab, nbytes)
    claim.seal()


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _call(work: ShippedWork, data: bytes) -> Any:
    try:
        code = msgspec.msgpack.decode(data, type=ShippedCode)
        sys.path.extend(entry for entry in code.path if entry not in sys.path)
        loader = pickle.loads(code.pickled)  # noqa: S301 - what this process is for
    except Exception as error:
        raise _failed(work, "could not be unpacked:", "loader-unpickled", error) from error
    try:
        return loader()
    except Exception as error:
        raise _failed(work, "raised", "loader-raised", error) from error


def _failed(work: ShippedWork, how: str, reason: str, error: Exception) -> LoadFailed:
    own = error.__traceback__
    theirs = own.tb_next if own is not None else None  # our call of it is not what failed
    trace = "".join(traceback.format_exception(type(error), error, theirs or own))
    print(trace, file=sys.stderr)
    # ASCII: escaped on its way, an error's fields must not grow beyond what may travel.
    shown = trace.encode("ascii", "backslashreplace")[-MAX_TRACEBACK_BYTES:].decode()
    said = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
    return LoadFailed(f"the loader {work.description} {how} {said}", reason=reason, traceback=shown)
