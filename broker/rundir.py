"""Where a broker and its clients meet: the private directory, and the names in it.

The directory is `$WEIGHT_BROKER_DIR`, else `/run/user/<uid>/weight-broker` (for root
`/run/weight-broker`) where its parent exists, else `/tmp/weight-broker-<uid>`. It must be ours, a
directory itself and closed to everybody else; both sides check that, because whoever can put a
socket there can pass for the broker. Its parent is trusted: `/run/user/<uid>` is ours, and in
`/tmp` the sticky bit keeps others from replacing what is ours. A broker that is shared with a group
(`serve --group`) has a directory that the group may enter and its own user alone may write to.

In it lie `<name>.zmq` (conversation), `<name>.session` (sessions) and `<name>.lock` (name_lock.py).

Calls here touch the file system and block no longer than that. Imports neither torch nor zmq.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from broker.errors import BadRequest, BrokerNotFound

DIRECTORY_VARIABLE = "WEIGHT_BROKER_DIR"
NAME_VARIABLE = "WEIGHT_BROKER_NAME"
DEFAULT_NAME = "default"
MAX_NAME_LENGTH = 64
MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` has 108 bytes, one of them for the closing NUL (unix(7))."""

_ROOT = Path("/")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_OPTION = f"with --dir or {DIRECTORY_VARIABLE}"
_ELSEWHERE = f"name another one {_OPTION}"


# --- the directory ------------------------------------------------------------------------------


def candidate_directories(
    environ: Mapping[str, str] | None = None, uid: int | None = None, root: Path = _ROOT
) -> list[Path]:
    """Where a broker of this user may be, likeliest first. Looks at nothing on the disk.

    Args:
        environ: the environment to read; `None`: this process's.
        uid: whose broker; `None`: this process's effective user.
        root: what stands for "/"; for tests.

    Raises:
        BadRequest: the variable holds a relative path, which would mean another directory to
            every process.
    """
    given = (os.environ if environ is None else environ).get(DIRECTORY_VARIABLE)
    if given:
        if not given.startswith("/"):
            raise BadRequest(
                f"{DIRECTORY_VARIABLE}={given!r} is a relative path: give the whole path",
                path=given,
            )
        return [Path(given)]
    uid = _uid(uid)
    run = root / "run" / "weight-broker" if uid == 0 else root / f"run/user/{uid}/weight-broker"
    return [run, root / "tmp" / f"weight-broker-{uid}"]


def broker_directory(
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
    root: Path = _ROOT,
    *,
    group: int | None = None,
) -> Path:
    """The directory to serve in: created with mode 0700 if it is not there, then checked.

    Args:
        group: members of this group may enter it: it gets that group and mode 0750.

    Raises:
        BadRequest: it cannot be created, or is not ours alone; nothing was changed.
    """
    candidates = candidate_directories(environ, uid, root)
    directory = next((path for path in candidates if path.parent.is_dir()), candidates[-1])
    try:
        # If something is there, ours from an earlier run or somebody's trap, the check tells.
        with suppress(FileExistsError):
            directory.mkdir(0o700)
    except OSError as error:
        raise BadRequest(
            f"the broker's directory {directory} cannot be created ({error.strerror}); "
            f"{_ELSEWHERE}",
            path=str(directory),
        ) from error
    is_private_directory(directory, uid, group)
    if group is not None:
        share_with_group(directory, group, 0o750)
    return directory


def share_with_group(path: Path, group: int, mode: int) -> None:
    """Give a directory or socket of ours to a group.

    Raises:
        BadRequest: we are not a member of the group.
    """
    try:
        os.chown(path, -1, group, follow_symlinks=False)
        os.chmod(path, mode)  # noqa: PTH101
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be given to group {group} ({error.strerror}): only a member of the "
            "group, or root, can share with it",
            path=str(path),
            group=group,
        ) from error


def is_private_directory(directory: Path, uid: int | None = None, group: int | None = None) -> bool:
    """Whether the directory is there; if it is, it is ours and closed to others.

    Looks through one descriptor that follows no link, so what is checked is one thing.

    Args:
        group: it may also be of another user who shares it with this group, and the group may
            enter it; nobody but its user may write to it.

    Raises:
        BadRequest: it is a link, no directory, somebody else's, or open to others; fields `path`,
            `owner` (uid) and `mode` (octal).
    """
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise BadRequest(
            f"the broker's directory {directory} cannot be looked at ({error.strerror}); "
            f"{_ELSEWHERE}",
            path=str(directory),
        ) from error
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    _check_private(directory, status, _uid(uid), group)
    return True


def _check_private(directory: Path, status: os.stat_result, uid: int, group: int | None) -> None:
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    is_shared = group is not None and status.st_gid == group
    closed = 0o027 if is_shared else 0o077
    cure = _ELSEWHERE
    if stat.S_ISLNK(status.st_mode):
        fault = "is a symbolic link, which somebody could turn elsewhere"
    elif not stat.S_ISDIR(status.st_mode):
        fault = "is not a directory"
    elif status.st_uid != uid and not is_shared:
        fault = f"belongs to uid {status.st_uid} (mode {mode}) and not to us, uid {uid}"
    elif status.st_mode & closed:
        fault = f"is open to others (owner uid {status.st_uid}, mode {mode})"
        cure = _cure_of_open(directory, status, uid)
    else:
        return
    raise BadRequest(
        f"the broker's directory {directory} {fault}; {cure}",
        path=str(directory),
        owner=status.st_uid,
        mode=mode,
    )


def _cure_of_open(directory: Path, status: os.stat_result, uid: int) -> str:
    """Others may need one that all may write to, or root's: closing it can break a machine."""
    is_common = bool(status.st_mode & (stat.S_ISVTX | stat.S_IWOTH))
    if is_common or status.st_uid != uid or uid == 0:
        return f"name one of your own {_OPTION}, such as {directory / f'weight-broker-{uid}'}"
    return f"chmod 700 closes it, or {_ELSEWHERE}"


def _uid(uid: int | None) -> int:
    return os.geteuid() if uid is None else uid


# --- names --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokerPaths:
    """The files of the broker called `name` in `directory`.

    Raises:
        BadRequest: the name is not one, or a socket's path would be too long.
    """

    directory: Path
    name: str = DEFAULT_NAME
    group: int | None = None
    """Members of this group may use it too."""

    def __post_init__(self) -> None:
        check_name(self.name)
        for path in (self.zmq, self.session):
            length = len(os.fsencode(path))
            if length > MAX_SOCKET_PATH_BYTES:
                raise BadRequest(
                    f"the socket path {path} has {length} bytes and may have "
                    f"{MAX_SOCKET_PATH_BYTES}; name a shorter directory with --dir or "
                    f"{DIRECTORY_VARIABLE}, or give the broker a shorter name",
                    path=str(path),
                    length=length,
                    limit=MAX_SOCKET_PATH_BYTES,
                )

    @property
    def zmq(self) -> Path:
        return self.directory / f"{self.name}.zmq"

    @property
    def session(self) -> Path:
        return self.directory / f"{self.name}.session"

    @property
    def lock(self) -> Path:
        return self.directory / f"{self.name}.lock"


def default_name(environ: Mapping[str, str] | None = None) -> str:
    """Which broker is meant where nothing says so: $WEIGHT_BROKER_NAME, else "default"."""
    return (os.environ if environ is None else environ).get(NAME_VARIABLE) or DEFAULT_NAME


def check_name(name: str) -> None:
    """Raise `BadRequest` unless `name` can be part of a file's name anywhere."""
    if len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) and name not in (".", ".."):
        return
    shown = ascii(name[:MAX_NAME_LENGTH])
    raise BadRequest(
        f"{shown} cannot be a broker's name: use 1 to {MAX_NAME_LENGTH} ASCII letters, digits, "
        "dots, dashes or underscores",
        name=name[:MAX_NAME_LENGTH],
    )


def find_brokers(
    name: str = DEFAULT_NAME,
    directory: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    uid: int | None = None,
    root: Path = _ROOT,
    group: int | None = None,
) -> list[BrokerPaths]:
    """Where a broker `name` has its sockets, likeliest first, for a client. Connects to nothing.

    A broker that was killed leaves its sockets behind: a client that is refused at one place tries
    the next, and at the end raises `broker_not_found` itself.

    Args:
        directory: the only directory to look in; `None`: every candidate.
        group: the directory may be another user's who shares it with this group.

    Raises:
        BrokerNotFound: there is no session socket in any directory; names all that were tried.
        BadRequest: a directory that had to be tried is not private, or the name is not one.
    """
    candidates = candidate_directories(environ, uid, root) if directory is None else [directory]
    tried, found = [], []
    for candidate in candidates:
        paths = BrokerPaths(candidate, name, group)
        if not is_private_directory(candidate, uid, group):
            tried.append((paths.session, "no such directory"))
        elif not _is_socket(paths.session):
            tried.append((paths.session, "no such socket"))
        else:
            found.append(paths)
    if not found:
        raise broker_not_found(name, tried, directory)
    return found


def broker_not_found(
    name: str, tried: Iterable[tuple[Path, str]], directory: Path | None = None
) -> BrokerNotFound:
    """The error for a client that found no broker: each socket path tried, and what was there.

    Args:
        directory: the only one that was looked in, because the caller named it.
    """
    attempts = list(tried)
    places = ", ".join(f"{path} ({why})" for path, why in attempts)
    option = "" if name == DEFAULT_NAME else f" --name {name}"
    instead = f"set {DIRECTORY_VARIABLE} to its directory"
    if directory is not None:
        option += f" --dir {directory}"
        instead = "name the directory in which it was started"
    return BrokerNotFound(
        f"no broker named {name!r} is running: tried {places}; start it with `weight-broker "
        f"serve{option}`, or {instead}",
        name=name,
        tried=[str(path) for path, _ in attempts],
    )


def _is_socket(path: Path) -> bool:
    mode = mode_of(path)
    return mode is not None and stat.S_ISSOCK(mode)


def mode_of(path: Path) -> int | None:
    """What lies at the path itself, `None` if nothing does."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be looked at ({error.strerror})", path=str(path)
        ) from error
