"""What a page names and what it adds up, over books with more than it can name."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from broker.custody import Books, Budget
from broker.custody.audit import usage
from broker.custody.records import SessionRecord, WeightSet
from broker.custody.states import State
from broker.metrics.measures import Measures
from broker.metrics.snapshot import (
    NAME_CHARACTERS,
    NAMED_SESSIONS,
    NAMED_SETS,
    OTHERS,
    Snapshot,
    take_snapshot,
)
from broker.times import Times
from broker.weights import WeightKey

MANY = 250


class World:
    """Books that a test fills by hand, with as much of a server around them as a snapshot needs."""

    def __init__(self) -> None:
        self.books = Books({"SIM-0": Budget(1 << 40)})
        self.times = Times(self.books.sets, wall=lambda: 100.0)
        self.peers: dict[int, Any] = {}

    def add_set(
        self, number: int, nbytes: int, state: State = State.SEALED, name: str = "m"
    ) -> None:
        key = WeightKey(device="SIM-0", name=name)
        self.books.sets[number] = WeightSet(number, key, state=state, nbytes=nbytes)
        self.books.budgets["SIM-0"].free -= nbytes

    def add_session(self, number: int, *sets: int, label: str = "vllm") -> None:
        record = self.books.sessions[number] = SessionRecord(number)
        for set_number in sets:
            record.leases[str(set_number)] = set_number
            self.books.sets[set_number].leases.add((number, str(set_number)))
        identity = SimpleNamespace(pid=1000 + number, command="python")
        self.peers[number] = SimpleNamespace(label=label, identity=identity)

    def snapshot(self) -> Snapshot:
        server = SimpleNamespace(
            books=self.books,
            times=self.times,
            peers=self.peers,
            measures=Measures(),
            config=SimpleNamespace(name="default"),
            platform="simulated",
            first_started=50.0,
            started=60.0,
            loop=SimpleNamespace(slowest_turn=0.0),
            devices={"SIM-0": None},
            tickets=SimpleNamespace(waiting=dict),
            loading=SimpleNamespace(queued=0),
            conversation=SimpleNamespace(connections=[], counters=Counter()),
        )
        return take_snapshot(cast("Any", server))


def test_more_sets_than_are_named() -> None:
    """The largest are named, the rest is added up: no byte and no lease is missing."""
    world = World()
    for number in range(1, MANY + 1):
        world.add_set(number, number)
    world.add_session(1, 1, 2, MANY)
    shown = world.snapshot()
    named = [each for each in shown.sets if each.number != OTHERS]
    assert [each.nbytes for each in named] == list(range(MANY, MANY - NAMED_SETS, -1))
    others = {each.use: each for each in shown.sets if each.number == OTHERS}
    assert (others["leased"].nbytes, others["leased"].leases) == (3, 2)
    total: Counter[str] = Counter()
    for each in shown.sets:
        total[each.use] += each.nbytes
    use = usage(world.books, "SIM-0")
    assert total == {name: use[name] for name in ("leased", "idle")}
    assert shown.states == {("SIM-0", "sealed"): MANY}


def test_where_somebody_may_be_stuck() -> None:
    """However small, a set in progress or one that drains is named before resident ones."""
    world = World()
    for number in range(1, MANY + 1):
        world.add_set(number, 1000)
    world.add_set(1001, 1, State.WRITING)
    world.add_set(1002, 1, State.DRAINING)
    assert [each.number for each in world.snapshot().sets[:2]] == ["1001", "1002"]


def test_more_sessions_than_are_named() -> None:
    """Those with the most bytes are named; a set leased twice by one session counts once for it."""
    world = World()
    for number in range(1, MANY + 1):
        world.add_set(number, number)
        world.add_session(number, number)
    world.add_session(MANY + 1)
    world.books.sessions[1].leases["again"] = 1
    shown = world.snapshot()
    assert (len(shown.sessions), shown.engines) == (NAMED_SESSIONS + 1, MANY + 1)
    assert shown.sessions[0].pid == str(1000 + MANY)
    others = shown.sessions[-1]
    left = MANY - NAMED_SESSIONS
    assert (others.number, others.nbytes, others.leases) == (
        OTHERS,
        left * (left + 1) // 2,
        left + 1,
    )


def test_what_peers_chose() -> None:
    """Names and labels are printable and not too long."""
    world = World()
    world.add_set(1, 1, name="x" * 1000)
    world.add_session(1, 1, label="\x1b[2J\n")
    shown = world.snapshot()
    assert shown.sets[0].name == "x" * NAME_CHARACTERS
    assert shown.sessions[0].label == r"\x1b[2J\n"


def test_since_when_a_set_drains() -> None:
    """Since it was superseded; if an earlier server did that, at least since this one began."""
    world = World()
    for number in (1, 2):
        world.add_set(number, 1, State.DRAINING)
        world.add_session(number, number)
    world.times.note("set-superseded", {"set": 1})
    first, second = sorted(world.snapshot().sets, key=lambda each: each.number)
    assert (first.draining, second.draining) == (0.0, 40.0)
    assert (first.writing, first.quiet) == (None, None)
