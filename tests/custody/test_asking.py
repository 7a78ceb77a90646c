"""Asking for a checkpoint: one load for many, hits, and loads of perhaps equal bytes."""

from __future__ import annotations

import pytest

from broker import wire
from broker.custody.actions import (
    CreateSlab,
    FreeSlab,
    FreezeSlab,
    Reply,
    StartLoader,
    StopLoader,
    Tell,
)
from broker.custody.states import State
from broker.errors import BadRequest, LoadFailed, NotFound
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, KILLED, OTHER_DEVICE, Desk, Refused, source

KEY_A = WeightKey(DEVICE, checkpoint="blake3:a", dtype="bfloat16")


def granted(lease: str, set_id: int, how: str, key: WeightKey = KEY_A) -> wire.Granted:
    return wire.Granted(lease, set_id, key, None, 100, 3, how)


def test_a_checkpoint_from_first_word_to_lease() -> None:
    """An absent checkpoint starts a loader; each step answers its writer, the last the engine."""
    desk = Desk()
    engine = desk.engine()
    assert desk.acquire(engine, from_=source(1)) == [
        StartLoader(1, 2, "load", 1, source(1), hash_first=False)
    ]
    assert desk.reserve(2, nbytes=95) == [CreateSlab(1, DEVICE, 100)]
    assert desk.created(1) == [Reply(2, wire.Reserved("load", 100))]
    assert desk.seal(2, "blake3:a", 1) == [FreezeSlab(1, DEVICE)]
    assert desk.frozen(1) == [
        Reply(3, wire.Sealed(1, "blake3:a", None, resident=False)),
        Reply(1, granted("w", 1, "loaded")),
    ]
    assert desk.end(2) == []
    assert desk.set(1).state is State.SEALED
    assert desk.free == 900


def test_absent_without_a_source_is_not_found() -> None:
    """A name that nobody has loaded is refused with the names that are resident."""
    desk = Desk()
    desk.load(1, name="llama")
    desk.load(2, "blake3:b", fingerprint="shape-b", device=OTHER_DEVICE, name="elsewhere")
    with pytest.raises(
        NotFound, match=r"^'qwen' is not resident on device GPU-0; resident names: llama$"
    ) as error:
        desk.acquire(desk.engine(), name="qwen")
    assert error.value.fields == {"names": ["llama"]}


def test_not_found_when_nothing_is_named() -> None:
    """With no named set at all the sentence says so, and names generation and identity."""
    desk = Desk()
    with pytest.raises(
        NotFound,
        match=r"^'m', generation '7', is not resident on device GPU-0; no named set is resident$",
    ):
        desk.acquire(desk.engine(), name="m", generation="7")
    with pytest.raises(NotFound, match=r"^blake3:x is not resident on device GPU-0; "):
        desk.acquire(desk.engine(), checkpoint="blake3:x")


def test_sixteen_engines_cause_one_load() -> None:
    """All who ask for the same files wait for one loader and get one set."""
    desk = Desk()
    engines = [desk.engine() for _ in range(16)]
    actions = [desk.acquire(engine, from_=source(1)) for engine in engines]
    loader = actions[0][0]
    assert isinstance(loader, StartLoader)
    assert actions[1:] == [[]] * 15
    served = desk.finish(loader)
    assert served[1:] == [
        Reply(n + 1, granted("w", 1, "loaded" if n == 0 else "shared")) for n in range(16)
    ]
    assert desk.books.counters["loads_started"] == 1
    assert desk.free == 900


def test_the_same_files_again_are_a_hit() -> None:
    """Equal stamps are served at once from the resident set."""
    desk = Desk()
    desk.load(1)
    assert desk.acquire(desk.engine(), from_=source(1)) == [
        Reply(desk.ticket, granted("w", 1, "resident"))
    ]


def test_the_same_files_on_another_device_are_loaded_there() -> None:
    """A set is in one device's memory; another device needs its own."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(1), device=OTHER_DEVICE)
    assert not loader.hash_first
    assert desk.finish(loader)[1] == Reply(
        desk.ticket - 2,
        granted("w", loader.set, "loaded", WeightKey(OTHER_DEVICE, "", "blake3:a", "bfloat16")),
    )


def test_another_dtype_of_the_same_files_is_a_set_of_its_own() -> None:
    """Files to be converted are neither served from the set as stored, nor hashed first."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(1, dtype="float16"))
    assert not loader.hash_first
    assert desk.acquire(desk.engine(), from_=source(1, dtype="float16")) == []
    other = desk.start(source(1, dtype="float32"))
    desk.finish(loader, "blake3:half", dtype="float16")
    desk.finish(other, "blake3:single", dtype="float32")
    for dtype, set_id in ((None, 1), ("float16", loader.set), ("float32", other.set)):
        (reply,) = desk.acquire(desk.engine(), from_=source(1, dtype=dtype))
        assert isinstance(reply, Reply)
        assert isinstance(reply.body, wire.Granted)
        assert (reply.body.set, reply.body.how) == (set_id, "resident")


def test_converted_weights_that_are_stored_elsewhere_are_shared() -> None:
    """Equal bytes are one set, and each of the two ways to it is a hit from then on."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(2, "shape-b", dtype="bfloat16"))
    desk.finish(loader, "blake3:a")
    assert list(desk.books.sets) == [1]
    for asked in (source(1), source(2, "shape-b", dtype="bfloat16")):
        assert desk.acquire(desk.engine(), from_=asked) == [
            Reply(desk.ticket, granted("w", 1, "resident"))
        ]
    assert isinstance(desk.acquire(desk.engine(), from_=source(2, "shape-b"))[0], StartLoader)


def test_equal_headers_are_hashed_before_they_are_loaded() -> None:
    """Files with a resident set's fingerprint may have its bytes: read them before writing."""
    desk = Desk()
    desk.load(1)
    assert desk.start(source(2)).hash_first
    assert not desk.start(source(3, "shape-b")).hash_first


def test_a_copy_is_served_from_the_resident_set() -> None:
    """A load that finds its bytes resident ends there; its files are a hit from then on."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(2))
    ticket = desk.ticket
    assert desk.resolve(loader.session, "blake3:a", 2) == [
        Reply(ticket, granted("w", 1, "hashed")),
        Reply(ticket + 1, wire.Resolved(resident=True)),
    ]
    assert desk.end(loader.session) == []
    assert list(desk.books.sets) == [1]
    assert desk.free == 900
    assert desk.acquire(desk.engine(), from_=source(2)) == [
        Reply(desk.ticket, granted("w", 1, "resident"))
    ]


def test_files_belong_to_the_set_that_was_read_from_them_last() -> None:
    """Equal stamps that a later load has seen too are a hit on the later set, and only there."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(2, "shape-b"))
    desk.reserve(loader.session)
    desk.created(2)
    desk.seal(loader.session, "blake3:b", 1)
    desk.frozen(2)
    (action,) = desk.acquire(desk.engine(), from_=source(1))
    assert isinstance(action, Reply)
    assert isinstance(action.body, wire.Granted)
    assert action.body.set == 2
    desk.evict(1)
    desk.end(1)
    assert len(desk.acquire(desk.engine(), from_=source(1))) == 1


def test_a_fine_tune_of_equal_headers_is_loaded() -> None:
    """Equal headers with other bytes are another set."""
    desk = Desk()
    desk.load(1)
    loader = desk.start(source(2))
    ticket = desk.ticket
    assert desk.resolve(loader.session, "blake3:b", 2) == [
        Reply(ticket + 1, wire.Resolved(resident=False))
    ]
    key = WeightKey(DEVICE, checkpoint="blake3:b", dtype="bfloat16")
    assert desk.finish(loader, "blake3:b")[1] == Reply(ticket, granted("w", 2, "loaded", key))


def test_a_copy_asked_for_during_the_load_is_hashed_after_it() -> None:
    """Other files of equal headers wait for the load under way, then are hashed, not loaded."""
    desk = Desk()
    first = desk.start(source(1))
    follower = desk.engine()
    assert desk.acquire(follower, from_=source(2)) == []
    ticket = desk.ticket
    actions = desk.finish(first)
    second = StartLoader(2, desk.books.sessions[4].id, "load", ticket, source(2), hash_first=True)
    assert actions[-1] == second
    assert Reply(ticket, granted("w", 2, "hashed")) not in actions
    assert desk.resolve(4, "blake3:a", 2)[0] == Reply(ticket, granted("w", 1, "hashed"))
    assert list(desk.books.sets) == [1]


def test_followers_of_a_failed_load_take_their_turn() -> None:
    """When the load under way fails, its own engine is told; a follower's files are loaded."""
    desk = Desk()
    first = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(2))
    cause = LoadFailed("the file is truncated")
    assert desk.abandon(first.session, cause) == [
        Refused(1, LoadFailed, "the file is truncated"),
        StartLoader(2, 4, "load", 2, source(2), hash_first=False),
        Reply(3, wire.Done()),
    ]


def test_followers_of_a_hit_by_content_are_not_lost() -> None:
    """A load that turns out to be resident passes those who followed it on to their own."""
    desk = Desk()
    desk.load(1)
    second = desk.start(source(2))
    desk.acquire(desk.engine(), from_=source(3))
    ticket = desk.ticket
    actions = desk.resolve(second.session, "blake3:a", 2)
    (third,) = (action for action in actions if isinstance(action, StartLoader))
    assert (third.ticket, third.source, third.hash_first) == (ticket, source(3), True)
    assert Reply(ticket, granted("w", 1, "hashed")) in desk.resolve(third.session, "blake3:a", 3)


def test_several_followers_are_hashed_one_after_the_other() -> None:
    """The first follower loads, the others follow it; nobody is left over at the end."""
    desk = Desk()
    loader = desk.start(source(1))
    tickets = []
    for inode in (2, 3, 4):
        assert desk.acquire(desk.engine(), from_=source(inode)) == []
        tickets.append(desk.ticket)
    actions = desk.finish(loader)
    for ticket, inode in zip(tickets, (2, 3, 4), strict=True):
        (loader,) = (action for action in actions if isinstance(action, StartLoader))
        assert loader.ticket == ticket
        actions = desk.resolve(loader.session, "blake3:a", inode)
        assert actions[0] == Reply(ticket, granted("w", 1, "hashed"))
    assert list(desk.books.sets) == [1]


def test_a_follower_need_not_agree_with_what_it_follows() -> None:
    """A demand is checked against the set that is granted, not against the one that is followed."""
    desk = Desk()
    first = desk.start(source(1))
    desk.reserve(first.session)
    desk.created(first.set)
    desk.seal(first.session, "blake3:a", 1)
    assert desk.acquire(desk.engine(), from_=source(2), checkpoint="blake3:b") == []


def test_a_name_that_only_follows_does_not_name_the_load() -> None:
    """Asked by a name that a follower has given, nobody gets the set that is merely followed."""
    desk = Desk()
    first = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(2), name="m")
    follower = desk.ticket
    assert desk.acquire(desk.engine(), name="m") == []
    by_name = desk.ticket
    actions = desk.finish(first)
    (second,) = (action for action in actions if isinstance(action, StartLoader))
    assert second.ticket == follower
    served = desk.finish(second, "blake3:b")
    key = WeightKey(DEVICE, "m", "blake3:b", "bfloat16")
    how = {follower: "loaded", by_name: "shared"}
    assert served[1:] == [
        Reply(ticket, wire.Granted("w", 2, key, "1", 100, 3, said)) for ticket, said in how.items()
    ]


def test_a_name_that_follows_in_vain_is_not_found() -> None:
    """When the load behind a name fails, those who asked by the name alone are told."""
    desk = Desk()
    first = desk.start(source(1))
    follower = desk.engine()
    desk.acquire(follower, from_=source(2), name="m")
    desk.acquire(desk.engine(), name="m")
    by_name = desk.ticket
    desk.cancel(follower)
    sentence = "'m' is not resident on device GPU-0; no named set is resident"
    assert Refused(by_name, NotFound, sentence) in desk.finish(first)


def test_progress_is_told_to_all_who_wait_also_to_those_who_come_later() -> None:
    """A report goes to every waiting request; a later one is told the last state at once."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(1))
    progress = wire.Progress("copying", 40, 100)
    assert desk.report(loader.session, 40) == [Tell(1, progress), Tell(2, progress)]
    assert desk.acquire(desk.engine(), from_=source(1)) == [Tell(3, progress)]
    assert desk.acquire(desk.engine(), from_=source(2)) == [Tell(4, progress)]


def test_the_loader_dies() -> None:
    """All who wait get its last words, and the next request starts another."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(1))
    desk.reserve(loader.session)
    assert desk.end(loader.session) == [
        FreeSlab(1),
        Refused(1, LoadFailed, KILLED.sentence),
        Refused(2, LoadFailed, KILLED.sentence),
    ]
    assert desk.free == 1000
    assert desk.start(source(1)).set == 2


def test_the_slab_cannot_be_created() -> None:
    """Loader and engines get the device's error; the loader is stopped."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.reserve(loader.session)
    error = LoadFailed("no memory")
    assert desk.failed(1, error) == [
        Refused(2, LoadFailed, "no memory"),
        StopLoader(loader.session),
        FreeSlab(1),
        Refused(1, LoadFailed, "no memory"),
    ]


def test_a_lease_id_in_use_is_refused() -> None:
    """Ids of leases, claims and waiting requests are taken; the request changes nothing."""
    desk = Desk()
    engine = desk.engine()
    desk.load(1, engine=engine)
    desk.claim(engine, "c", name="m")
    desk.acquire(engine, "v", from_=source(2, "shape-b"))
    for lease in ("w", "c", "v"):
        with pytest.raises(BadRequest, match=f"^the lease id '{lease}' is in use in this session$"):
            desk.acquire(engine, lease, from_=source(1))
        with pytest.raises(BadRequest, match=f"^the lease id '{lease}' is in use in this session$"):
            desk.claim(engine, lease, name="n")
