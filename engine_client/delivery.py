"""What a broker grants and delivers, looked at before anything is mapped. No torch.

A broker of another version, or something that only passes for a broker, must not make this process
read other weights than it asked for, or fault.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from broker import wire
from broker.errors import BadRequest, InternalError
from broker.weights import Manifest, decode_manifest

MAX_MANIFEST_BYTES = 1 << 30
"""As `--limit manifest_bytes` allows at most; 200,000 tensors take 16 MB."""
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_KEY_FIELDS = ("device", "name", "checkpoint", "dtype", "layout", "format", "quantization")


def check_granted(granted: wire.Granted, lease: str, demand: wire.Demand) -> None:
    """Raise `InternalError` unless the grant is the lease that was asked for, on what was demanded.

    A field that the demand leaves open may be anything.
    """
    wrong = {
        field: (wanted, getattr(granted.key, field))
        for field in _KEY_FIELDS
        if (wanted := getattr(demand, field)) is not None and wanted != getattr(granted.key, field)
    }
    if granted.lease != lease:
        wrong["lease"] = (lease, granted.lease)
    if demand.generation not in (None, granted.generation):
        wrong["generation"] = (demand.generation, granted.generation)
    if demand.set not in (None, granted.set):
        wrong["set"] = (demand.set, granted.set)
    if wrong:
        said = "; ".join(
            f"{field} {ours!r} became {theirs!r}" for field, (ours, theirs) in wrong.items()
        )
        raise InternalError(
            f"the broker granted other weights than were asked for: {said}; nothing was mapped",
            differing={field: list(both) for field, both in wrong.items()},
        )


def check_descriptors(descriptors: Sequence[object], wanted: int, what: str) -> None:
    """Raise `InternalError` unless so many came."""
    if len(descriptors) != wanted:
        raise InternalError(
            f"the broker delivered {len(descriptors)} descriptors for {what} instead of {wanted}; "
            "nothing was mapped"
        )


def check_frozen(slab: int) -> None:
    """Raise `InternalError` for a slab of host memory that somebody could still write to.

    What is no memory file at all is refused when it is to be mapped.
    """
    seals = _seals(slab)
    if seals is not None and not seals & fcntl.F_SEAL_WRITE:
        raise InternalError("the broker delivered a slab that is not sealed; nothing was mapped")


def read_manifest(descriptor: int, slab_nbytes: int) -> Manifest:
    """The manifest of a set, validated against its slab.

    Raises:
        InternalError: it is none, can still be changed, or describes what is not in the slab.
    """
    seals = _seals(descriptor)
    needed = _SIZE_SEALS | fcntl.F_SEAL_WRITE
    if seals is None or seals & needed != needed:
        raise InternalError(
            "the broker delivered a manifest that is not sealed; nothing was mapped"
        )
    size = os.fstat(descriptor).st_size
    if not 0 < size <= MAX_MANIFEST_BYTES:
        raise InternalError(
            f"the broker delivered a manifest of {size} bytes; 1 to {MAX_MANIFEST_BYTES} are "
            "possible; nothing was mapped"
        )
    try:
        return decode_manifest(os.pread(descriptor, size, 0), slab_nbytes)
    except BadRequest as error:
        raise InternalError(
            f"the broker delivered a manifest that cannot be: {error.sentence}; nothing was mapped"
        ) from error


def _seals(descriptor: int) -> int | None:
    """The seals of a memory file; None if it is none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return None
