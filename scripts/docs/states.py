"""The table of a weight set's states, for readers who see no diagram."""

from __future__ import annotations

from broker.custody.states import TABLE, State, Trigger
from scripts.docs.tables import table


def transitions() -> str:
    """States as rows, triggers as columns, the next state in each cell, "-" if it is refused."""
    rows = [
        [f"**{state.value}**", *(_next(state, trigger) for trigger in Trigger)] for state in TABLE
    ]
    return table(["state", *(trigger.value for trigger in Trigger)], rows)


def _next(state: State, trigger: Trigger) -> str:
    following = TABLE[state].get(trigger)
    return "-" if following is None else following.value
