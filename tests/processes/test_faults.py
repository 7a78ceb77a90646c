"""Short versions of the long runs in tests/campaign: faults, kills, abuse, bytes nobody means."""

from __future__ import annotations

import random
from multiprocessing.context import ForkServerContext

import pytest

from tests.campaign.abuse import run_abuse
from tests.campaign.cycles import run_cycles
from tests.campaign.engines import nursery
from tests.campaign.faults import run_world
from tests.campaign.fuzz import fuzz_broker, fuzz_decoders, fuzz_reader
from tests.campaign.soak import run_soak

ROUNDS = 15
CYCLES = 50
ABUSE_SECONDS = 2.0
SOAK_SECONDS = 3.0


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return nursery()


@pytest.mark.timeout(240)  # longer than a world waits: so it can say what has not settled
def test_faults(context: ForkServerContext) -> None:
    """After each round of harm books, kernel and engines agree, and everybody has an answer."""
    tally = run_world(context, "suite", ROUNDS)
    assert tally.rounds == ROUNDS
    assert sum(tally.injected.values()) >= ROUNDS
    print(dict(tally.injected), dict(tally.outcomes))


def test_engines_killed_while_attaching(context: ForkServerContext) -> None:
    """Keeper and server use the same memory, descriptors, threads and children as before."""
    result = run_cycles(context, CYCLES)
    print(result.table())
    result.check()


def test_bad_peers_all_at_once(context: ForkServerContext) -> None:
    """One silent, one endless, one deaf, one flooding: another's ping stays below 100 ms."""
    result = run_abuse(context, ABUSE_SECONDS)
    print(result.table())
    result.check()


def test_ordinary_life(context: ForkServerContext) -> None:
    """Engines come and go, publish and swap; in the end everything has come back."""
    soak = run_soak(context, SOAK_SECONDS, engines=8)
    print(soak.table(SOAK_SECONDS))
    assert soak.done["swap: ok"] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_bytes_for_the_decoders(seed: int) -> None:
    """Frames, packets, replies and manifests are decoded, or refused with the documented error."""
    tally = fuzz_decoders(random.Random(seed), 5000)  # noqa: S311 - the same bytes every time
    assert tally.outcomes["request ok"] > 100
    assert tally.outcomes["request bad-request"] > 100


def test_bytes_for_a_broker(context: ForkServerContext) -> None:
    """A broker answers each request with a documented status, serves others and does not grow."""
    tally = fuzz_broker(context, random.Random(1), 300)  # noqa: S311 - the same bytes every time
    assert tally.outcomes["bad-request"] > 50
    assert tally.outcomes["ok"] > 5


def test_headers_for_the_reader() -> None:
    """Headers with changed bytes and values are planned, or refused with a reason; none hangs."""
    tally = fuzz_reader(random.Random(1), 150)  # noqa: S311 - the same headers every time
    assert tally.outcomes["bad_json"] > 10
    assert tally.outcomes["ok"] > 0
