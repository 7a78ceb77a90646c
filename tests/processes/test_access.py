"""Who may use a broker: its own user and root; with --group the members of that group."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker import wire
from broker.errors import BadRequest
from engine_client import Checkpoint
from tests.processes.conftest import brokers, private_directory
from tests.support.other_user import NOBODY, as_user
from tests.support.processes import RunningBroker
from tests.support.raw import RawDealer, RawSession
from tests.support.stored import small_checkpoint

StartBroker = Callable[..., RunningBroker]

GROUP = 54_321
"""A group that exists nowhere: its number is enough."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="becoming another user, and another group, takes root"
)


@pytest.fixture
def broker(shared_broker: RunningBroker) -> RunningBroker:
    return shared_broker


@pytest.fixture
def wide_open(broker: RunningBroker) -> Iterator[RunningBroker]:
    """A broker whose directory somebody has opened to everybody, by mistake."""
    sockets = [broker.directory / name for name in ("default.zmq", "default.session")]
    broker.directory.chmod(0o755)
    for path in sockets:
        path.chmod(0o666)
    yield broker
    broker.directory.chmod(0o700)
    for path in sockets:
        path.chmod(0o600)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningBroker]:
    """A broker that is shared with a group, for all tests of this file."""
    with private_directory() as directory, brokers(directory) as start:
        yield start("--group", str(GROUP), "--allow-loaders")


def mode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_gid


# --- alone --------------------------------------------------------------------------------------


def test_private_broker(broker: RunningBroker) -> None:
    """Another user does not even reach the sockets, and is told whose directory it is."""
    assert mode(broker.directory)[0] == 0o700
    for command in ("raw_session", "raw_ping"):
        answer = as_user(command, broker.directory)
        assert answer["error"] == "PermissionError", answer


def test_kernel_is_asked_all_the_same(wide_open: RunningBroker) -> None:
    """Where the directory lets another user through, the kernel's word on it does not."""
    before = wide_open.status()["counters"]
    answer = as_user("raw_session", wide_open.directory)
    assert answer["ok"].startswith("Refused: this broker serves processes of uid 0, root; yours ")
    assert f"uid {NOBODY}" in answer["ok"]
    assert as_user("raw_ping", wide_open.directory)["ok"] == "ended"
    for counter in ("sessions_refused", "connections_refused"):
        assert wide_open.counter(counter) == before.get(counter, 0) + 1
    for event in ("session-refused", "connection-refused"):
        (line,) = [line for line in wide_open.log_lines() if event in line]
        assert f"uid={NOBODY}" in line


def test_client_refuses_a_directory_that_is_open(wide_open: RunningBroker) -> None:
    """Our own client looks at owner and mode before it connects."""
    with pytest.raises(BadRequest, match=r"is open to others .*mode 0755"):
        wide_open.client()
    answer = as_user("use", wide_open.directory, "/nowhere")
    assert answer["error"] == "BadRequest"
    assert f"belongs to uid 0 (mode 0755) and not to us, uid {NOBODY}" in answer["sentence"]


# --- shared with a group ------------------------------------------------------------------------


def test_modes_of_a_shared_broker(shared: RunningBroker) -> None:
    """The group may enter and connect, not write; others may nothing."""
    assert mode(shared.directory) == (0o750, GROUP)
    for name in ("default.zmq", "default.session"):
        assert mode(shared.directory / name) == (0o660, GROUP)
    assert mode(shared.directory / "default.lock")[0] == 0o600


def test_who_is_in_the_group_and_who_is_not(
    shared: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member by whatever way has a session; others fail at the directory."""
    assert as_user("raw_session", shared.directory, groups=[GROUP])["ok"] == "Welcome: welcome"
    assert as_user("raw_ping", shared.directory, groups=[7, GROUP])["ok"] == "answered"
    assert as_user("raw_session", shared.directory, groups=[7])["error"] == "PermissionError"
    # A client trusts the broker of another user only when it is told to.
    answer = as_user("use", shared.directory, "/nowhere", groups=[GROUP])
    assert answer["error"] == "BadRequest"
    monkeypatch.setenv("WEIGHT_BROKER_GROUP", str(GROUP + 1))
    answer = as_user("use", shared.directory, "/nowhere", groups=[GROUP])
    assert "belongs to uid 0" in answer["sentence"]


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that every user can read."""
    with private_directory() as path:
        path.chmod(0o755)
        yield path


def test_what_members_may_do(
    shared: RunningBroker, monkeypatch: pytest.MonkeyPatch, readable: Path
) -> None:
    """Members map what is resident and publish; what needs the broker's own rights they may not."""
    monkeypatch.setenv("WEIGHT_BROKER_GROUP", str(GROUP))
    resident = small_checkpoint(readable / "resident")
    with shared.client() as client:
        client.acquire(Checkpoint(resident, "m")).release()
        said = as_user("use", shared.directory, str(resident), groups=[GROUP])["ok"]
        for name in ("acquire", "acquire by name", "publish", "status"):
            assert said[name] == "done", said
        for name in ("load", "shutdown", "upgrade"):
            assert said[name].startswith(f"BadRequest: {name} is for processes of the broker's own")
        assert client.ping()
        other = small_checkpoint(readable / "other", seed=1)
        said = as_user("use", shared.directory, str(other), groups=[GROUP])["ok"]
        assert said["acquire"].startswith("BadRequest: this checkpoint is not resident, and a load")
        assert shared.counter("loads_started") == 1


def test_shared_broker_of_nobody_we_know(
    shared: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that the group may write to is refused: any member could put a socket there."""
    monkeypatch.setenv("WEIGHT_BROKER_GROUP", str(GROUP))
    shared.directory.chmod(0o770)
    try:
        with pytest.raises(BadRequest, match="mode 0770"):
            shared.client()
    finally:
        shared.directory.chmod(0o750)


def test_group_that_does_not_exist(start_broker: StartBroker) -> None:
    """A name that is no group ends `serve` with a sentence."""
    with pytest.raises(AssertionError, match="there is no group 'no-such-group' on this machine"):
        start_broker("--group", "no-such-group")


def test_log_holds_no_secret(broker: RunningBroker) -> None:
    """A session's token is nowhere in the log, whatever is said with it."""
    before = broker.counter("requests_refused")
    opened = broker.log.read_bytes().count(b"INFO session-opened")
    with RawSession(broker.directory) as session, RawDealer(broker.directory) as dealer:
        token = session.welcome.token
        session.hello(dealer)
        another = token[:-1] + bytes([token[-1] ^ 1])
        session.hello(dealer, token=another, label="x\nINFO session-opened pid=1")
        session.hello(dealer, protocol=99)
        dealer.ask(b"hello", wire.encode(session.welcome))
        dealer.ask(b"evict", token)
        session.send(token)
        session.receive()
        assert broker.counter("requests_refused") == before + 4
    log = broker.log.read_bytes()
    for form in (token, token.hex().encode(), base64.b64encode(token), repr(token)[2:-1].encode()):
        assert form not in log
    assert log.count(b"INFO session-opened") == opened + 1
