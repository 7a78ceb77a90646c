"""What sessions may have on the books, and writers that take too long."""

from __future__ import annotations

import pytest

from broker import wire
from broker.custody import Books, Budget
from broker.custody.actions import Action, CreateSlab, FreeSlab, Reply, StartLoader, StopLoader
from broker.custody.audit import check_invariant
from broker.errors import BadRequest, BrokerError, Busy, LoadFailed
from broker.limits import Limits
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, source

TIGHT = Limits(claims=2, all_claims=3, names=2, set_names=2, watches=1, tensors=10, seal_seconds=60)


def tight_books() -> Books:
    return Books({DEVICE: Budget(1000, 10)}, "epoch", limits=TIGHT)


def claim(books: Books, session: int, lease: str, name: str) -> list[Action]:
    key = WeightKey(device=DEVICE, name=name)
    return books.claim(session, 0, wire.Claim(lease, key))


def refusal(books: Books, session: int, lease: str, name: str) -> BrokerError:
    """The error of a claim that changes nothing."""
    before = (dict(books.sets), dict(books.sessions[session].claims))
    with pytest.raises(Busy) as caught:
        claim(books, session, lease, name)
    assert (books.sets, books.sessions[session].claims) == before
    check_invariant(books)
    return caught.value


def test_claims_of_one_session_and_of_all() -> None:
    """So many sets in progress for each session and in all; one that ends makes room."""
    books = tight_books()
    one, other = books.open_session(), books.open_session()
    for number in range(2):
        claim(books, one, f"c{number}", f"m{number}")
    assert refusal(books, one, "c2", "m2").limit == "claims"
    claim(books, other, "c0", "m1")  # waits for the other's: no claim of its own
    assert books.sessions[other].claims == {}
    books.abandon(one, 0, wire.Abandon("c0", "cancelled", "enough"))
    claim(books, one, "c3", "m0")
    check_invariant(books)


def test_loads_count_for_who_caused_them() -> None:
    """A session that has had two loads started may start no third; another session may."""
    books = tight_books()
    one, other = books.open_session(), books.open_session()
    demand = wire.Demand(DEVICE)
    for inode in (1, 4):
        asked = wire.Acquire(str(inode), demand, source(inode, f"shape {inode}"))
        assert any(isinstance(a, StartLoader) for a in books.acquire(one, inode, asked))
    third = wire.Acquire("6", demand, source(6, "shape 6"))
    with pytest.raises(Busy, match=r"2 weight sets are being written by this session already"):
        books.acquire(one, 6, third)
    assert any(isinstance(a, StartLoader) for a in books.acquire(other, 6, third))
    with pytest.raises(Busy, match=r"3 weight sets are being written or loaded already"):
        books.acquire(other, 7, wire.Acquire("7", demand, source(7, "shape 7")))
    check_invariant(books)


def test_tensors() -> None:
    """A reservation for too many tensors is refused and the claim stays."""
    books = tight_books()
    session = books.open_session()
    claim(books, session, "c", "m")
    with pytest.raises(BadRequest, match=r"11 tensors .*\(limit tensors=10;"):
        books.reserve(session, 0, wire.Reserve("c", 100, 11, "float32"))
    assert any(
        isinstance(action, CreateSlab)
        for action in books.reserve(session, 0, wire.Reserve("c", 100, 10, "float32"))
    )


def written(books: Books, session: int) -> None:
    claim(books, session, "c", "m")
    books.reserve(session, 1, wire.Reserve("c", 100, 1, "float32"))
    books.slab_created(1)


def test_writer_that_stalls() -> None:
    """Its claim is over: memory is freed, who waits is told why, and so is it when it goes on."""
    books = tight_books()
    writer, waiting = books.open_session(), books.open_session()
    books.introduce(writer, "pid 12 (vllm)")
    written(books, writer)
    books.acquire(waiting, 7, wire.Acquire("a", wire.Demand(DEVICE, name="m")))
    actions = books.writer_stalled(1)
    (reply,) = [action for action in actions if isinstance(action, Reply)]
    assert FreeSlab(1) in actions
    assert reply.ticket == 7
    assert isinstance(reply.body, LoadFailed)
    assert reply.body.sentence == (
        "pid 12 (vllm) reserved memory for weights and did not seal them in time "
        "(limit seal_seconds=60; serve --limit seal_seconds=… changes it)"
    )
    assert books.budgets[DEVICE].free == 1000
    with pytest.raises(BrokerError, match="did not seal them in time"):
        books.seal(writer, 8, wire.Seal("c", "mine:1"))
    check_invariant(books)


def test_stalled_writer_is_inherited_from() -> None:
    """An engine that waits with a claim of its own writes in its place."""
    books = tight_books()
    writer, heir = books.open_session(), books.open_session()
    written(books, writer)
    claim(books, heir, "h", "m")
    actions = books.writer_stalled(1)
    assert Reply(0, wire.Claimed("h")) in actions
    check_invariant(books)


def test_stalled_loader_is_stopped() -> None:
    """A loader that stalls is ended besides."""
    books = tight_books()
    engine = books.open_session()
    demand = wire.Demand(DEVICE)
    started = books.acquire(engine, 1, wire.Acquire("a", demand, source(1, "shape")))
    (start,) = [action for action in started if isinstance(action, StartLoader)]
    books.reserve(start.session, 2, wire.Reserve(start.claim, 100, 1, "float32"))
    assert StopLoader(start.session) in books.writer_stalled(start.set)
    check_invariant(books)


def test_time_that_is_up_for_a_sealed_set() -> None:
    """Nothing happens to a set that is sealed, being sealed, or gone."""
    books = tight_books()
    writer = books.open_session()
    written(books, writer)
    books.seal(writer, 2, wire.Seal("c", "mine:1", keep=True))
    assert books.writer_stalled(1) == []
    books.slab_frozen(1)
    assert books.writer_stalled(1) == []
    assert books.writer_stalled(99) == []
    assert len(books.sets[1].leases) == 1


def test_conversation_that_was_lost() -> None:
    """What a session holds it may ask for again, and gets the same; nothing is done twice."""
    books = tight_books()
    session = books.open_session()
    asked = wire.Claim("c", WeightKey(device=DEVICE, name="m"))
    reserve = wire.Reserve("c", 100, 1, "float32")
    books.claim(session, 0, asked)
    with pytest.raises(BadRequest, match="in use"):
        books.claim(session, 1, asked)
    books.conversation_lost(session)
    assert books.claim(session, 2, asked) == [Reply(2, wire.Claimed("c"))]
    books.reserve(session, 3, reserve)
    books.slab_created(1)
    assert books.reserve(session, 4, reserve) == [Reply(4, wire.Reserved("c", 100))]
    assert books.budgets[DEVICE].free == 900
    check_invariant(books)
