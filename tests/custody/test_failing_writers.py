"""A writer or a device that fails: who is told, what is freed, who takes the claim over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker import wire
from broker.custody.actions import Action, CreateSlab, FreeSlab, Reply, StopLoader
from broker.custody.states import State
from broker.errors import (
    BadRequest,
    Cancelled,
    InternalError,
    LoadFailed,
    OverBudget,
    StaleEpoch,
)
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, KILLED, Desk, Refused, source

# --- failures ---------------------------------------------------------------------------------


def test_abandoned_with_a_reason() -> None:
    """Everybody who waits gets the writer's reason with its fields."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(1))
    desk.reserve(loader.session)
    desk.created(1)
    error = LoadFailed("model.safetensors is truncated", file="model.safetensors")
    request = wire.Abandon("load", error.status, error.to_payload().decode())
    actions = desk.books.abandon(loader.session, 9, request)
    told = [a.body for a in actions if isinstance(a, Reply) and a.ticket in (1, 2)]
    assert [type(body) for body in told] == [LoadFailed, LoadFailed]
    assert all(isinstance(b, LoadFailed) and b.file == "model.safetensors" for b in told)
    assert FreeSlab(1) in actions
    assert StopLoader(loader.session) not in actions


@pytest.mark.parametrize("by_cancel", [False, True])
def test_giving_up_answers_the_step_under_way(by_cancel: bool) -> None:
    """A writer that abandons or cancels while `reserve` is under way gets that answered too."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.reserve(engine, claim="c")
    reserve = desk.ticket
    if by_cancel:
        actions = desk.cancel(engine, "c")
        cause = Refused(reserve, Cancelled, "the request was withdrawn by the engine that made it")
    else:
        actions = desk.abandon(engine, LoadFailed("changed my mind"), "c")
        cause = Refused(reserve, LoadFailed, "changed my mind")
    assert actions == [cause, FreeSlab(1), Reply(desk.ticket, wire.Done())]
    assert desk.created(1) == []
    assert desk.free == 1000


def test_cancelled_while_it_is_being_sealed() -> None:
    """Once `seal` is under way the device decides: the set is sealed, without a lease."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.reserve(engine, claim="c")
    desk.created(1)
    desk.seal(engine, "", claim="c")
    seal = desk.ticket
    sentence = "the request was withdrawn by the engine that made it"
    assert desk.cancel(engine, "c") == [
        Refused(seal, Cancelled, sentence),
        Reply(desk.ticket, wire.Done()),
    ]
    assert desk.frozen(1) == []
    assert desk.set(1).state is State.SEALED


def test_killed_while_it_is_being_sealed() -> None:
    """A loader that dies after `seal` has done its work: its engine gets the lease."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.reserve(loader.session)
    desk.created(1)
    desk.seal(loader.session, "blake3:a", 1)
    assert desk.end(loader.session) == []
    key = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")
    assert desk.frozen(1) == [Reply(1, wire.Granted("w", 1, key, None, 100, 3, "loaded"))]


def test_the_slab_cannot_be_frozen() -> None:
    """A slab that cannot be made immutable is discarded, and all are told."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.reserve(loader.session)
    desk.created(1)
    desk.seal(loader.session)
    assert desk.failed(1, InternalError("the driver failed")) == [
        Refused(4 - 1, InternalError, "the driver failed"),
        StopLoader(loader.session),
        FreeSlab(1),
        Refused(1, InternalError, "the driver failed"),
    ]


@pytest.mark.parametrize("answer", ["created", "frozen", "failed"])
def test_the_device_answers_for_a_set_that_has_ended(answer: str) -> None:
    """Late answers of the device change nothing: the set's `FreeSlab` is on its way."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.reserve(loader.session)
    desk.end(loader.session)
    if answer == "failed":
        assert desk.failed(1, InternalError("late")) == []
    else:
        assert getattr(desk, answer)(1) == []
    assert desk.free == 1000


# --- inheritance ------------------------------------------------------------------------------


def test_a_willing_waiter_inherits_the_claim() -> None:
    """The first willing waiter writes anew, on a fresh slab, under its own key and claim."""
    desk = Desk()
    first, unwilling, heir, second = (desk.engine() for _ in range(4))
    desk.claim(first, "c", name="m", checkpoint="blake3:a")
    desk.claim(unwilling, "u", willing=False, name="m", checkpoint="blake3:a")
    desk.claim(heir, "h", name="n", checkpoint="blake3:a")
    desk.claim(second, "s", name="m", checkpoint="blake3:a")
    desk.reserve(first, claim="c")
    assert desk.end(first) == [FreeSlab(1), Reply(3, wire.Claimed("h"))]
    assert desk.free == 1000
    assert desk.books.counters["claims_inherited"] == 1
    assert desk.reserve(heir, claim="h") == [CreateSlab(2, DEVICE, 100)]
    assert desk.created(1) == []
    assert desk.set(2).state is State.RESERVING
    desk.created(2)
    desk.seal(heir, "blake3:a", claim="h")
    sealed, *served = desk.frozen(2)
    assert sealed == Reply(desk.ticket, wire.Sealed(2, "blake3:a", "1", resident=False))
    assert [action.ticket for action in served if isinstance(action, Reply)] == [2, 4]
    assert desk.set(2).names == ["m", "n"]


def test_nobody_inherits_an_eviction_or_a_broken_device() -> None:
    """Evicted or without memory: all who wait are told, willing or not."""
    desk = Desk()

    def fails(set_id: int) -> list[Action | Refused]:
        return desk.failed(set_id, OverBudget("no memory"))

    causes: list[Callable[[int], list[Action | Refused]]] = [desk.evict, fails]
    for fail in causes:
        writer, heir = desk.engine(), desk.engine()
        desk.claim(writer, "c", name="m")
        desk.claim(heir, "h", name="m")
        waiting = desk.ticket
        desk.reserve(writer, claim="c")
        actions = fail(max(desk.books.sets))
        assert [a.kind for a in actions if isinstance(a, Refused) and a.ticket == waiting]
        assert not desk.books.sets


def test_a_claim_inherits_from_a_loader() -> None:
    """A claim that waited for a load takes over; those who asked for the files are told why."""
    desk = Desk()
    loader = desk.start(source(1), name="m")
    heir = desk.engine()
    assert desk.claim(heir, "h", name="m") == []
    desk.acquire(desk.engine(), name="m")
    waiting = desk.ticket
    assert desk.end(loader.session) == [
        Reply(2, wire.Claimed("h")),
        Refused(1, LoadFailed, KILLED.sentence),
    ]
    assert desk.start(source(1)).set == 3
    desk.reserve(heir, claim="h")
    assert desk.end(heir) == [
        FreeSlab(2),
        Refused(waiting, LoadFailed, KILLED.sentence),
    ]


def test_an_heir_that_writes_another_dtype() -> None:
    """Who claimed one dtype does not get the one that an heir of the open key has chosen."""
    desk = Desk()
    first, heir, other = desk.engine(), desk.engine(), desk.engine()
    desk.claim(first, "c", name="m", dtype="bfloat16")
    desk.claim(heir, "h", name="m")
    desk.claim(other, "o", name="m", dtype="bfloat16", willing=False)
    waiting = desk.ticket
    desk.end(first)
    refusal = desk.reserve(heir, dtype="float16", claim="h")[-1]
    assert isinstance(refusal, Refused)
    assert refusal.ticket == waiting
    assert "dtype wanted 'bfloat16', resident 'float16'" in refusal.sentence


def test_an_heir_that_writes_something_else() -> None:
    """Who waited for one checkpoint does not get another from the heir."""
    desk = Desk()
    first, heir, other = desk.engine(), desk.engine(), desk.engine()
    desk.claim(first, "c", name="m", checkpoint="blake3:a", dtype="bfloat16")
    desk.claim(heir, "h", name="m", dtype="bfloat16")
    desk.acquire(other, checkpoint="blake3:a")
    waiting = desk.ticket
    desk.end(first)
    desk.reserve(heir, claim="h")
    desk.created(2)
    desk.seal(heir, "blake3:b", claim="h")
    refusal = desk.frozen(2)[-1]
    assert isinstance(refusal, Refused)
    assert refusal.ticket == waiting
    assert "checkpoint wanted 'blake3:a', resident 'blake3:b'" in refusal.sentence


def test_a_writer_whose_set_was_evicted_is_told_so() -> None:
    """Also one that was between two steps when it happened, and comes back with the next."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.reserve(engine, claim="c")
    desk.created(1)
    desk.call(lambda: desk.books.evict(9, wire.Evict("1")))
    with pytest.raises(Cancelled, match=r"^the claim 'c' has ended: weight set 1 was evicted"):
        desk.seal(engine, claim="c")


def test_a_writer_whose_server_was_replaced_is_told_so() -> None:
    """What was not sealed is not published, and the error says what to do."""
    desk = Desk()
    desk.books.restore([], [7], [])
    with pytest.raises(StaleEpoch, match=r"server was replaced, .* publish again$"):
        desk.reserve(7, claim="c")
    with pytest.raises(StaleEpoch, match=r"server was replaced"):
        desk.books.attachment(7, "c")
    with pytest.raises(BadRequest, match=r"holds no claim 'c': it ended or never was"):
        desk.reserve(desk.engine(), claim="c")
