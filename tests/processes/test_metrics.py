"""The questions of a person on call, answered by the metrics of a real broker; its port and who
scrapes it."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from broker.cli import main
from broker.errors import Busy, LoadFailed
from broker.metrics.endpoint import PLACES
from engine_client import Checkpoint
from tests.metrics.pages import Samples
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE, eventually
from tests.support.processes import Engine, LoaderFault, RunningBroker, wait_until_gone
from tests.support.raw import RawDealer
from tests.support.stored import cut_short, small_checkpoint

SET_BYTES = 4 << 16
PING_SECONDS = 0.1


class WatchedBroker:
    """A broker that serves metrics, and what they say."""

    def __init__(self, broker: RunningBroker) -> None:
        self.broker = broker
        (address,) = set(re.findall(r"metrics-served address=(\S+)", broker.log.read_text()))
        host, _, port = address.rpartition(":")
        self.address = (host, int(port))

    def text(self) -> str:
        with urlopen(f"http://{self.address[0]}:{self.address[1]}/metrics", timeout=20) as page:
            return str(page.read().decode())

    def samples(self) -> Samples:
        return Samples(self.text())

    def value(self, name: str, /, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        return sum(self.samples().values(name, **labels))


@pytest.fixture(scope="module")
def watched() -> Iterator[WatchedBroker]:
    with private_directory() as directory, brokers(directory) as start:
        yield WatchedBroker(start("--metrics", "127.0.0.1:0"))


@pytest.fixture(scope="module")
def one_engine(watched: WatchedBroker) -> Iterator[Engine]:
    with Engine(watched.broker) as engine:
        yield engine


@pytest.fixture
def engine(watched: WatchedBroker, one_engine: Engine) -> Iterator[Engine]:
    """The file's engine, with one lease at the end, which is given back."""
    yield one_engine
    one_engine.ask("release")
    watched.broker.evict_all()


def test_who_holds_this_memory(watched: WatchedBroker, engine: Engine, tmp_path: Path) -> None:
    """The set is named with its bytes, the process with its pid and label; all add up."""
    granted = engine.ask("acquire", path=str(small_checkpoint(tmp_path)), name="assistant")
    number = str(granted["set"])
    eventually(lambda: watched.value("set_leases", set=number) == 1, 5, "the lease")
    samples = watched.samples()
    assert samples.value("set_bytes", set=number, name="assistant", use="leased") == SET_BYTES
    assert samples.value("session_leased_bytes", pid=str(engine.pid)) == SET_BYTES
    (session,) = samples.labels("session_leased_bytes")
    assert session["label"] == "told engine"
    uses = {labels["use"]: labels for labels in samples.labels("device_bytes")}
    assert set(uses) == {"leased", "idle", "reserved", "free"}
    assert sum(samples.values("device_bytes")) == samples.value("device_limit_bytes")


def test_why_that_load_failed(watched: WatchedBroker, tmp_path: Path) -> None:
    """Each failure is counted under its cause, once."""
    before = watched.samples()
    with watched.broker.client() as client:
        with pytest.raises(LoadFailed):
            client.acquire(Checkpoint(cut_short(small_checkpoint(tmp_path / "cut"))))
        watched.broker.order_loaders(LoaderFault.DIES_WHILE_WRITING)
        with pytest.raises(LoadFailed):
            client.acquire(Checkpoint(small_checkpoint(tmp_path / "dies")))
        watched.broker.order_loaders(None)

    def added(name: str, /, **labels: str) -> float:
        return watched.value(name, **labels) - sum(before.values(name, **labels))

    eventually(lambda: added("loads_failed_total") == 2, 5, "both failures")
    assert added("load_failures_total", cause="truncated") == 1
    assert added("load_failures_total", cause="loader-killed") == 1
    assert added("request_errors_total", operation="acquire", status="load-failed") == 2
    assert added("load_seconds_count") == 0


def test_is_anybody_waiting(watched: WatchedBroker, engine: Engine, tmp_path: Path) -> None:
    """A request that waits is counted, how long it has, and for which set; then no more."""
    assert watched.value("waiting_requests") == 0
    watched.broker.order_loaders(LoaderFault.STOPS_AT_START)
    engine.tell("acquire", path=str(small_checkpoint(tmp_path)))
    waiting = {"operation": "acquire"}
    eventually(lambda: watched.value("longest_wait_seconds", **waiting) > 0.2, 5, "a wait")
    assert watched.value("waiting_requests", **waiting) == 1
    assert watched.value("set_waiting_requests") == 1
    watched.broker.let_loader_go()
    granted = engine.answer()["ok"]
    eventually(lambda: watched.value("waiting_requests") == 0, 5, "the end of the wait")
    samples = watched.samples()
    assert samples.value("set_waiting_requests", set=str(granted["set"])) == 0
    slow = samples.value("request_seconds_count", **waiting) - samples.value(
        "request_seconds_bucket", le="0.1", **waiting
    )
    assert slow >= 1


def test_is_a_generation_stuck(watched: WatchedBroker, engine: Engine, tmp_path: Path) -> None:
    """An old generation that is still leased drains, and longer and longer; a writer from whom
    nothing is heard is quiet for longer and longer."""
    path = str(small_checkpoint(tmp_path / "old"))
    old = str(engine.ask("acquire", path=path, name="line")["set"])
    with watched.broker.client() as client:
        client.acquire(
            Checkpoint(small_checkpoint(tmp_path / "new", seed=1), name="line")
        ).release()
        eventually(lambda: watched.value("set_draining_seconds", set=old) > 0.2, 5, "the draining")
        assert watched.value("sets", state="draining") == 1
        watched.broker.order_loaders(LoaderFault.STOPS_WHILE_WRITING)
        stuck = small_checkpoint(tmp_path / "stuck", seed=2)
        engine.tell("acquire", path=str(stuck), keep="new")
        quiet = eventually(lambda: watched.samples().labels("set_quiet_seconds"), 5, "a writer")
        number = quiet[0]["set"]
        eventually(lambda: watched.value("set_quiet_seconds", set=number) > 0.2, 5, "the quiet")
        assert watched.value("set_writing_seconds", set=number) > 0.2
    watched.broker.let_loader_go()
    assert "ok" in engine.answer()
    engine.ask("release", keep="new")


# --- scrapers -----------------------------------------------------------------------------------


def test_scrapers_that_never_ask(watched: WatchedBroker) -> None:
    """More connections than there are places, and none of them says a word: a scraper that does is
    answered, and so is ping."""
    silent = [socket.create_connection(watched.address) for _ in range(PLACES + 8)]
    try:
        with RawDealer(watched.broker.directory) as dealer:
            assert watched.samples().values("leases")
            assert min(dealer.ping_seconds() for _ in range(5)) < PING_SECONDS * SCALE
    finally:
        for connection in silent:
            connection.close()


def test_what_is_no_scrape(watched: WatchedBroker) -> None:
    """Another path, another method and nonsense are refused, and nothing of it is in the log."""
    for request, status in (
        (b"GET /etc/passwd HTTP/1.0\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.0\r\n\r\n", b"501"),
        (b"\x00\xff\r\n\r\n", b"400"),
    ):
        with socket.create_connection(watched.address, timeout=5 * SCALE) as connection:
            connection.sendall(request)
            answer = connection.makefile("rb").read()
        assert status in answer
    assert "passwd" not in watched.broker.log.read_text()


def test_the_port_outlives_the_server(watched: WatchedBroker) -> None:
    """A scraper that connects while there is no server is answered by the next one, which knows how
    many there were."""
    restarts = watched.value("server_restarts_total")
    server = watched.broker.server_pid()
    os.kill(server, signal.SIGKILL)
    wait_until_gone(server)
    assert watched.value("server_restarts_total") == restarts + 1


def test_a_port_in_use(
    watched: WatchedBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second broker at the same port is refused with a sentence; it leaves nothing behind."""
    tmp_path.chmod(0o700)
    where = f"{watched.address[0]}:{watched.address[1]}"
    serve = ["serve", "--device", "simulated", "--dir", str(tmp_path), "--metrics", where]
    assert main(serve) == Busy.exit_code
    said = capsys.readouterr().err
    assert f"--metrics {where}: the port is in use" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
