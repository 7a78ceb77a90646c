"""The life cycle of a weight set: one table, nothing beside it.

A set's memory exists from `created` on. `reserving` and `sealing` are the two moments in which the
device works for the set and the loop goes on; DESIGN's table has them inside `claimed` and
`writing`.
"""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    ABSENT = "absent"
    CLAIMED = "claimed"
    """Somebody has the right to write it; no memory yet."""
    RESERVING = "reserving"
    """The device is creating the slab."""
    WRITING = "writing"
    """The writer fills the slab."""
    SEALING = "sealing"
    """The device is making the slab immutable; the writer is not needed any more."""
    SEALED = "sealed"
    """Complete, immutable, given to anybody who asks."""
    DRAINING = "draining"
    """Evicted or superseded, but leased: freed with the last lease."""


class Trigger(str, Enum):
    ASK = "ask"
    """`acquire` or `claim`."""
    RESERVE = "reserve"
    CREATED = "created"
    """The device has created the slab."""
    SEAL = "seal"
    FROZEN = "frozen"
    """The device has made the slab immutable."""
    FAIL = "fail"
    """`abandon`, the writer lost, or the device failed; nobody inherits."""
    INHERIT = "inherit"
    """As `fail`, but a waiting request takes the claim over, on a fresh slab."""
    WRITER_LOST = "writer lost"
    EVICT = "evict"
    """`evict` of a set that nobody leases, or it is superfluous: another holds the same bytes."""
    RETIRE = "retire"
    """`evict`, or a newer generation sealed, while it is leased."""
    LAST_RELEASE = "last release"


_IN_PROGRESS = {
    Trigger.FAIL: State.ABSENT,
    Trigger.INHERIT: State.CLAIMED,
    Trigger.EVICT: State.ABSENT,
}

TABLE: dict[State, dict[Trigger, State]] = {
    State.ABSENT: {Trigger.ASK: State.CLAIMED},
    State.CLAIMED: {
        Trigger.ASK: State.CLAIMED,
        Trigger.RESERVE: State.RESERVING,
        **_IN_PROGRESS,
    },
    State.RESERVING: {
        Trigger.ASK: State.RESERVING,
        Trigger.CREATED: State.WRITING,
        **_IN_PROGRESS,
    },
    State.WRITING: {
        Trigger.ASK: State.WRITING,
        Trigger.SEAL: State.SEALING,
        **_IN_PROGRESS,
    },
    State.SEALING: {
        Trigger.ASK: State.SEALING,
        Trigger.FROZEN: State.SEALED,
        Trigger.WRITER_LOST: State.SEALING,
        **_IN_PROGRESS,
    },
    State.SEALED: {
        Trigger.ASK: State.SEALED,
        Trigger.EVICT: State.ABSENT,
        Trigger.RETIRE: State.DRAINING,
        Trigger.LAST_RELEASE: State.SEALED,
    },
    State.DRAINING: {
        Trigger.ASK: State.SEALED,
        Trigger.RETIRE: State.DRAINING,
        Trigger.LAST_RELEASE: State.ABSENT,
    },
}
"""`TABLE[state][trigger]` is the next state; a trigger that is not there is refused."""

RESIDENT = frozenset({State.SEALED, State.DRAINING})
WITH_MEMORY = frozenset(
    {State.RESERVING, State.WRITING, State.SEALING, State.SEALED, State.DRAINING}
)
IN_PROGRESS = frozenset({State.CLAIMED, State.RESERVING, State.WRITING, State.SEALING})


def mermaid() -> str:
    """The table as a fenced Mermaid state diagram, for docs/architecture.md."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> absent"]
    for state, row in TABLE.items():
        for following in dict.fromkeys(row.values()):
            triggers = [trigger.value for trigger, to in row.items() if to is following]
            lines.append(f"    {state.value} --> {following.value}: {', '.join(triggers)}")
    return "\n".join([*lines, "```"])
