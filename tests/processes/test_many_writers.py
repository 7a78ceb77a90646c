"""Writers that do not let go of their slabs keep nobody else waiting."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path

from broker import wire
from broker.memfd import sealed_memfd
from broker.performing import FREEZE_SECONDS
from broker.weights import WeightKey
from engine_client import Checkpoint
from tests.support.clock import SCALE
from tests.support.processes import RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint

WRITERS = 48
SLAB_BYTES = mmap.PAGESIZE


def reserve(session: RawSession, dealer: RawDealer, claim: str) -> mmap.mmap:
    """A slab of one's own, mapped writable."""
    key = WeightKey(device="SIM-0", name=f"by hand {claim}")
    assert dealer.ask(b"claim", wire.encode(wire.Claim(claim, key)))[0] == b"ok"
    manifest = sealed_memfd("test", b"whatever: the broker never decodes it")
    session.send(wire.encode(wire.Deliver(claim.encode(), "manifest")), [manifest])
    os.close(manifest)
    message = wire.encode(wire.Reserve(claim, SLAB_BYTES, 1, "float32"))
    assert dealer.ask(claim.encode(), b"reserve", message)[1] == b"ok"
    session.send(wire.encode(wire.Attach(claim)))
    assert isinstance(session.receive(), wire.Attached)
    return mmap.mmap(session.delivered[-1], SLAB_BYTES)


def test_all_of_them_seal_at_once(shared_broker: RunningBroker, tmp_path: Path) -> None:
    """Each is refused after its time, all at once, and another's load goes on meanwhile."""
    directory = shared_broker.directory
    with (
        contextlib.ExitStack() as mapped,
        RawSession(directory) as session,
        RawDealer(directory) as dealer,
        shared_broker.client() as client,
    ):
        session.hello(dealer)
        claims = [str(number) for number in range(WRITERS)]
        for claim in claims:
            mapped.enter_context(reserve(session, dealer, claim))
        began = time.monotonic()
        for claim in claims:
            seal = wire.encode(wire.Seal(claim, f"mine:{claim}"))
            dealer.send(b"seal " + claim.encode(), b"", b"seal", seal)
        client.acquire(Checkpoint(small_checkpoint(tmp_path))).release()
        answers = [dealer.receive(10) for _ in claims]
        took = time.monotonic() - began
    assert {answer[-2] for answer in answers} == {b"bad-request"}
    assert all(b"unmap it before sealing" in answer[-1] for answer in answers)
    assert FREEZE_SECONDS <= took < FREEZE_SECONDS + 4 * SCALE
