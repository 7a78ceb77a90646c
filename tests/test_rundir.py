"""The runtime directory, the names in it and finding a broker, below the tests' own roots."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from broker.errors import BadRequest, BrokerNotFound
from broker.rundir import (
    BrokerPaths,
    _check_private,
    broker_directory,
    broker_not_found,
    candidate_directories,
    find_brokers,
    is_private_directory,
)

UID = os.geteuid()
ELSEWHERE = "; name another one with --dir or WEIGHT_BROKER_DIR"


# --- the directory ------------------------------------------------------------------------------


def test_candidates() -> None:
    """Without the variable: the user's run directory, then /tmp; for root /run itself."""
    assert candidate_directories({}, 1000) == [
        Path("/run/user/1000/weight-broker"),
        Path("/tmp/weight-broker-1000"),
    ]
    assert candidate_directories({"WEIGHT_BROKER_DIR": ""}, 0) == [
        Path("/run/weight-broker"),
        Path("/tmp/weight-broker-0"),
    ]


def test_variable_is_the_only_candidate() -> None:
    """With the variable nothing else is looked at."""
    assert candidate_directories({"WEIGHT_BROKER_DIR": "/srv/wb"}, 1000) == [Path("/srv/wb")]


def test_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment and user are this process's unless given."""
    monkeypatch.setenv("WEIGHT_BROKER_DIR", "/srv/mine")
    assert candidate_directories() == [Path("/srv/mine")]
    monkeypatch.delenv("WEIGHT_BROKER_DIR")
    assert candidate_directories()[1] == Path(f"/tmp/weight-broker-{UID}")


def test_relative_variable() -> None:
    """A relative path would mean another directory to every process: refused."""
    with pytest.raises(BadRequest) as caught:
        candidate_directories({"WEIGHT_BROKER_DIR": "run"}, 1000)
    assert str(caught.value) == "WEIGHT_BROKER_DIR='run' is a relative path: give the whole path"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.usefixtures("umask_restored")
def test_directory_is_created_private(tmp_path: Path, umask: int) -> None:
    """The broker's directory is created for us alone whatever the umask, and found again."""
    wanted = tmp_path / "tmp" / f"weight-broker-{UID}"
    wanted.parent.mkdir()
    os.umask(umask)
    for _ in range(2):
        assert broker_directory({}, UID, tmp_path) == wanted
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700


def test_run_directory_is_preferred(tmp_path: Path) -> None:
    """Where the user has a run directory, the broker serves there."""
    run = tmp_path / "run" if UID == 0 else tmp_path / f"run/user/{UID}"
    run.mkdir(parents=True)
    assert broker_directory({}, UID, tmp_path) == run / "weight-broker"


def test_directory_cannot_be_created(tmp_path: Path) -> None:
    """A missing parent is said, not created."""
    wanted = tmp_path / "missing" / "wb"
    with pytest.raises(BadRequest) as caught:
        broker_directory({"WEIGHT_BROKER_DIR": str(wanted)})
    assert str(caught.value) == (
        f"the broker's directory {wanted} cannot be created (No such file or directory){ELSEWHERE}"
    )
    assert not wanted.parent.exists()


def refusal_of(directory: Path, uid: int = UID) -> BadRequest:
    """What both sides say of a directory that is there and not private."""
    with pytest.raises(BadRequest) as serving:
        broker_directory({"WEIGHT_BROKER_DIR": str(directory)}, uid)
    with pytest.raises(BadRequest) as asking:
        find_brokers("default", directory, uid=uid)
    assert str(serving.value) == str(asking.value)
    return serving.value


def test_open_directory(private: Path) -> None:
    """A directory open to the group or others is refused on both sides, and left as it is."""
    owner = UID or 1
    os.chown(private, owner, -1)
    for mode in (0o750, 0o701):
        private.chmod(mode)
        error = refusal_of(private, owner)
        assert str(error) == (
            f"the broker's directory {private} is open to others (owner uid {owner}, mode "
            f"{mode:04o}); chmod 700 closes it, or {ELSEWHERE.removeprefix('; ')}"
        )
        assert error.fields == {"path": str(private), "owner": owner, "mode": f"{mode:04o}"}
        assert stat.S_IMODE(private.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("mode", "owner"), [(0o1777, UID), (0o777, UID), (0o1700 | 0o055, UID), (0o755, 0)]
)
def test_open_directory_that_others_may_need(mode: int, owner: int, tmp_path: Path) -> None:
    """One that all may write to, a sticky one and one of root's are never to be closed: the advice
    is a directory of one's own in it."""
    faked = os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, owner, 0, 0, 0, 0, 0))
    with pytest.raises(BadRequest) as caught:
        _check_private(tmp_path, faked, owner, None)
    assert str(caught.value) == (
        f"the broker's directory {tmp_path} is open to others (owner uid {owner}, mode "
        f"{mode:04o}); name one of your own with --dir or WEIGHT_BROKER_DIR, such as "
        f"{tmp_path}/weight-broker-{owner}"
    )


def test_directory_of_somebody_else(private: Path) -> None:
    """A directory that another user owns is refused on both sides, naming the owner."""
    error = refusal_of(private, UID + 1)
    assert str(error) == (
        f"the broker's directory {private} belongs to uid {UID} (mode 0700) and not to us, uid "
        f"{UID + 1}{ELSEWHERE}"
    )
    assert error.fields == {"path": str(private), "owner": UID, "mode": "0700"}


def test_linked_directory(private: Path, tmp_path: Path) -> None:
    """A symbolic link is refused even where it leads to a private directory."""
    link = tmp_path / "link"
    link.symlink_to(private)
    assert str(refusal_of(link)) == (
        f"the broker's directory {link} is a symbolic link, which somebody could turn "
        f"elsewhere{ELSEWHERE}"
    )


def test_file_for_a_directory(tmp_path: Path) -> None:
    """A file in the directory's place is refused."""
    (tmp_path / "file").touch(0o600)
    assert str(refusal_of(tmp_path / "file")) == (
        f"the broker's directory {tmp_path / 'file'} is not a directory{ELSEWHERE}"
    )


def test_absent_directory(tmp_path: Path) -> None:
    """An absent directory is no error by itself, nor is one under a file."""
    (tmp_path / "file").touch()
    assert not is_private_directory(tmp_path / "absent")
    assert not is_private_directory(tmp_path / "file" / "below")


def test_directory_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """What the system says is passed on."""
    long = tmp_path / ("x" * 300)
    with pytest.raises(BadRequest) as caught:
        is_private_directory(long)
    assert str(caught.value) == (
        f"the broker's directory {long} cannot be looked at (File name too long){ELSEWHERE}"
    )


# --- names --------------------------------------------------------------------------------------


def test_paths() -> None:
    """A broker's three files carry its name."""
    paths = BrokerPaths(Path("/run/wb"), "a-1_b.c")
    assert (paths.zmq, paths.session, paths.lock) == (
        Path("/run/wb/a-1_b.c.zmq"),
        Path("/run/wb/a-1_b.c.session"),
        Path("/run/wb/a-1_b.c.lock"),
    )
    assert BrokerPaths(Path("/run/wb")).name == "default"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", "''"),
        (".", "'.'"),
        ("..", "'..'"),
        ("a/b", "'a/b'"),
        ("a\0b", "'a\\x00b'"),
        ("a b", "'a b'"),
        ("a\n", "'a\\n'"),
        ("é", "'\\xe9'"),
        ("x" * 65, repr("x" * 64)),
    ],
)
def test_bad_names(name: str, shown: str) -> None:
    """A name that could lead elsewhere, or that not every file system takes, is refused."""
    with pytest.raises(BadRequest) as caught:
        BrokerPaths(Path("/run/wb"), name)
    assert str(caught.value) == (
        f"{shown} cannot be a broker's name: use 1 to 64 ASCII letters, digits, dots, dashes or "
        "underscores"
    )


def test_longest_path() -> None:
    """107 bytes are the most a socket's path may have, and bytes are counted, not characters."""
    room = 107 - len("/x.session")
    assert len(str(BrokerPaths(Path("/" + "d" * (room - 1)), "x").session)) == 107
    directory = Path("/" + "é" * (room // 2 + 1))
    with pytest.raises(BadRequest) as caught:
        BrokerPaths(directory, "x")
    error = caught.value
    assert str(error) == (
        f"the socket path {directory}/x.session has {error.length} bytes and may have 107; name "
        "a shorter directory with --dir or WEIGHT_BROKER_DIR, or give the broker a shorter name"
    )
    assert error.length == len(os.fsencode(error.path)) > 107
    assert error.limit == 107


# --- finding a broker ---------------------------------------------------------------------------


def test_broker_is_found(tmp_path: Path) -> None:
    """A client finds the socket in the second directory when the first is not there."""
    directory = tmp_path / f"tmp/weight-broker-{UID}"
    directory.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(directory / "x.session"))
        found = find_brokers("x", environ={}, uid=UID, root=tmp_path)
        assert found == [BrokerPaths(directory, "x")]


def test_broker_is_not_found(tmp_path: Path) -> None:
    """Every path tried is listed with what was there, and a file does not pass for a socket."""
    directory = tmp_path / f"tmp/weight-broker-{UID}"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "x.session").touch()
    with pytest.raises(BrokerNotFound) as caught:
        find_brokers("x", environ={}, uid=UID, root=tmp_path)
    first, second = (path / "x.session" for path in candidate_directories({}, UID, tmp_path))
    assert str(caught.value) == (
        f"no broker named 'x' is running: tried {first} (no such directory), {second} (no such "
        "socket); start it with `weight-broker serve --name x`, or set WEIGHT_BROKER_DIR to its "
        "directory"
    )
    assert caught.value.tried == [str(first), str(second)]


def test_directory_given(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a directory given no other is tried."""
    monkeypatch.setenv("WEIGHT_BROKER_DIR", "/nowhere")
    with pytest.raises(BrokerNotFound) as caught:
        find_brokers(directory=private)
    assert caught.value.tried == [str(private / "default.session")]
    assert str(caught.value).endswith(
        f"start it with `weight-broker serve --dir {private}`, or name the directory in which it "
        "was started"
    )


def test_not_found_after_a_refused_connection() -> None:
    """A client whose connection is refused can say so in the same words."""
    error = broker_not_found("default", [(Path("/run/wb/default.session"), "nobody listens")])
    assert str(error) == (
        "no broker named 'default' is running: tried /run/wb/default.session (nobody listens); "
        "start it with `weight-broker serve`, or set WEIGHT_BROKER_DIR to its directory"
    )
