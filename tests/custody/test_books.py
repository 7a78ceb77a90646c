"""Giving back: release, cancel, evict, attach, and the death of a process in each of its roles."""

from __future__ import annotations

import pytest

from broker import wire
from broker.custody.actions import FreeSlab, Reply, StartLoader, StopLoader
from broker.custody.audit import snapshot, usage
from broker.custody.states import State
from broker.errors import BadRequest, Cancelled, LoadFailed, NotFound
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, KILLED, OTHER_DEVICE, Desk, Refused, source

WITHDRAWN = "the request was withdrawn by the engine that made it"


def in_state(desk: Desk, state: State) -> StartLoader | None:
    """Set 1 in a state, wanted by engine 1 under lease "w"; its loader if it has one."""
    loader = desk.start(source(1))
    if state is State.CLAIMED:
        return loader
    desk.reserve(loader.session)
    if state is State.RESERVING:
        return loader
    desk.created(1)
    if state is State.WRITING:
        return loader
    desk.seal(loader.session, "blake3:a", 1)
    if state is State.SEALING:
        return loader
    desk.frozen(1)
    desk.end(loader.session)
    if state is State.DRAINING:
        desk.evict(1)
    return None


# --- release ----------------------------------------------------------------------------------


def test_a_released_set_stays() -> None:
    """The last lease of a set that is wanted ends; its bytes stay, idle."""
    desk = Desk()
    desk.load(1)
    assert usage(desk.books, DEVICE) == {
        "reserved": 0,
        "leased": 100,
        "idle": 0,
        "free": 900,
        "limit": 1000,
    }
    assert desk.release(1) == [Reply(desk.ticket, wire.Done())]
    assert usage(desk.books, DEVICE)["idle"] == 100


def test_only_the_holder_releases() -> None:
    """A lease belongs to its session: another one cannot end it, and it ends once."""
    desk = Desk()
    desk.load(1)
    with pytest.raises(BadRequest, match=r"^this session holds no lease 'w'$"):
        desk.release(desk.engine())
    desk.release(1)
    with pytest.raises(BadRequest, match=r"^this session holds no lease 'w'$"):
        desk.release(1)


def test_two_leases_of_one_session_are_two() -> None:
    """A draining set waits for each lease, also for the second of the same engine."""
    desk = Desk()
    desk.load(1)
    desk.acquire(1, "v", from_=source(1))
    desk.evict(1)
    assert desk.release(1, "v") == [Reply(desk.ticket, wire.Done())]
    assert desk.release(1, "w")[0] == FreeSlab(1)


# --- cancel -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.CLAIMED, State.RESERVING, State.WRITING, State.SEALING])
def test_cancelled_while_it_waits(state: State) -> None:
    """A waiting request is answered and forgotten; the load goes on for whoever comes next."""
    desk = Desk()
    in_state(desk, state)
    assert desk.cancel(1) == [
        Refused(1, Cancelled, WITHDRAWN),
        Reply(desk.ticket, wire.Done()),
    ]
    assert desk.set(1).state is state
    assert desk.acquire(1, from_=source(1)) == []


def test_cancelled_after_it_was_granted() -> None:
    """A client whose time ran out while the grant was on its way leaves no lease."""
    desk = Desk()
    in_state(desk, State.DRAINING)
    assert desk.cancel(1) == [FreeSlab(1), Reply(desk.ticket, wire.Done())]
    assert desk.books.leases() == []


def test_cancelled_claim() -> None:
    """A claim that is cancelled is abandoned."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    assert desk.cancel(engine, "c") == [Reply(desk.ticket, wire.Done())]
    assert not desk.books.sets


def test_cancel_is_idempotent() -> None:
    """An id that was never used, or is over, is no error."""
    desk = Desk()
    engine = desk.engine()
    for _ in range(2):
        assert desk.cancel(engine, "never") == [Reply(desk.ticket, wire.Done())]


# --- evict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.CLAIMED, State.RESERVING, State.WRITING, State.SEALING])
def test_evicted_while_it_is_written(state: State) -> None:
    """A set in progress ends at once: its loader is stopped, its waiters are told."""
    desk = Desk()
    loader = in_state(desk, state)
    assert loader is not None
    sentence = "weight set 1 was evicted while it was being written; ask again if it is wanted"
    under_way = {State.RESERVING: [2], State.SEALING: [3]}.get(state, [])
    assert desk.evict(1) == [
        *(Refused(ticket, Cancelled, sentence) for ticket in under_way),
        StopLoader(loader.session),
        *([] if state is State.CLAIMED else [FreeSlab(1)]),
        Refused(1, Cancelled, sentence),
        Reply(desk.ticket, wire.Evicted([1], [])),
    ]
    assert desk.free == 1000


def test_evicted_while_it_is_leased() -> None:
    """A leased set drains, however often it is evicted; it is freed with its last lease."""
    desk = Desk()
    in_state(desk, State.SEALED)
    for _ in range(2):
        assert desk.evict(1) == [Reply(desk.ticket, wire.Evicted([1], [1]))]
        assert desk.set(1).state is State.DRAINING
    assert desk.release(1)[0] == FreeSlab(1)


def test_evicted_while_nobody_leases_it() -> None:
    """An idle set is absent at once and its files are no hit any more."""
    desk = Desk()
    in_state(desk, State.SEALED)
    desk.release(1)
    assert desk.evict("blake3:a") == [FreeSlab(1), Reply(desk.ticket, wire.Evicted([1], []))]
    assert not desk.start(source(1)).hash_first


def test_evicted_by_name() -> None:
    """A name means every set that has it, an id exactly one; what is both, of two sets, neither."""
    desk = Desk()
    engine = desk.engine()
    desk.load(1, "blake3:1", engine, fingerprint="shape-1", name="m")
    desk.load(2, "blake3:2", desk.engine(), fingerprint="shape-2", name="m")
    desk.load(3, "blake3:3", desk.engine(), fingerprint="shape-3", name="1")
    desk.load(4, "blake3:4", desk.engine(), fingerprint="shape-4", name="4")
    with pytest.raises(BadRequest, match=r"^'1' is the id of set 1 and the name of set 3: say"):
        desk.evict("1")
    assert desk.evict("3") == [Reply(desk.ticket, wire.Evicted([3], [3]))]
    assert desk.evict("4") == [Reply(desk.ticket, wire.Evicted([4], [4]))]
    assert desk.evict("m") == [Reply(desk.ticket, wire.Evicted([1, 2], [1, 2]))]


def test_evicting_what_is_not_there() -> None:
    """An unknown id or name is not found; no name at all never means unnamed sets."""
    desk = Desk()
    desk.load(1)
    for what in ("7", "m", ""):
        with pytest.raises(NotFound, match=rf"^no weight set '{what}'; `status` lists ids"):
            desk.evict(what)


# --- death ------------------------------------------------------------------------------------


def test_an_engine_dies_with_leases() -> None:
    """Its leases end; a draining set goes with the last of them, a wanted one stays."""
    desk = Desk()
    engine = desk.engine()
    desk.load(1, engine=engine)
    desk.acquire(engine, "v", from_=source(2, "shape-b"))
    desk.acquire(engine, "u", from_=source(1))
    desk.evict(1)
    assert desk.end(engine) == [FreeSlab(1)]
    assert desk.books.counters["leases_reclaimed"] == 2
    assert desk.books.leases() == []


def test_an_engine_dies_while_it_waits() -> None:
    """Nobody is left to answer; the load and those who share it go on."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(1))
    assert desk.end(1) == []
    assert [a.ticket for a in desk.finish(loader)[1:] if isinstance(a, Reply)] == [2]


@pytest.mark.parametrize("reserved", [False, True])
def test_an_engine_dies_while_it_writes(reserved: bool) -> None:
    """What it was writing ends with it, with the memory; its own steps get no answer."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.acquire(desk.engine(), name="m")
    if reserved:
        desk.reserve(engine, claim="c")
    freed = [FreeSlab(1)] if reserved else []
    assert desk.end(engine) == [*freed, Refused(2, LoadFailed, KILLED.sentence)]
    assert desk.free == 1000


def test_an_engine_in_every_role_dies() -> None:
    """Lease, claim, claim it waits for and load it waits for, all at once."""
    desk = Desk()
    engine, other = desk.engine(), desk.engine()
    desk.load(1, engine=engine)
    desk.claim(engine, "c", name="m")
    desk.claim(other, "o", name="m")
    desk.claim(other, "p", name="n")
    desk.claim(engine, "q", name="n")
    desk.acquire(engine, "r", from_=source(2, "shape-b"))
    waiting = 5
    assert desk.end(engine) == [Reply(waiting, wire.Claimed("o"))]
    assert desk.end(other) == []
    assert [record.state for record in desk.books.sets.values()] == [State.SEALED, State.CLAIMED]


@pytest.mark.parametrize("state", [State.CLAIMED, State.RESERVING, State.WRITING])
def test_a_loader_dies(state: State) -> None:
    """In each state before the seal its engines are told and its bytes are free again."""
    desk = Desk()
    loader = in_state(desk, state)
    assert loader is not None
    assert desk.end(loader.session)[-1] == Refused(1, LoadFailed, KILLED.sentence)
    assert not desk.books.sets
    assert not desk.books.files()
    assert desk.free == 1000


def test_the_dead_stay_dead() -> None:
    """The end of a session that is unknown or over is no event."""
    desk = Desk()
    engine = desk.engine()
    desk.end(engine)
    assert desk.end(engine) == []
    assert desk.end(99) == []


# --- attach -----------------------------------------------------------------------------------


def test_attach_delivers_what_was_granted() -> None:
    """A lease is for reading; a claim for writing, while there is something to write to."""
    desk = Desk()
    loader = desk.start(source(1))
    for _ in range(2):
        with pytest.raises(
            BadRequest, match=r"^attach: this session holds no lease or reserved claim 'load'$"
        ):
            desk.books.attachment(loader.session, "load")
        if desk.set(1).state is State.CLAIMED:
            desk.reserve(loader.session)
    desk.created(1)
    assert desk.books.attachment(loader.session, "load") == (desk.set(1), True)
    desk.seal(loader.session)
    with pytest.raises(BadRequest):
        desk.books.attachment(loader.session, "load")
    desk.frozen(1)
    assert desk.books.attachment(1, "w") == (desk.set(1), False)
    desk.evict(1)
    assert desk.books.attachment(1, "w") == (desk.set(1), False)
    with pytest.raises(BadRequest):
        desk.books.attachment(desk.engine(), "w")


def test_coming_back_to_a_set() -> None:
    """By its id an engine gets that very set, or hears what became of it."""
    desk = Desk()
    engine = desk.engine()
    desk.load(1, engine=engine, name="m")
    (again,) = desk.acquire(engine, "v", set=1)
    key = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")
    assert again == Reply(desk.ticket, wire.Granted("v", 1, key, None, 100, 3, "resident"))
    desk.load(2, "blake3:b", engine=desk.engine(), fingerprint="shape-b", name="m")
    desk.end(engine)
    late = desk.engine()
    became = r"^set 1 is not resident any more: it was superseded by a newer generation of 'm'$"
    with pytest.raises(NotFound, match=became):
        desk.acquire(late, set=1)
    desk.evict(2)
    desk.end(3)
    with pytest.raises(NotFound, match=r"^set 2 is not resident any more: it was evicted$"):
        desk.acquire(late, set=2)
    with pytest.raises(NotFound, match=r"^set 9 is not resident any more: this broker has not"):
        desk.acquire(late, set=9)


# --- what status and shutdown read ------------------------------------------------------------


def test_leases_are_listed_for_a_stop() -> None:
    """Set, session and id of each lease, over all sets."""
    desk = Desk()
    desk.load(1)
    other = desk.engine()
    desk.load(2, "blake3:b", other, fingerprint="shape-b")
    desk.acquire(other, "v", from_=source(1))
    assert sorted(desk.books.leases()) == [(1, 1, "w"), (1, other, "v"), (2, other, "w")]


def test_the_books_as_plain_data() -> None:
    """Devices add up, sets say who holds and who waits, counters are sorted."""
    desk = Desk()
    desk.load(1, name="m")
    loader = desk.start(source(2, "shape-b"))
    desk.reserve(loader.session, 300)
    desk.report(loader.session, 40)
    plain = snapshot(desk.books)
    assert plain["devices"] == {
        DEVICE: {"reserved": 300, "leased": 100, "idle": 0, "free": 600, "limit": 1000},
        OTHER_DEVICE: {"reserved": 0, "leased": 0, "idle": 0, "free": 1000, "limit": 1000},
    }
    first, second = plain["sets"]
    assert (first["names"], first["state"], first["leases"]) == (
        {"m": "1"},
        "sealed",
        [{"session": 1, "lease": "w"}],
    )
    assert (second["state"], second["writer"], second["waiting"], second["progress"]) == (
        "reserving",
        loader.session,
        1,
        {"stage": "copying", "done": 40, "total": 100},
    )
    assert list(plain["counters"]) == sorted(plain["counters"])
    assert wire.encode(wire.StatusReport({}, plain["devices"], plain["sets"], [], {}))
