"""Who is at the other end of a socket, and whom broker and client take for their own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from broker.credentials import (
    Access,
    Credentials,
    group_id,
    own_access,
    peer_credentials,
    trusted_group,
)
from broker.errors import BadRequest
from broker.listeners import create_listener
from broker.rundir import broker_directory, is_private_directory

OURS, OTHER, GROUP = 1000, 1001, 50


def test_ourselves() -> None:
    """The kernel names this very process at both ends of a pair, and its groups."""
    one, other = socket.socketpair()
    with one, other:
        peer = peer_credentials(one)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())
    assert peer.groups == set(os.getgroups())
    assert own_access().admits(peer)


@pytest.mark.parametrize(
    ("peer", "private", "shared"),
    [
        (Credentials(1, OURS, OURS), True, True),
        (Credentials(1, 0, 0), True, True),
        (Credentials(1, OTHER, OTHER), False, False),
        (Credentials(1, OTHER, GROUP), False, True),
        (Credentials(1, OTHER, OTHER, frozenset({7, GROUP})), False, True),
        (Credentials(1, OTHER, OTHER, frozenset({7})), False, False),
        (Credentials(0, 65534, 65534), False, False),
    ],
)
def test_who_is_admitted(peer: Credentials, private: bool, shared: bool) -> None:
    """Our own user and root always; members of the group, by either kind of group, if there is one;
    an id that our user namespace does not know never."""
    assert Access(OURS).admits(peer) is private
    assert Access(OURS, GROUP).admits(peer) is shared
    assert Access(OURS, GROUP).is_own(peer.uid) is private


def test_what_access_is_called() -> None:
    """Sentences name the user, root, and the group."""
    assert str(Access(OURS)) == "uid 1000, root"
    assert str(Access(OURS, GROUP)) == "uid 1000, root and group 50"


def test_groups_by_name_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number needs no entry anywhere; a name that nobody knows is refused."""
    assert group_id("54321") == 54_321
    assert group_id("root") == 0
    with pytest.raises(BadRequest, match="there is no group 'nobody at all' on this machine"):
        group_id("nobody at all")
    for name in ("\0", "\ud800"):
        with pytest.raises(BadRequest, match=r"there is no group '\\"):
            group_id(name)
    for digits in (str((1 << 32) - 1), "99999999999999", "9" * 5000):
        with pytest.raises(BadRequest, match=r"there can be no group '\d+': the largest number"):
            group_id(digits)
    monkeypatch.delenv("WEIGHT_BROKER_GROUP", raising=False)
    assert trusted_group() is None
    monkeypatch.setenv("WEIGHT_BROKER_GROUP", "54321")
    assert trusted_group() == 54_321


# --- directories of a group ---------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    broker_directory({"WEIGHT_BROKER_DIR": str(path)}, group=os.getegid())
    return path


def test_directory_that_is_shared(directory: Path) -> None:
    """It gets the group and mode 0750; who is told of the group accepts it, who is not does not."""
    assert directory.stat().st_mode & 0o777 == 0o750
    assert directory.stat().st_gid == os.getegid()
    assert is_private_directory(directory, group=os.getegid())
    assert is_private_directory(directory, uid=os.geteuid() + 1, group=os.getegid())
    for group in (None, os.getegid() + 1):
        with pytest.raises(BadRequest, match="is open to others"):
            is_private_directory(directory, group=group)
        with pytest.raises(BadRequest, match="belongs to uid"):
            is_private_directory(directory, uid=os.geteuid() + 1, group=group)


@pytest.mark.parametrize("mode", [0o770, 0o755, 0o751, 0o777])
def test_shared_directory_that_is_too_open(directory: Path, mode: int) -> None:
    """The group may enter and read, nothing more, and others nothing."""
    directory.chmod(mode)
    with pytest.raises(BadRequest, match=f"mode {mode:04o}"):
        is_private_directory(directory, group=os.getegid())


def test_socket_that_is_shared(directory: Path) -> None:
    """Members of the group may connect."""
    with create_listener(directory / "s", socket.SOCK_STREAM, os.getegid()):
        assert (directory / "s").stat().st_mode & 0o777 == 0o660


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give away to any group")
def test_group_we_are_not_in(tmp_path: Path) -> None:
    """Only a member of a group can share with it."""
    with pytest.raises(BadRequest, match="only a member of the group, or root"):
        broker_directory({"WEIGHT_BROKER_DIR": str(tmp_path / "x")}, group=54_321)
