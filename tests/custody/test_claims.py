"""Claims and shipped loaders: one builds, the others wait and map."""

from __future__ import annotations

from typing import Any

import pytest

from broker import wire
from broker.custody.actions import Action, FreeSlab, Reply, StartShipped, StopLoader
from broker.errors import BadRequest, LoadFailed
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, KILLED, Desk, Refused, source


def ship(desk: Desk, session: int, lease: str = "w", **key: Any) -> list[Action | Refused]:
    request = wire.Load(lease, WeightKey(DEVICE, **key), "build", 60.0)
    return desk.call(lambda: desk.books.load(session, desk._next(), request))


def test_an_absent_key_is_claimed() -> None:
    """The first to claim gets the right to write."""
    desk = Desk()
    assert desk.claim(desk.engine(), "c", name="m") == [Reply(1, wire.Claimed("c"))]
    assert desk.free == 1000


@pytest.mark.parametrize(
    "key",
    [
        {"name": "m"},
        {"name": "m", "dtype": "bfloat16"},
        {"name": "m", "checkpoint": "blake3:a"},
        {"checkpoint": "blake3:a", "dtype": "bfloat16"},
        {"name": "m", "layout": {"tp_rank": 0, "tp_size": 2}, "format": "vllm"},
    ],
)
def test_eight_engines_cause_one_build(key: dict[str, Any]) -> None:
    """All who claim the same key wait for the first, before and after its seal."""
    desk = Desk()
    engines = [desk.engine() for _ in range(8)]
    actions = [desk.claim(engine, **key) for engine in engines]
    assert actions == [[Reply(1, wire.Claimed("w"))]] + [[]] * 7
    desk.reserve(engines[0], claim="w")
    desk.created(1)
    late = desk.engine()
    assert desk.claim(late, **key) == []
    desk.seal(engines[0], key.get("checkpoint", "blake3:own"), claim="w")
    served = [a.body for a in desk.frozen(1)[1:] if isinstance(a, Reply)]
    assert [type(body) for body in served] == [wire.Granted] * 8
    (again,) = desk.claim(desk.engine(), **key)
    assert isinstance(again, Reply)
    assert isinstance(again.body, wire.Granted)
    assert (again.body.set, again.body.how) == (1, "resident")


@pytest.mark.parametrize(
    "other",
    [
        {"name": "n"},
        {"name": "m", "dtype": "float16"},
        {"name": "m", "layout": {"tp_rank": 1, "tp_size": 2}},
        {"name": "m", "format": "vllm"},
        {"name": "m", "quantization": "fp8"},
        {"name": "m", "device": "GPU-1"},
        {"checkpoint": "blake3:a"},
    ],
)
def test_another_key_is_another_set(other: dict[str, Any]) -> None:
    """Whatever differs in the key, dtype and layout too, is written apart."""
    desk = Desk()
    desk.claim(desk.engine(), "c", name="m", dtype="bfloat16")
    assert desk.claim(desk.engine(), "d", **other) == [Reply(2, wire.Claimed("d"))]


def test_a_claim_finds_a_loaded_checkpoint() -> None:
    """What a loader has sealed is there for a claim, by its identity or by its name."""
    desk = Desk()
    desk.load(1, name="m")
    keys: list[dict[str, Any]] = [
        {"name": "m"},
        {"checkpoint": "blake3:a"},
        {"name": "n", "checkpoint": "blake3:a", "dtype": "bfloat16"},
    ]
    for key in keys:
        (action,) = desk.claim(desk.engine(), **key)
        assert isinstance(action, Reply)
        assert isinstance(action.body, wire.Granted)
        assert action.body.set == 1
    assert desk.set(1).names == ["m", "n"]


def test_a_claim_waits_for_the_load_of_its_name() -> None:
    """A name that is being loaded is not built beside it."""
    desk = Desk()
    loader = desk.start(source(1), name="m")
    assert desk.claim(desk.engine(), name="m") == []
    assert len(desk.finish(loader)) == 3


def test_a_claim_needs_something_to_go_by() -> None:
    """Neither name nor identity, or a generation of no name: refused."""
    desk = Desk()
    with pytest.raises(
        BadRequest, match=r"^claim needs a name or a checkpoint's identity in its key$"
    ):
        desk.claim(desk.engine())
    with pytest.raises(BadRequest, match=r"^generation '1' of what\?"):
        desk.claim(desk.engine(), checkpoint="blake3:a", generation="1")
    with pytest.raises(BadRequest, match=r"^this broker does not serve device 'GPU-9'"):
        desk.claim(desk.engine(), device="GPU-9", name="m")


def test_a_generation_that_is_being_written_is_waited_for() -> None:
    """A demanded generation waits for its own writer, not for another generation's."""
    desk = Desk()
    desk.claim(desk.engine(), "c", name="m", generation="7")
    assert desk.claim(desk.engine(), name="m", generation="7") == []
    assert desk.claim(desk.engine(), name="m") == []
    assert desk.claim(desk.engine(), name="m", generation="8") == [
        Reply(desk.ticket, wire.Claimed("w"))
    ]
    assert desk.acquire(desk.engine(), name="m", generation="8") == []
    assert list(desk.set(2).waiters) == [desk.ticket]


def test_a_generation_of_no_label_yet_is_not_the_demanded_one() -> None:
    """A claim that gives a label writes its own generation beside one without a label."""
    desk = Desk()
    desk.claim(desk.engine(), "c", name="m")
    assert desk.claim(desk.engine(), "d", name="m", generation="7") == [Reply(2, wire.Claimed("d"))]


def test_a_dtype_left_open_finds_any() -> None:
    """A claim without dtype means the name, in whatever dtype it is there or being written."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m", dtype="bfloat16")
    assert desk.claim(desk.engine(), name="m") == []
    desk.reserve(engine, claim="c")
    desk.created(1)
    desk.seal(engine, claim="c")
    assert len(desk.frozen(1)) == 2
    (action,) = desk.claim(desk.engine(), name="m")
    assert isinstance(action, Reply)
    assert isinstance(action.body, wire.Granted)


def test_a_waiter_of_another_dtype_does_not_end_a_build() -> None:
    """An engine that waits for another dtype is refused; the publisher goes on."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.acquire(desk.engine(), name="m", dtype="float16")
    refusal = desk.reserve(engine, dtype="bfloat16", claim="c")[-1]
    assert isinstance(refusal, Refused)
    assert desk.created(1) == [Reply(3, wire.Reserved("c", 100))]


# --- shipped loaders --------------------------------------------------------------------------


def test_shipped_code_runs_once_for_all() -> None:
    """The first request starts a loader with its code; the others wait for it, or for a claim."""
    desk = Desk()
    engine = desk.engine()
    assert ship(desk, engine, name="m") == [
        StartShipped(1, 2, "load", 1, DEVICE, "build", 60.0),
    ]
    assert ship(desk, desk.engine(), name="m") == []
    assert desk.claim(desk.engine(), name="m") == []
    desk.reserve(2)
    desk.created(1)
    desk.seal(2, "")
    sealed, *served = desk.frozen(1)
    assert isinstance(sealed, Reply)
    assert [
        (action.ticket, action.body.how)
        for action in served
        if isinstance(action, Reply) and isinstance(action.body, wire.Granted)
    ] == [(1, "loaded"), (2, "shared"), (3, "shared")]
    assert desk.books.counters["loads_finished"] == 1


def test_shipped_code_fails() -> None:
    """All who shipped the same get the cause; a claim that waited builds it itself."""
    desk = Desk()
    ship(desk, desk.engine(), name="m")
    ship(desk, desk.engine(), name="m")
    desk.reserve(2)
    assert desk.end(2) == [
        FreeSlab(1),
        Refused(1, LoadFailed, KILLED.sentence),
        Refused(2, LoadFailed, KILLED.sentence),
    ]
    ship(desk, desk.engine(), name="m")
    assert desk.books.counters["loads_failed"] == 1


def test_shipped_code_whose_set_is_evicted_is_stopped() -> None:
    """Nobody wants it any more: its process is ended."""
    desk = Desk()
    ship(desk, desk.engine(), name="m")
    assert StopLoader(2) in desk.evict("m")


def test_shipped_code_needs_a_key() -> None:
    """Without a name or identity nobody could ever find what the code makes."""
    desk = Desk()
    with pytest.raises(
        BadRequest, match=r"^load needs a name or a checkpoint's identity in its key$"
    ):
        ship(desk, desk.engine())
