"""The life cycle as a table: every cell, and the diagram in the docs."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from broker.custody.records import WeightSet
from broker.custody.states import IN_PROGRESS, RESIDENT, TABLE, WITH_MEMORY, State, Trigger, mermaid
from broker.errors import Busy
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, Desk, everything

EXPECTED = {
    (State.ABSENT, Trigger.ASK): State.CLAIMED,
    (State.CLAIMED, Trigger.ASK): State.CLAIMED,
    (State.CLAIMED, Trigger.RESERVE): State.RESERVING,
    (State.CLAIMED, Trigger.FAIL): State.ABSENT,
    (State.CLAIMED, Trigger.INHERIT): State.CLAIMED,
    (State.CLAIMED, Trigger.EVICT): State.ABSENT,
    (State.RESERVING, Trigger.ASK): State.RESERVING,
    (State.RESERVING, Trigger.CREATED): State.WRITING,
    (State.RESERVING, Trigger.FAIL): State.ABSENT,
    (State.RESERVING, Trigger.INHERIT): State.CLAIMED,
    (State.RESERVING, Trigger.EVICT): State.ABSENT,
    (State.WRITING, Trigger.ASK): State.WRITING,
    (State.WRITING, Trigger.SEAL): State.SEALING,
    (State.WRITING, Trigger.FAIL): State.ABSENT,
    (State.WRITING, Trigger.INHERIT): State.CLAIMED,
    (State.WRITING, Trigger.EVICT): State.ABSENT,
    (State.SEALING, Trigger.ASK): State.SEALING,
    (State.SEALING, Trigger.FROZEN): State.SEALED,
    (State.SEALING, Trigger.WRITER_LOST): State.SEALING,
    (State.SEALING, Trigger.FAIL): State.ABSENT,
    (State.SEALING, Trigger.INHERIT): State.CLAIMED,
    (State.SEALING, Trigger.EVICT): State.ABSENT,
    (State.SEALED, Trigger.ASK): State.SEALED,
    (State.SEALED, Trigger.EVICT): State.ABSENT,
    (State.SEALED, Trigger.RETIRE): State.DRAINING,
    (State.SEALED, Trigger.LAST_RELEASE): State.SEALED,
    (State.DRAINING, Trigger.ASK): State.SEALED,
    (State.DRAINING, Trigger.RETIRE): State.DRAINING,
    (State.DRAINING, Trigger.LAST_RELEASE): State.ABSENT,
}
"""Written down a second time on purpose: a change of the table is a change of the contract."""

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.mark.parametrize(
    ("state", "trigger"), list(product(State, Trigger)), ids=lambda part: part.value
)
def test_every_cell(state: State, trigger: Trigger) -> None:
    """A trigger leads to the state in its cell, or is refused by name and changes nothing."""
    desk = Desk()
    record = WeightSet(7, WeightKey(DEVICE), state=state)
    expected = EXPECTED.get((state, trigger))
    before = everything(desk.books)
    if expected is not None:
        desk.books._move(record, trigger)
        assert record.state is expected
        return
    with pytest.raises(Busy, match=f"^set 7 is {state.value}: {trigger.value} is not possible$"):
        desk.books._move(record, trigger)
    assert record == WeightSet(7, WeightKey(DEVICE), state=state)
    assert everything(desk.books) == before


def test_groups_of_states() -> None:
    """Every state but absent is resident or in progress; all but a mere claim have memory."""
    assert set(State) - {State.ABSENT} == RESIDENT | IN_PROGRESS
    assert not RESIDENT & IN_PROGRESS
    assert set(State) - {State.ABSENT, State.CLAIMED} == WITH_MEMORY


def test_no_state_is_a_trap() -> None:
    """From every state a set can become absent again."""
    for state in State:
        reached, frontier = set[State](), {state}
        while frontier:
            reached |= frontier
            frontier = {to for at in frontier for to in TABLE[at].values()} - reached
        assert State.ABSENT in reached


def test_the_diagram_is_the_table() -> None:
    """Each arrow of the diagram is a cell of the table with its triggers; there are no others."""
    arrows = re.findall(r"^    (\w+) --> (\w+): (.+)$", mermaid(), re.MULTILINE)
    drawn = {
        (State(at), Trigger(trigger)): State(to)
        for at, to, triggers in arrows
        for trigger in triggers.split(", ")
    }
    assert drawn == EXPECTED
    assert len(arrows) == len({(at, to) for at, to, _ in arrows})


def test_the_diagram_begins_absent_and_is_a_mermaid_block() -> None:
    """The diagram is one fenced block that begins with an absent set."""
    lines = mermaid().splitlines()
    assert lines[:3] == ["```mermaid", "stateDiagram-v2", "    [*] --> absent"]
    assert lines[-1] == "```"


def test_the_documented_diagram() -> None:
    """The architecture page holds exactly the diagram of the table between its markers."""
    if not ARCHITECTURE.exists():
        pytest.skip("docs/architecture.md is not there")
    text = ARCHITECTURE.read_text()
    if "<!-- states -->" not in text:
        pytest.skip("docs/architecture.md has no <!-- states --> marker")
    between = text.split("<!-- states -->")[1].split("<!-- /states -->")[0]
    assert between.strip() == mermaid()
