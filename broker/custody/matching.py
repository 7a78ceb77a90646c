"""Does a set satisfy a demand? Pure predicates over keys."""

from __future__ import annotations

from typing import Any

from broker.custody.records import WeightSet, line_of
from broker.errors import Mismatch
from broker.wire import Demand

_FIELDS = ("device", "checkpoint", "dtype", "layout", "format", "quantization")


def differing(demand: Demand, record: WeightSet) -> dict[str, dict[str, Any]]:
    """{field: {"wanted": …, "resident": …}} for each field the demand fixes and the set differs in.

    Fields of the set that are not known yet (a loader is still finding out) do not differ.
    """
    result: dict[str, dict[str, Any]] = {}
    for field in _FIELDS:
        wanted, resident = getattr(demand, field), getattr(record.key, field)
        if wanted is None or wanted == resident or _is_unknown(field, resident, record):
            continue
        result[field] = {"wanted": wanted, "resident": resident}
    label = generation_of(record, demand.name)
    if demand.generation is not None and label is not None and demand.generation != label:
        result["generation"] = {"wanted": demand.generation, "resident": label}
    return result


def _is_unknown(field: str, resident: object, record: WeightSet) -> bool:
    if field == "checkpoint":
        return resident == ""
    return field in ("dtype", "quantization") and record.nbytes == 0


def generation_of(record: WeightSet, name: str | None) -> str | None:
    """The set's label in the line of that name, or None if it is in no such line."""
    return record.generations.get(line_of(record.key, name)) if name else None


def mismatch(demand: Demand, record: WeightSet) -> Mismatch | None:
    """The error for a demand that this set does not satisfy, or None."""
    fields = differing(demand, record)
    if not fields:
        return None
    said = "; ".join(
        f"{field} wanted {value['wanted']!r}, resident {value['resident']!r}"
        for field, value in fields.items()
    )
    what = f"set {record.id}" + (f" ({', '.join(record.names)})" if record.names else "")
    return Mismatch(
        f"the resident weights of {what} are not what was asked for: {said}", differing=fields
    )
