"""What a writer is told whose weights do not fit: by how much, who has the rest, what helps."""

from __future__ import annotations

from typing import Any

from broker.amounts import counted, human
from broker.custody.records import WeightSet
from broker.errors import OverBudget

_LARGER = "start the broker with a larger --memory-limit"


def over_budget(
    record: WeightSet, nbytes: int, free: int, limit: int, held: list[dict[str, Any]], more: int
) -> OverBudget:
    """The error for the writer of `record`; the exact bytes are its fields.

    Args:
        nbytes: what its slab needs.
        free: of the limit, with what nobody leases or has pinned.
        held: sets that cannot make room: `set`, `nbytes` and `why` of each.
        more: how many such sets there are beside those.
    """
    device = record.key.device
    said = [f"{entry['set']}: {human(entry['nbytes'])} {entry['why']}" for entry in held]
    can_help = bool(held) and nbytes <= limit
    return OverBudget(
        f"{_subject(record)} needs {human(nbytes)} on device {device}: of a limit of "
        f"{human(limit)}, {human(free)} are free or unused, {human(nbytes - free)} too few"
        + (f"; in use: {', '.join(said)}" if said else "")
        + (f" and {counted(more, 'more set')}" if more else "")
        + (f"; release, unpin or evict sets, or {_LARGER}" if can_help else f"; {_LARGER}"),
        requested=nbytes,
        free=free,
        limit=limit,
        device=device,
        held=held,
    )


def _subject(record: WeightSet) -> str:
    if record.source is not None:
        return f"checkpoint {record.source.path!r}"
    return f"weight set {(record.key.name or record.key.checkpoint)!r}"
