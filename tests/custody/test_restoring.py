"""Taking over: what a keeper is told, in which order, and books made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker import wire
from broker.custody import Books, Budget
from broker.custody.actions import (
    Action,
    DropLease,
    FreeSlab,
    KeepLease,
    KeepSet,
    Reply,
    StartLoader,
)
from broker.custody.audit import check_invariant, usage
from broker.custody.records import KeptLease, KeptSet
from broker.custody.states import State
from broker.errors import BadRequest, NotFound
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, GRANULARITY, LIMIT, Desk, Refused, source

KEY = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")


def kept(set_id: int = 1, **changes: object) -> KeptSet:
    """A loaded set as the keeper has it, the first generation of "m"."""
    facts: dict[str, object] = {
        "id": set_id,
        "key": KEY,
        "is_draining": False,
        "nbytes": 100,
        "tensors": 3,
        "pinned": False,
        "superseded": False,
        "loaded_by_broker": True,
        "source": source(1),
        "identities": [source(1).identity],
        "lines": {"m": ("1", 1)},
    }
    return KeptSet(**{**facts, **changes})  # type: ignore[arg-type]


class Successor(Desk):
    """A desk whose books were taken over from an earlier server, with engines 5 and 6."""

    def __init__(
        self, sets: Sequence[KeptSet], *leases: tuple[int, str, int], restarts: int = 0
    ) -> None:
        super().__init__()
        self.books = Books({DEVICE: Budget(LIMIT, GRANULARITY)}, "epoch", keeping=True)
        held = [KeptLease(*lease) for lease in leases]
        self.restored = self.call(lambda: self.books.restore(sets, [5, 6], held, restarts=restarts))


def told(actions: list[Action | Refused]) -> list[Action | Refused]:
    """What the keeper is told, and the replies."""
    return [a for a in actions if isinstance(a, KeepSet | KeepLease | DropLease | Reply)]


# --- what is kept -----------------------------------------------------------------------------


def keeping_desk() -> Desk:
    desk = Desk()
    desk.books = Books({DEVICE: Budget(LIMIT, GRANULARITY)}, "epoch", keeping=True)
    return desk


def test_a_lease_is_recorded_before_it_is_granted() -> None:
    """Set and leases come before every reply that depends on them."""
    desk = keeping_desk()
    loader = desk.start(source(1), name="m")
    desk.acquire(desk.engine(), from_=source(1))
    actions = told(desk.finish(loader))
    assert [type(action) for action in actions] == [KeepSet, KeepLease, KeepLease, *[Reply] * 3]
    places = desk.set(1).places.values()
    assert actions[0] == KeepSet(kept(lines={"m": ("1", *places)}))
    assert actions[1:3] == [KeepLease(KeptLease(1, "w", 1)), KeepLease(KeptLease(3, "w", 1))]


def test_what_is_unfinished_is_not_kept() -> None:
    """Claims and slabs in the making die with their server."""
    desk = keeping_desk()
    loader = desk.start(source(1))
    assert not told(desk.reserve(loader.session))
    desk.created(1)
    assert not told(desk.seal(loader.session, "blake3:a", 1))


@pytest.mark.parametrize("how", ["release", "cancel", "end"])
def test_a_lease_that_ends_is_dropped(how: str) -> None:
    """However a lease ends, the keeper hears of it."""
    desk = keeping_desk()
    desk.load(1)
    assert told(getattr(desk, how)(1))[0] == DropLease(1, "w")


def test_each_change_of_a_set_is_kept() -> None:
    """Draining, sealed again, pinned, renamed, known by other files: a new record each time."""
    desk = keeping_desk()
    desk.load(1)
    records = [
        actions[0].record
        for actions in (
            desk.evict(1),
            desk.acquire(1, "v", from_=source(1)),
            desk.call(lambda: desk.books.pin(0, wire.Pin("1"))),
            desk.acquire(1, "u", from_=source(1), name="m"),
        )
        if isinstance(actions[0], KeepSet)
    ]
    facts = [(r.is_draining, r.pinned, list(r.lines)) for r in records]
    assert facts == [
        (True, False, []),
        (False, False, []),
        (False, True, []),
        (False, True, ["m"]),
    ]
    copy = desk.start(source(2))
    (record,) = (a for a in desk.resolve(copy.session, "blake3:a", 2) if isinstance(a, KeepSet))
    assert len(record.record.identities) == 2


def test_a_set_that_did_not_change_is_not_kept_again() -> None:
    """One more lease of a resident set is a record of that lease alone."""
    desk = keeping_desk()
    desk.load(1)
    actions = told(desk.acquire(desk.engine(), from_=source(1)))
    assert [type(action) for action in actions] == [KeepLease, Reply]


# --- books made from it -----------------------------------------------------------------------


def test_sets_and_leases_are_there_again() -> None:
    """Bytes, lines, files and leases are what they were; a hit is a hit."""
    desk = Successor([kept()], (5, "w", 1))
    assert desk.restored == [KeepSet(kept())]
    assert usage(desk.books, DEVICE)["leased"] == 100
    assert desk.books.leases() == [(1, 5, "w")]
    asked: list[dict[str, Any]] = [
        {"from_": source(1)},
        {"name": "m"},
        {"checkpoint": "blake3:a"},
    ]
    for how in asked:
        lease = f"w-{next(iter(how))}"
        actions = desk.acquire(6, lease, **how)
        assert isinstance(actions[-1], Reply)
        assert isinstance(actions[-1].body, wire.Granted)
    assert desk.release(5)[0] == DropLease(5, "w")


def test_a_converted_set_is_found_again_by_its_files() -> None:
    """What became of the files is remembered with them: as stored they are another set."""
    identity = source(1, dtype="float16").identity
    desk = Successor([kept(identities=[identity], lines={})])
    reply = desk.acquire(6, "w", from_=source(1, dtype="float16"))[-1]
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, wire.Granted)
    assert any(isinstance(action, StartLoader) for action in desk.acquire(6, "v", from_=source(1)))


def test_the_newest_generation_is_the_newest_again() -> None:
    """Generations keep their order and labels whatever order the records come in."""
    new = kept(2, key=WeightKey(DEVICE, "", "blake3:b", "bfloat16"), lines={"m": ("7", 9)})
    desk = Successor([new, kept(identities=[], superseded=True)], (5, "w", 1), (6, "w", 2))
    (lease, reply) = desk.acquire(6, "v", name="m")
    assert lease == KeepLease(KeptLease(6, "v", 2))
    assert isinstance(reply, Reply)
    assert desk.set(1).state is State.SEALED
    assert FreeSlab(1) in desk.end(5)
    third = desk.publish(6, "p", name="m", checkpoint="blake3:c")
    assert list(desk.set(third).generations.values()) == ["8"]


def test_what_only_a_dead_session_held_is_freed() -> None:
    """Leases of the dead are dropped for good, and with them what waited for their end."""
    draining = kept(1, is_draining=True)
    old = kept(2, key=WeightKey(DEVICE, "", "blake3:b"), identities=[], superseded=True)
    idle = kept(3, key=WeightKey(DEVICE, "", "blake3:c"), identities=[], lines={})
    pinned = kept(
        4,
        key=WeightKey(DEVICE, "", "blake3:d"),
        identities=[],
        lines={"m": ("4", 4)},
        superseded=True,
        pinned=True,
    )
    desk = Successor([draining, old, idle, pinned], (4, "w", 1), (4, "v", 2), (5, "w", 9))
    assert desk.restored == [
        DropLease(4, "w"),
        DropLease(4, "v"),
        DropLease(5, "w"),
        FreeSlab(1),
        FreeSlab(2),
    ]
    assert sorted(desk.books.sets) == [3, 4]
    assert desk.free == 800
    check_invariant(desk.books)


def test_no_set_has_the_id_of_one_that_is_gone() -> None:
    """An engine that comes back to a set of this epoch gets that one or hears that it is gone."""
    desk = Successor([kept()], restarts=2)
    with pytest.raises(NotFound, match=r"^set 2 is not resident any more: this broker has not"):
        desk.acquire(5, set=2)
    assert desk.start(source(2, "shape-b"), engine=5).set == 2_000_001
    late = Successor([kept(3_000_000)], restarts=2)
    assert late.start(source(2, "shape-b"), engine=5).set == 3_000_001


def test_sessions_go_on_counting() -> None:
    """New engines and loaders get ids behind those of the sessions that are still there."""
    assert Successor([]).engine() == 7


# --- asked again ------------------------------------------------------------------------------


def test_a_grant_that_was_lost_on_the_way_is_given_again() -> None:
    """An engine whose request an earlier server granted asks again and gets the same lease."""
    desk = Successor([kept()], (5, "w", 1))
    again = wire.Granted("w", 1, KEY, None, 100, 3, "resident")
    assert desk.acquire(5, from_=source(1)) == [Reply(1, again)]
    named = wire.Granted(
        "w", 1, WeightKey(DEVICE, "m", "blake3:a", "bfloat16"), "1", 100, 3, "resident"
    )
    assert desk.acquire(5, name="m") == [Reply(2, named)]
    assert desk.claim(5, name="m") == [Reply(3, named)]
    request = wire.Load("w", WeightKey(DEVICE, "m"), "build", 60.0)
    assert desk.call(lambda: desk.books.load(5, 4, request)) == [Reply(4, named)]
    assert desk.books.leases() == [(1, 5, "w")]


def test_a_repeated_request_for_something_else_is_refused() -> None:
    """The id of a restored lease does not stand for other files, names or identities."""
    desk = Successor([kept()], (5, "w", 1))
    others: list[dict[str, Any]] = [
        {"checkpoint": "blake3:b"},
        {"from_": source(2)},
        {"name": "n"},
        {"name": "m", "generation": "2"},
    ]
    for other in others:
        with pytest.raises(BadRequest, match=r"^the lease id 'w' is in use in this session$"):
            desk.acquire(5, **other)


def test_a_released_lease_is_not_given_again() -> None:
    """After its release the id is free for an ordinary request."""
    desk = Successor([kept()], (5, "w", 1))
    desk.release(5)
    assert told(desk.acquire(5, name="m"))[0] == KeepLease(KeptLease(5, "w", 1))
    with pytest.raises(BadRequest, match=r"^the lease id 'w' is in use in this session$"):
        desk.acquire(5, name="m")


def test_a_seal_that_was_answered_into_the_void_is_answered_again() -> None:
    """A publisher that asks to seal what an earlier server sealed for it gets its lease."""
    desk = Successor([kept()], (5, "w", 1))
    request = wire.Seal("w", "blake3:a", keep=True)
    (reply,) = desk.call(lambda: desk.books.seal(5, 3, request))
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, wire.Sealed)
    assert reply.body.granted is not None
    assert (reply.body.set, reply.body.granted.lease) == (1, "w")


def test_an_id_used_again_for_a_claim_can_be_sealed() -> None:
    """A restored lease that was released does not stand in the way of a later claim's seal."""
    desk = Successor([kept()], (5, "w", 1))
    desk.release(5)
    desk.claim(5, name="n")
    set_id = desk.books.sessions[5].claims["w"]
    desk.reserve(5, claim="w")
    desk.created(set_id)
    request = wire.Seal("w", "blake3:n", keep=True)
    assert desk.call(lambda: desk.books.seal(5, 9, request))
    assert told(desk.frozen(set_id))[1] == KeepLease(KeptLease(5, "w", set_id))
