"""Does a set satisfy a demand? Pure predicates over keys."""

from __future__ import annotations

from typing import Any

from broker.custody.records import WeightSet, line_of
from broker.custody.states import RESIDENT, State
from broker.errors import Mismatch
from broker.weights import WeightKey
from broker.wire import Demand

_LOADED_FORMAT = WeightKey().format
_FIELDS = ("device", "checkpoint", "dtype", "layout", "format", "quantization")


def differing(demand: Demand, record: WeightSet) -> dict[str, dict[str, Any]]:
    """{field: {"wanted": …, "resident": …}} for each field the demand fixes and the set differs in.

    Fields of the set that are not known yet (a loader is still finding out) do not differ.
    """
    result: dict[str, dict[str, Any]] = {}
    for field in _FIELDS:
        wanted = getattr(demand, field)
        if wanted is None:
            continue
        resident = getattr(record.key, field)
        if wanted == resident or _is_unknown(field, resident, record):
            continue
        result[field] = {"wanted": wanted, "resident": resident}
    if demand.generation is not None:
        label = generation_of(record, demand.name)
        if label is not None and demand.generation != label:
            result["generation"] = {"wanted": demand.generation, "resident": label}
    return result


def _is_unknown(field: str, resident: object, record: WeightSet) -> bool:
    if resident != "":
        return False
    if field == "checkpoint":
        return record.state not in RESIDENT
    return field in ("dtype", "quantization") and record.state in (State.ABSENT, State.CLAIMED)


def generation_of(record: WeightSet, name: str | None) -> str | None:
    """The set's label in the line of that name, or None if it is in no such line."""
    return record.generations.get(line_of(record.key, name)) if name else None


def mismatch(demand: Demand, record: WeightSet) -> Mismatch | None:
    """The error for a demand that this set does not satisfy, or None."""
    fields = differing(demand, record)
    if not fields:
        return None
    said = _said(fields, "resident")
    what = f"set {record.id}" + (f" ({', '.join(record.names)})" if record.names else "")
    return Mismatch(
        f"the resident weights of {what} are not what was asked for: {said}{_cure(fields, record)}",
        differing=fields,
    )


def unloadable(demand: Demand) -> Mismatch | None:
    """The error for a demand that no load by the broker satisfies: it lays out whole checkpoints
    as stored. None if it may."""
    as_loaded = WeightSet(0, WeightKey(device=demand.device))
    fields = differing(demand, as_loaded)
    if not fields:
        return None
    said = _said(fields, "loaded") + _cure(fields, as_loaded)
    return Mismatch(
        f"the broker loads a checkpoint whole and as it is stored: {said}; leave this open, or "
        "publish the weights from an engine",
        differing=fields,
    )


def _cure(fields: dict[str, dict[str, Any]], record: WeightSet) -> str:
    """A dtype is part of the checkpoint that is meant: it is converted where it is loaded. A label
    stays with the content that it was given to."""
    if fields.keys() == {"dtype"} and record.key.format == _LOADED_FORMAT:
        return "; for another dtype ask for Checkpoint(path, dtype=…)"
    if fields.keys() == {"generation"}:
        return "; leave the label out, or ask for the one it has"
    return ""


def _said(fields: dict[str, dict[str, Any]], ours: str) -> str:
    return "; ".join(
        f"{field} wanted {value['wanted']!r}, {ours} {value['resident']!r}"
        for field, value in fields.items()
    )
