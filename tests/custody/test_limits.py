"""Limits of the books, and requests that come again after a conversation was lost."""

from __future__ import annotations

import pytest

from broker import wire
from broker.custody import Books, Budget
from broker.custody.actions import FreeSlab, Reply
from broker.custody.ledger import MAX_NUMBERED
from broker.errors import BadRequest, Busy, LoadFailed
from broker.limits import Limits
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, GRANULARITY, LIMIT, Desk, Refused, source


def limited(**limits: int) -> Desk:
    desk = Desk()
    desk.books = Books({DEVICE: Budget(LIMIT, GRANULARITY)}, "epoch", limits=Limits(**limits))
    return desk


def test_a_session_writes_a_bounded_number_of_sets() -> None:
    """Claims and loads that one session has caused count together; another session is free."""
    desk = limited(claims=2)
    engine = desk.engine()
    desk.claim(engine, "a", name="a")
    desk.acquire(engine, "b", from_=source(1))
    with pytest.raises(Busy, match=r"^2 weight sets are being written by this session already;"):
        desk.claim(engine, "c", name="c")
    with pytest.raises(Busy) as error:
        desk.acquire(engine, "d", from_=source(2, "shape-b"))
    assert (error.value.limit, error.value.value) == ("claims", 2)
    desk.claim(desk.engine(), name="e")
    desk.cancel(engine, "a")
    desk.claim(engine, "c", name="c")


def test_all_sessions_together_write_a_bounded_number_of_sets() -> None:
    """Past the limit for all, nobody starts another; waiting for one under way is no start."""
    desk = limited(all_claims=1)
    desk.start(source(1))
    with pytest.raises(Busy, match=r"^1 weight sets are being written or loaded already;"):
        desk.claim(desk.engine(), name="m")
    assert desk.acquire(desk.engine(), from_=source(1)) == []


def test_names_are_bounded() -> None:
    """A new name past the limit is refused before anything is written or granted."""
    desk = limited(names=1, set_names=1)
    desk.load(1, name="m")
    with pytest.raises(Busy, match=r"^'n' cannot become a name of weights: 1 names are on the"):
        desk.claim(desk.engine(), name="n")
    with pytest.raises(Busy) as error:
        desk.acquire(desk.engine(), from_=source(1), name="n")
    assert error.value.limit == "names"
    desk.acquire(desk.engine(), from_=source(1), name="m")


def test_tensors_are_bounded() -> None:
    """A manifest of more tensors than a set may have reserves nothing."""
    desk = limited(tensors=2)
    loader = desk.start(source(1))
    with pytest.raises(BadRequest, match=r"^reserve: 3 tensors are more than a weight set may"):
        desk.reserve(loader.session)


def test_numbers_of_lines_that_are_gone_do_not_fill_the_memory() -> None:
    """Whatever names and labels come and go, a bounded number of them is remembered."""
    desk = Desk()
    desk.publish(desk.engine(), name="kept", generation="7")
    for number in range(MAX_NUMBERED):
        desk.books._numbers[(f"gone-{number}",)] = 1
    for name, label in (("m", None), ("n", "3")):
        desk.publish(desk.engine(), name=name, generation=label)
        assert len(desk.books._numbers) <= MAX_NUMBERED + len(desk.books.lines())
    desk.publish(desk.engine(), name="kept", checkpoint="blake3:b")
    assert list(desk.set(3 + 1).generations.values()) == ["8"]


def test_a_writer_that_takes_too_long_is_as_good_as_dead() -> None:
    """Its memory is freed, a willing waiter writes instead, and its own steps say why."""
    desk = limited(seal_seconds=60)
    writer, heir = desk.engine(), desk.engine()
    desk.claim(writer, "c", name="m")
    desk.claim(heir, "h", name="m")
    waiting = desk.ticket
    desk.reserve(writer, claim="c")
    desk.created(1)
    assert desk.call(lambda: desk.books.writer_stalled(1)) == [
        FreeSlab(1),
        Reply(waiting, wire.Claimed("h")),
    ]
    with pytest.raises(LoadFailed, match=r"claim 'c' has ended: session 1 reserved memory for"):
        desk.seal(writer, claim="c")
    assert desk.call(lambda: desk.books.writer_stalled(2)) == []


def test_a_loader_that_takes_too_long_is_stopped() -> None:
    """Those who wait are told; what is being sealed is not disturbed."""
    desk = limited(seal_seconds=60)
    loader = desk.start(source(1))
    desk.reserve(loader.session)
    stalled = desk.call(lambda: desk.books.writer_stalled(1))
    refusals = [action for action in stalled if isinstance(action, Refused)]
    assert [(r.ticket, r.kind) for r in refusals] == [(2, LoadFailed), (1, LoadFailed)]
    sealing = desk.start(source(1))
    desk.reserve(sealing.session)
    desk.created(sealing.set)
    desk.seal(sealing.session)
    assert desk.call(lambda: desk.books.writer_stalled(sealing.set)) == []


# --- asked again ------------------------------------------------------------------------------


def test_what_was_answered_into_a_lost_conversation_is_answered_again() -> None:
    """A lease, a claim and a reservation are what they were; nothing is granted twice."""
    desk = Desk()
    engine = desk.engine()
    desk.load(1, engine=engine)
    desk.claim(engine, "c", name="m")
    desk.reserve(engine, claim="c")
    desk.created(2)
    desk.books.conversation_lost(engine)
    key = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")
    again = wire.Granted("w", 1, key, None, 100, 3, "resident")
    assert desk.acquire(engine, from_=source(1)) == [Reply(desk.ticket, again)]
    assert desk.claim(engine, "c", name="m") == [Reply(desk.ticket, wire.Claimed("c"))]
    assert desk.reserve(engine, claim="c") == [Reply(desk.ticket, wire.Reserved("c", 100))]
    assert desk.books.leases() == [(1, engine, "w")]
    with pytest.raises(BadRequest, match=r"^the lease id 'c' is in use in this session$"):
        desk.claim(engine, "c", name="n")
