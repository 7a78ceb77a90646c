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
from broker.errors import BrokerError, LoadFailed
from broker.loader.code import ShippedCode
from broker.loaders import ShippedWork
from engine_client.claim import HeldClaim

MAX_TRACEBACK_CHARACTERS = 6000


def run_shipped(claim: HeldClaim, device: Device, work: ShippedWork, descriptor: int) -> None:
    """Call the code without arguments and publish the module or mapping of tensors it returns.

    Raises:
        LoadFailed: the code could not be loaded, raised, or returned something else.
        BrokerError: what it returned cannot be published.
    """
    result = _call(work, _read(descriptor))
    from engine_client.publishing import plan_publication, write_publication  # imports torch

    try:
        publication = plan_publication(result)
    except (TypeError, AttributeError) as error:
        raise LoadFailed(
            f"the loader {work.description} returned {type(result).__name__}, not a module or a "
            "mapping of names to tensors",
            reason="loader-raised",
        ) from error
    with claim.reserve(publication.manifest, publication.dtype) as (slab, nbytes):
        write_publication(publication, device, slab, nbytes)
    claim.seal()


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _call(work: ShippedWork, data: bytes) -> Any:
    try:
        code = msgspec.msgpack.decode(data, type=ShippedCode)
        sys.path.extend(entry for entry in code.path if entry not in sys.path)
        return pickle.loads(code.pickled)()  # noqa: S301 - what this process is for
    except BrokerError:
        raise
    except Exception as error:
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        raise LoadFailed(
            f"the loader {work.description} raised {type(error).__name__}: {error}",
            reason="loader-raised",
            traceback=trace[-MAX_TRACEBACK_CHARACTERS:],
        ) from error
