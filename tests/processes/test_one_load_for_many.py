"""One load for many: its result, its error, and what it costs those who do not wait for it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.clock import SCALE, eventually
from tests.support.processes import Engine, LoaderFault, RunningBroker
from tests.support.raw import RawDealer, percentile
from tests.support.stored import big_checkpoint, cut_short, small_checkpoint

ENGINES = 16
GIB = 1 << 30
BIG_SHARDS = 2
ROOM_BYTES = 4 * GIB
"""The slab, and as much again for whoever else is on the machine."""
MAX_MESSAGE_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def engines(shared_broker: RunningBroker) -> Iterator[list[Engine]]:
    started = [Engine(shared_broker) for _ in range(ENGINES)]
    yield started
    for engine in started:
        engine.close()


def ask_all_at_once(broker: RunningBroker, engines: list[Engine], checkpoint: Path) -> None:
    """Every engine's request is on the books before the load may begin."""
    broker.order_loaders(LoaderFault.STOPS_AT_START)
    for engine in engines:
        engine.tell("acquire", path=str(checkpoint))
    eventually(lambda: broker.waiting() == ENGINES, 30, f"{ENGINES} waiting requests")


@pytest.mark.timeout(180)
def test_sixteen_engines_cause_one_load(
    shared_broker: RunningBroker, engines: list[Engine], tmp_path: Path
) -> None:
    """Sixteen engines that ask at once cause one load and share one set; one of them caused it."""
    checkpoint = small_checkpoint(tmp_path / "a")
    ask_all_at_once(shared_broker, engines, checkpoint)
    shared_broker.let_loader_go()
    answers = [engine.answer() for engine in engines]
    assert all("ok" in answer for answer in answers), answers
    granted = [answer["ok"] for answer in answers]
    assert {grant["set"] for grant in granted} == {granted[0]["set"]}
    assert sorted(grant["how"] for grant in granted) == ["loaded", *["shared"] * (ENGINES - 1)]
    assert shared_broker.counter("loads_started") == 1
    assert shared_broker.slabs() == 1
    assert {engine.ask("identity") for engine in engines} == {granted[0]["checkpoint"]}
    for engine in engines:
        engine.ask("release")


def test_all_get_the_same_error_within_a_second(
    shared_broker: RunningBroker, engines: list[Engine], tmp_path: Path
) -> None:
    """A load that fails gives all sixteen the same sentence within a second of the failure."""
    checkpoint = cut_short(small_checkpoint(tmp_path / "cut"))
    ask_all_at_once(shared_broker, engines, checkpoint)
    shared_broker.let_loader_go()
    answers = [engine.answer() for engine in engines]
    assert {answer["error"] for answer in answers} == {"LoadFailed"}
    assert len({answer["sentence"] for answer in answers}) == 1
    assert "model.safetensors" in answers[0]["sentence"]
    assert answers[0]["fields"]["reason"] == "truncated"
    failed = time_of(shared_broker, "set-failed")
    assert max(answer["at"] for answer in answers) - failed < 1.0 * SCALE
    assert shared_broker.waiting() == 0


def time_of(broker: RunningBroker, event: str) -> float:
    """Unix time of the event's last line in the broker's log."""
    line = next(line for line in reversed(broker.log_lines()) if event in line)
    stamp = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")  # noqa: DTZ007 - local time
    return stamp.timestamp()


# --- two gigabytes ------------------------------------------------------------------------------


@pytest.fixture
def two_gigabytes() -> Iterator[Path]:
    """A checkpoint of 2 GiB in two shards, which take no room themselves.

    Not even in the page cache: holes of a file system in memory are read from one page of zeros.
    """
    available = available_bytes()
    if available < ROOM_BYTES:
        pytest.skip(f"weights of 2 GiB need {ROOM_BYTES} bytes of memory, {available} are free")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield big_checkpoint(Path(folder) / "big", BIG_SHARDS, GIB)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def ping_until(broker: RunningBroker, done: Callable[[], bool]) -> list[float]:
    """Seconds of each ping, one after the other, until the condition holds."""
    seconds = []
    deadline = time.monotonic() + 60 * SCALE
    with RawDealer(broker.directory) as dealer:
        while not done():
            assert time.monotonic() < deadline
            seconds.append(dealer.ping_seconds())
    return seconds


@pytest.mark.timeout(180)
def test_two_gigabytes_for_three_engines(
    broker: RunningBroker, start_engine: Callable[..., Engine], two_gigabytes: Path
) -> None:
    """Three engines map 2 GiB as one copy; pings are quick meanwhile and messages stay small."""
    engines = [start_engine(broker) for _ in range(3)]
    for engine in engines:
        engine.tell("acquire", path=str(two_gigabytes))
    pings = ping_until(broker, lambda: all(engine.has_answered() for engine in engines))
    grants = [engine.answer()["ok"] for engine in engines]
    assert len(pings) > 50
    assert percentile(pings, 0.99) < 0.1 * SCALE, sorted(pings)[-10:]
    for engine in engines:
        engine.ask("touch")
    stored = BIG_SHARDS * GIB
    assert grants[0]["nbytes"] >= stored
    mapped = [engine.ask("mapped") for engine in engines]
    assert all(engine_mapped["Rss"] >= stored for engine_mapped in mapped)
    assert sum(engine_mapped["Pss"] for engine_mapped in mapped) <= 1.02 * stored
    counters = broker.status()["counters"]
    assert counters["loads_started"] == 1
    assert 0 < counters["largest_request_bytes"] <= MAX_MESSAGE_BYTES
    assert 0 < counters["largest_reply_bytes"] <= MAX_MESSAGE_BYTES
    print(f"ping p50 {percentile(pings, 0.5) * 1e3:.2f} p99 {percentile(pings, 0.99) * 1e3:.2f} ms")
