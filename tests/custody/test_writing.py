"""Writing: room for a slab, sealing, twins, and a writer or a device that fails."""

from __future__ import annotations

from typing import Any

import pytest

from broker import wire
from broker.custody.actions import CreateSlab, FreeSlab, FreezeSlab, Reply
from broker.custody.states import State
from broker.errors import BadRequest, LoadFailed, OverBudget
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, Desk, source

# --- room -------------------------------------------------------------------------------------


def test_reserve_rounds_up_to_the_granularity() -> None:
    """A slab is a positive multiple of the device's granularity, also for no bytes at all."""
    desk = Desk()
    for nbytes, slab in ((0, 10), (1, 10), (10, 10), (11, 20)):
        loader = desk.start(source(nbytes, f"shape-{nbytes}"))
        assert desk.reserve(loader.session, nbytes) == [CreateSlab(loader.set, DEVICE, slab)]
    assert desk.free == 950


def test_over_budget_says_the_numbers() -> None:
    """What does not fit is refused with needed, free, limit and who holds the rest."""
    desk = Desk()
    engine = desk.engine()
    desk.books.introduce(engine, "pid 7 (vllm)")
    desk.load(1, engine=engine, name="held", nbytes=300)
    idle = desk.engine()
    desk.load(2, "blake3:b", idle, fingerprint="shape-b", nbytes=200)
    desk.end(idle)
    writing = desk.start(source(3, "shape-c"))
    desk.reserve(writing.session, 100)
    loader = desk.start(source(4, "shape-d"))
    with pytest.raises(OverBudget) as error:
        desk.reserve(loader.session, 601)
    assert error.value.sentence == (
        "checkpoint '/models/4' needs 610 B on device GPU-0: of a limit of 1000 B, 600 B are "
        "free or unused, 10 B too few; in use: set 1 (held): 300 B leased by pid 7 (vllm), set 3: "
        "100 B written by session 6; release, unpin or evict sets, or start the broker with a "
        "larger --memory-limit"
    )
    assert error.value.fields == {
        "requested": 610,
        "free": 600,
        "limit": 1000,
        "device": DEVICE,
        "held": [
            {"set": "set 1 (held)", "nbytes": 300, "why": "leased by pid 7 (vllm)"},
            {"set": "set 3", "nbytes": 100, "why": "written by session 6"},
        ],
    }
    assert desk.set(loader.set).state is State.CLAIMED
    assert desk.reserve(loader.session, 600)[0] == FreeSlab(2)


@pytest.mark.parametrize("busy", [False, True])
def test_over_budget_offers_nothing_that_cannot_help(*, busy: bool) -> None:
    """Nothing is in use, or the weights are above the limit alone: only a larger limit helps."""
    desk = Desk()
    if busy:
        desk.load(1, engine=desk.engine(), nbytes=100)
    loader = desk.start(source(2, "shape-b"))
    with pytest.raises(OverBudget) as error:
        desk.reserve(loader.session, 4096)
    sentence = error.value.sentence
    assert sentence.startswith("checkpoint '/models/2' needs 4.0 KiB on device GPU-0: of a limit ")
    assert sentence.endswith("; start the broker with a larger --memory-limit")
    assert ("in use: set 1: 100 B leased" in sentence) == busy
    assert not any(word in sentence for word in ("release", "unpin", "evict"))
    assert error.value.requested == 4100


@pytest.mark.parametrize("key", [{"name": "prod"}, {"checkpoint": "blake3:a"}], ids=str)
def test_over_budget_for_a_publication(key: dict[str, Any]) -> None:
    """What an engine publishes is called by its name, or else by its content."""
    desk = Desk()
    session = desk.engine()
    desk.claim(session, **key)
    (called,) = key.values()
    with pytest.raises(OverBudget, match=rf"^weight set '{called}' needs 2\.0 KiB on "):
        desk.reserve(session, 2000, claim="w")


def test_least_recently_used_sets_make_room() -> None:
    """Unleased sets go in the order of their last use, only as many as are needed."""
    desk = Desk()
    engine = desk.engine()
    for n in (1, 2, 3):
        desk.load(n, f"blake3:{n}", engine, fingerprint=f"shape-{n}", nbytes=300)
        desk.release(engine)
    desk.acquire(engine, from_=source(1, "shape-1"))
    desk.release(engine)
    loader = desk.start(source(4, "shape-4"))
    assert desk.reserve(loader.session, 150) == [FreeSlab(2), CreateSlab(loader.set, DEVICE, 150)]
    assert sorted(desk.books.sets) == [1, 3, loader.set]
    assert desk.books.counters["evictions"] == 1


def test_a_release_is_a_use() -> None:
    """What was given back last goes last, whenever it was granted."""
    desk = Desk()
    engine = desk.engine()
    for n in (1, 2):
        desk.load(n, f"blake3:{n}", engine, fingerprint=f"shape-{n}", nbytes=400)
        desk.acquire(engine, f"w{n}", from_=source(n, f"shape-{n}"))
        desk.release(engine)
    desk.release(engine, "w2")
    desk.release(engine, "w1")
    loader = desk.start(source(3, "shape-3"))
    assert desk.reserve(loader.session, 400)[0] == FreeSlab(2)


def test_leased_and_pinned_sets_never_make_room() -> None:
    """Neither a lease nor a pin gives way; a pinned set is named as in use."""
    desk = Desk()
    engine = desk.engine()
    desk.load(1, engine=engine, nbytes=400)
    desk.load(2, "blake3:b", fingerprint="shape-b", nbytes=400)
    desk.end(engine)
    desk.books.pin(0, wire.Pin("1"))
    loader = desk.start(source(3, "shape-c"))
    with pytest.raises(OverBudget, match=r"set 1: 400 B \(pinned\), set 2: 400 B leased"):
        desk.reserve(loader.session, 300)
    desk.books.unpin(0, wire.Unpin("1"))
    assert desk.reserve(loader.session, 300)[0] == FreeSlab(1)


def test_memory_of_another_device_does_not_help() -> None:
    """Each device has its own budget."""
    desk = Desk()
    loader = desk.start(source(1), device="GPU-1")
    desk.finish(loader, nbytes=900)
    assert desk.free == 1000
    other = desk.start(source(2, "shape-b"), device="GPU-1")
    with pytest.raises(OverBudget, match=r"110 B on device GPU-1: .* 100 B are free"):
        desk.reserve(other.session, 101)


# --- out of order -----------------------------------------------------------------------------


def test_steps_out_of_order() -> None:
    """Each step has its state; out of it the writer is told where the set is."""
    desk = Desk()
    loader = desk.start(source(1))
    with pytest.raises(BadRequest, match=r"^set 1 is claimed: there is nothing to seal$"):
        desk.seal(loader.session)
    desk.reserve(loader.session)
    for _ in range(2):
        with pytest.raises(BadRequest, match=r": it has its memory already$"):
            desk.reserve(loader.session)
        with pytest.raises(BadRequest, match=r": resolve comes before reserve$"):
            desk.resolve(loader.session, "blake3:a")
        desk.created(1)
    desk.seal(loader.session)
    with pytest.raises(BadRequest, match=r"^set 1 is sealing: there is nothing to seal$"):
        desk.seal(loader.session)


def test_a_claim_that_is_over() -> None:
    """After its end, and for other sessions, a claim does not exist."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.finish(desk.start(source(2, "shape-b")), "blake3:b")
    desk.abandon(loader.session, LoadFailed("no"))
    for session in (loader.session, desk.engine()):
        for step in (desk.reserve, desk.seal):
            with pytest.raises(BadRequest, match=r"^this session holds no claim 'load': it ended"):
                step(session)
        with pytest.raises(BadRequest, match=r"^this session holds no claim"):
            desk.report(session, 1)
        with pytest.raises(BadRequest, match=r"^this session holds no claim"):
            desk.abandon(session, LoadFailed("no"))


def test_negative_sizes_are_refused() -> None:
    """A set of less than no bytes reserves nothing."""
    desk = Desk()
    loader = desk.start(source(1))
    with pytest.raises(BadRequest, match=r"^reserve: nbytes and tensors must not be negative$"):
        desk.reserve(loader.session, -1)


def test_what_was_claimed_is_what_is_written() -> None:
    """A claim's dtype, quantisation and checkpoint bind its writer; what it left open does not."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m", checkpoint="blake3:a", dtype="bfloat16", quantization="fp8")
    for dtype, quantization in (("float16", "fp8"), ("bfloat16", "awq")):
        with pytest.raises(BadRequest, match=r"^set 1 was claimed as '\w+' and reserve says '\w+'"):
            desk.reserve(engine, 95, dtype, quantization, claim="c")
    desk.reserve(engine, 95, "bfloat16", claim="c")
    assert desk.set(1).key.quantization == "fp8"
    desk.created(1)
    with pytest.raises(BadRequest, match=r"^set 1 was claimed as blake3:a$"):
        desk.seal(engine, "blake3:b", claim="c")


# --- twins ------------------------------------------------------------------------------------


def test_sealing_what_is_resident_already() -> None:
    """A second load of the same bytes is dropped at its seal; its engine gets the first set."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(2, "shape-other-header-order"))
    ticket = desk.ticket
    desk.reserve(loader.session)
    desk.created(loader.set)
    key = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")
    assert desk.seal(loader.session, "blake3:a", 2) == [
        FreeSlab(2),
        Reply(ticket + 2, wire.Sealed(1, "blake3:a", None, resident=True)),
        Reply(ticket, wire.Granted("w", 1, key, None, 100, 3, "hashed")),
    ]
    assert desk.free == 900
    assert desk.acquire(desk.engine(), from_=source(2))[0] == Reply(
        desk.ticket, wire.Granted("w", 1, key, None, 100, 3, "resident")
    )


def test_two_writers_of_the_same_bytes_seal_at_once() -> None:
    """The slab that is frozen first stays; the other is freed and its writer told so."""
    desk = Desk()
    loaders = [desk.start(source(n, f"shape-{n}")) for n in (1, 2)]
    for loader in loaders:
        desk.reserve(loader.session)
        desk.created(loader.set)
        assert desk.seal(loader.session, "blake3:a") == [FreezeSlab(loader.set, DEVICE)]
    desk.frozen(2)
    key = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")
    assert desk.frozen(1) == [
        FreeSlab(1),
        Reply(4, wire.Sealed(2, "blake3:a", None, resident=True)),
        Reply(1, wire.Granted("w", 2, key, None, 100, 3, "hashed")),
    ]


def test_a_draining_twin_is_sealed_again() -> None:
    """A set that somebody has just written anew is wanted: its resident twin stays."""
    desk = Desk()
    desk.load(1)
    desk.evict(1)
    desk.finish(desk.start(source(2, "shape-other")))
    assert desk.set(1).state is State.SEALED
    assert list(desk.books.sets) == [1]


def test_an_engine_set_is_no_twin_of_another_dtype() -> None:
    """Equal checkpoint and another dtype, or bytes no loader has digested: two sets."""
    desk = Desk()
    desk.load(1)
    engine = desk.engine()
    half = desk.publish(engine, checkpoint="blake3:a", name="m", dtype="float16")
    assert sorted(desk.books.sets) == [1, half]
    theirs = desk.publish(engine, "q", checkpoint="blake3:b", name="n")
    loader = desk.start(source(2, "shape-b"))
    desk.finish(loader, "blake3:b")
    assert sorted(desk.books.sets) == [1, half, theirs, loader.set]


def test_an_engine_that_finds_its_key_resident_names_it() -> None:
    """A publisher's name goes to the set that holds the bytes already."""
    desk = Desk()
    first = desk.publish(desk.engine(), checkpoint="blake3:a", name="m")
    second = desk.engine()
    desk.claim(second, "c", name="n")
    desk.reserve(second, claim="c")
    desk.created(2)
    assert desk.seal(second, "blake3:a", claim="c") == [
        FreeSlab(2),
        Reply(desk.ticket, wire.Sealed(first, "blake3:a", "1", resident=True)),
    ]
    assert desk.set(first).names == ["m", "n"]


def test_files_named_by_an_engine_prove_nothing() -> None:
    """Only what a loader has read makes later requests for the same files a hit."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m")
    desk.reserve(engine, claim="c")
    desk.created(1)
    desk.seal(engine, "blake3:evil", 1, claim="c")
    desk.frozen(1)
    assert desk.start(source(1)).set == 2


def test_keep_turns_the_claim_into_a_lease() -> None:
    """With `keep` the writer has its lease in the answer to `seal`, before anybody else."""
    desk = Desk()
    engine = desk.engine()
    desk.claim(engine, "c", name="m", checkpoint="blake3:a")
    desk.reserve(engine, claim="c")
    desk.created(1)
    ticket = desk._next()
    desk.books.seal(engine, ticket, wire.Seal("c", "blake3:a", keep=True))
    key = WeightKey(DEVICE, "m", "blake3:a", "bfloat16")
    lease = wire.Granted("c", 1, key, "1", 100, 3, "published")
    assert desk.frozen(1) == [
        Reply(ticket, wire.Sealed(1, "blake3:a", "1", resident=False, granted=lease))
    ]
    assert desk.books.leases() == [(1, engine, "c")]
