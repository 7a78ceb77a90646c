"""Named lines: which generation is the newest, what it is called, when the old ones go."""

from __future__ import annotations

from functools import partial

import pytest

from broker import wire
from broker.custody.actions import CreateSlab, FreeSlab, Notify, Reply
from broker.custody.states import State
from broker.errors import Busy, Mismatch, NotFound
from broker.limits import DEFAULTS
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, Desk, Refused, source


def generations(desk: Desk, name: str = "m") -> dict[int, str]:
    """Set and label of each generation of a name, oldest first."""
    return {
        set_id: desk.set(set_id).generations[line]
        for line, members in desk.books.lines().items()
        for set_id in members
        if line[0] == name
    }


def fill(desk: Desk, *inodes: int, name: str = "m") -> list[int]:
    """One generation after the other, each leased by an engine of its own: the engines."""
    engines = []
    for inode in inodes:
        engines.append(desk.engine())
        desk.load(inode, f"blake3:{inode}", engines[-1], fingerprint=f"shape-{inode}", name=name)
    return engines


def held(desk: Desk, action: object) -> wire.Granted:
    """The lease that an action grants."""
    assert isinstance(action, Reply)
    assert isinstance(action.body, wire.Granted)
    return action.body


def test_an_unnamed_checkpoint_belongs_to_no_line() -> None:
    """Two folders that are both called `final` never become generations of each other."""
    desk = Desk()
    for inode in (1, 2):
        desk.load(inode, f"blake3:{inode}", fingerprint=f"shape-{inode}")
    assert not desk.books.lines()
    assert [desk.set(n).state for n in (1, 2)] == [State.SEALED, State.SEALED]


def test_a_superseded_set_drains() -> None:
    """The old generation lives for its engines, and is freed with its last lease."""
    desk = Desk()
    (old,) = fill(desk, 1)
    other = desk.engine()
    desk.acquire(other, name="m")
    fill(desk, 2)
    assert desk.set(1).state is State.DRAINING
    assert desk.release(other) == [Reply(desk.ticket, wire.Done())]
    assert desk.end(old) == [FreeSlab(1)]
    assert generations(desk) == {2: "2"}
    assert desk.free == 900


def test_a_superseded_set_that_nobody_leases_is_freed_at_once() -> None:
    """No lease, no wish: its memory is there again before the new one's waiters are served."""
    desk = Desk()
    (engine,) = fill(desk, 1)
    desk.end(engine)
    loader = desk.start(source(2, "shape-2"), name="m")
    actions = desk.finish(loader, "blake3:2")
    assert actions.index(FreeSlab(1)) < len(actions) - 1
    assert sorted(desk.books.sets) == [2]


def test_a_name_means_its_newest_generation() -> None:
    """By name alone an engine gets the newest; by label the one it demands."""
    desk = Desk()
    fill(desk, 1, 2, 3)
    engine = desk.engine()
    (newest,) = desk.acquire(engine, "a", name="m")
    (older,) = desk.acquire(engine, "b", name="m", generation="2")
    assert (held(desk, newest).set, held(desk, newest).generation) == (3, "3")
    assert (held(desk, older).set, held(desk, older).generation) == (2, "2")
    words = r"^'m', generation '9', is not resident on device GPU-0; its generations are 1, 2, 3$"
    with pytest.raises(NotFound, match=words):
        desk.acquire(engine, "c", name="m", generation="9")


def test_an_old_generation_does_not_become_the_newest() -> None:
    """Demanding an old generation supersedes nothing, and it is freed with that last lease."""
    desk = Desk()
    fill(desk, 1, 2)
    late = desk.engine()
    desk.acquire(late, name="m", generation="1")
    assert generations(desk) == {1: "1", 2: "2"}
    assert desk.set(1).state is State.SEALED
    desk.end(1)
    assert desk.set(1).state is State.SEALED
    assert desk.release(late)[0] == FreeSlab(1)


def test_the_old_checkpoint_again_is_a_step_back() -> None:
    """Asking for the old files under the name makes them the newest again, under their label."""
    desk = Desk()
    fill(desk, 1, 2)
    (action,) = desk.acquire(desk.engine(), from_=source(1, "shape-1"), name="m")
    assert held(desk, action).generation == "1"
    assert generations(desk) == {2: "2", 1: "1"}
    assert [desk.set(n).state for n in (1, 2)] == [State.SEALED, State.DRAINING]


def test_an_unnamed_request_keeps_a_superseded_set() -> None:
    """Asked for by its files, not as a generation, a draining set is sealed again and stays."""
    desk = Desk()
    first, _ = fill(desk, 1, 2)
    late = desk.engine()
    desk.acquire(late, from_=source(1, "shape-1"))
    desk.end(first)
    desk.end(late)
    assert desk.set(1).state is State.SEALED


def test_an_evicted_set_that_is_asked_for_again_is_sealed_again() -> None:
    """Draining is not the end: the next lease makes the set an ordinary one."""
    desk = Desk()
    (engine,) = fill(desk, 1)
    desk.evict(1)
    assert desk.set(1).state is State.DRAINING
    late = desk.engine()
    desk.acquire(late, name="m")
    desk.end(engine)
    desk.end(late)
    assert desk.set(1).state is State.SEALED


def test_a_set_of_two_names_lives_for_the_other() -> None:
    """Superseded under one name, but the newest of another: it stays until that has a newer one."""
    desk = Desk()
    (engine,) = fill(desk, 1)
    desk.acquire(engine, "n", from_=source(1, "shape-1"), name="n")
    desk.end(engine)
    fill(desk, 2)
    assert desk.set(1).state is State.SEALED
    fill(desk, 3, name="n")
    assert sorted(desk.books.sets) == [2, 3]


def test_a_name_moves_to_a_resident_set() -> None:
    """A name given to weights that are there already supersedes what it meant before."""
    desk = Desk()
    (old,) = fill(desk, 1)
    desk.end(old)
    desk.load(2, "blake3:2", fingerprint="shape-2")
    actions = desk.acquire(desk.engine(), from_=source(2, "shape-2"), name="m")
    assert actions[0] == FreeSlab(1)
    assert generations(desk) == {2: "2"}


def test_another_dtype_is_another_line() -> None:
    """Sets of one name and two dtypes do not supersede each other."""
    desk = Desk()
    desk.finish(desk.start(source(1), name="m"), "blake3:1", dtype="bfloat16")
    desk.finish(desk.start(source(2, "shape-2"), name="m"), "blake3:2", dtype="float16")
    assert [desk.set(n).state for n in (1, 2)] == [State.SEALED, State.SEALED]
    (action,) = desk.acquire(desk.engine(), name="m", dtype="bfloat16")
    assert held(desk, action).set == 1


def test_a_pinned_generation_stays_until_it_is_unpinned() -> None:
    """A pin outlives a newer generation and the last lease; without it the set goes at once."""
    desk = Desk()
    (engine,) = fill(desk, 1)
    desk.books.pin(0, wire.Pin("1"))
    fill(desk, 2)
    desk.end(engine)
    assert desk.set(1).state is State.SEALED
    assert desk.call(lambda: desk.books.unpin(7, wire.Unpin("1"))) == [
        FreeSlab(1),
        Reply(7, wire.Pinned([1])),
    ]


def test_a_pin_holds_a_draining_set() -> None:
    """A pin on a set that is to go with its last lease keeps it, and says so the first time."""
    desk = Desk()
    (engine,) = fill(desk, 1)
    desk.evict(1)
    for kept in ([1], []):
        answer = Reply(0, wire.Pinned([1], kept))
        assert desk.call(lambda: desk.books.pin(0, wire.Pin("1"))) == [answer]
    desk.end(engine)
    assert desk.set(1).state is State.SEALED


def test_the_newest_goes_and_the_one_before_is_the_newest() -> None:
    """A line never points to a set that has ended."""
    desk = Desk()
    fill(desk, 1, 2)
    desk.end(3)
    desk.evict("2")
    assert generations(desk) == {1: "1"}
    (action,) = desk.acquire(desk.engine(), name="m")
    assert held(desk, action).set == 1


# --- labels -----------------------------------------------------------------------------------


def test_numbers_are_never_used_twice() -> None:
    """After a generation has gone its number is not given again."""
    desk = Desk()
    for engine in fill(desk, 1, 2):
        desk.end(engine)
    desk.evict("m")
    fill(desk, 3)
    assert generations(desk) == {3: "3"}


def test_a_publisher_gives_the_label() -> None:
    """The label of a claim is that of its set; numbers given later pass it by."""
    desk = Desk()
    engine = desk.engine()
    desk.publish(engine, "a", name="m", generation="2")
    desk.publish(engine, "b", name="m", checkpoint="blake3:b")
    assert generations(desk) == {2: "3"}
    desk.publish(engine, "c", name="m", generation="step 100")
    desk.publish(engine, "d", name="m", checkpoint="blake3:d")
    assert generations(desk) == {4: "4"}


def test_a_label_belongs_to_one_set() -> None:
    """Other content under a label that is there is refused, at the claim or at the grant."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "a", name="m", dtype="bfloat16", checkpoint="blake3:a", generation="red")
    desk.reserve(engine, claim="a")
    desk.created(1)
    desk.seal(engine, "blake3:a", claim="a")
    desk.frozen(1)
    with pytest.raises(
        Mismatch,
        match=r"^generation 'red' of 'm' is set 1 already, with other content \(blake3:a\); "
        r"give another label$",
    ):
        desk.claim(engine, "b", name="m", dtype="bfloat16", checkpoint="blake3:b", generation="red")
    loader = desk.start(source(2), name="m", generation="red")
    refusal = desk.finish(loader, "blake3:b")[-1]
    assert isinstance(refusal, Refused)
    assert refusal.kind is Mismatch
    assert generations(desk) == {1: "red"}


def test_a_label_that_was_taken_meanwhile_is_refused() -> None:
    """Of two that seal under one label the later one ends and leaves nothing: ranks that demand a
    label must never find other weights under it."""
    desk = Desk()
    engine = desk.engine()
    for lease, checkpoint in (("a", "blake3:a"), ("b", "blake3:b")):
        desk.claim(engine, lease, name="m", checkpoint=checkpoint, generation="red")
        desk.reserve(engine, claim=lease)
        desk.created(len(desk.books.sets))
        desk.seal(engine, checkpoint, claim=lease)
    desk.frozen(1)
    (told, freed) = desk.frozen(2)
    sentence = (
        "generation 'red' of 'm' is resident already, as set 1; acquire it, or give another label"
    )
    assert (told, freed) == (Refused(desk.ticket, Busy, sentence), FreeSlab(2))
    assert list(desk.books.sets) == [1]


def test_a_label_that_is_taken_is_refused_when_the_dtype_is_known() -> None:
    """A claim may leave the dtype open; before any memory is reserved its line is known."""
    desk = Desk()
    engine = desk.engine()
    desk.publish(engine, "a", name="m", generation="red", dtype="bfloat16")
    fresh = wire.Claim("b", WeightKey(DEVICE, "m"), generation="red", fresh=True)
    desk.call(lambda: desk.books.claim(engine, 8, fresh))
    with pytest.raises(Busy, match=r"^generation 'red' of 'm' is resident already, as set 1"):
        desk.reserve(engine, dtype="bfloat16", claim="b")
    assert desk.reserve(engine, dtype="float32", claim="b") == [CreateSlab(2, DEVICE, 100)]


def test_content_that_has_another_label_is_a_mismatch() -> None:
    """The same weights are not renamed: both labels are in the refusal."""
    desk = Desk()
    fill(desk, 1)
    with pytest.raises(Mismatch, match=r"generation wanted 'red', resident '1'; leave the label "):
        desk.acquire(desk.engine(), from_=source(1, "shape-1"), name="m", generation="red")
    with pytest.raises(Mismatch, match=r"generation wanted 'red', resident '1'; leave the label "):
        desk.claim(
            desk.engine(),
            name="m",
            checkpoint="blake3:1",
            dtype="bfloat16",
            generation="red",
        )


# --- publishing -------------------------------------------------------------------------------


def test_a_fresh_claim_writes_a_new_generation() -> None:
    """`fresh` never gets a lease: it writes, or somebody is writing already."""
    desk = Desk()
    engine = desk.engine()
    desk.publish(engine, "a", name="m", generation="1", dtype="bfloat16")
    key = WeightKey(DEVICE, "m", dtype="bfloat16")
    fresh = wire.Claim("f", key, fresh=True)
    assert desk.call(lambda: desk.books.claim(engine, 8, fresh)) == [Reply(8, wire.Claimed("f"))]
    again = wire.Claim("g", key, fresh=True)
    with pytest.raises(Busy, match=r"^session 1 is writing a generation of 'm' now; wait for it"):
        desk.call(lambda: desk.books.claim(engine, 9, again))
    labelled = wire.Claim("g", key, generation="1", fresh=True)
    desk.cancel(engine, "f")
    with pytest.raises(
        Busy, match=r"^generation '1' of 'm' is resident already, as set 1; acquire"
    ):
        desk.call(lambda: desk.books.claim(engine, 9, labelled))


def test_fresh_claims_without_a_name_do_not_meet() -> None:
    """Unnamed content belongs to no line: neither loads nor other claims are in its way."""
    desk = Desk()
    desk.start(source(1))
    engine = desk.engine()
    for lease in ("a", "b"):
        fresh = wire.Claim(lease, WeightKey(DEVICE, checkpoint=f"blake3:{lease}"), fresh=True)
        desk.call(partial(desk.books.claim, engine, 5, fresh))
    assert len(desk.books.sessions[engine].claims) == 2


def test_watchers_hear_of_generations_and_evictions() -> None:
    """An event for each session that watches the name, or all names, and for no other."""
    desk = Desk()
    watcher, all_names, deaf = (desk.engine() for _ in range(3))
    for session, name in ((watcher, "m"), (all_names, ""), (deaf, "n")):
        desk.call(partial(desk.books.watch, session, 0, wire.Watch(name)))
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.reserve(engine, claim="c")
    desk.created(1)
    desk.seal(engine, claim="c")
    event = wire.Event("new-generation", {"name": "m", "generation": "1", "set": 1})
    assert desk.frozen(1)[:2] == [Notify(watcher, event), Notify(all_names, event)]
    desk.call(lambda: desk.books.unwatch(all_names, 0, wire.Unwatch("")))
    gone = wire.Event("evicted", {"name": "m", "set": 1, "cause": "evict"})
    assert desk.evict(1)[0] == Notify(watcher, gone)


def test_a_session_watches_a_bounded_number_of_names() -> None:
    """Past the limit `watch` is busy; a name that is watched already is no more."""
    desk = Desk()
    engine = desk.engine()
    for number in range(DEFAULTS.watches):
        desk.books.watch(engine, 0, wire.Watch(f"m{number}"))
    desk.call(lambda: desk.books.watch(engine, 0, wire.Watch("m1")))
    with pytest.raises(Busy, match=r"^this session watches 64 names already \(limit watches=64 "):
        desk.call(lambda: desk.books.watch(engine, 0, wire.Watch("another")))
