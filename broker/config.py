"""How a broker is to run. Plain data and its validation."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from broker.credentials import group_id
from broker.device_names import AUTO, is_simulated, means_gpus
from broker.errors import BadRequest
from broker.journal.file import LEAST_BYTES
from broker.limits import Limits
from broker.logs import LOG_FORMATS
from broker.rundir import (
    DEFAULT_NAME,
    DIRECTORY_VARIABLE,
    BrokerPaths,
    candidate_directories,
    check_name,
)

RESERVE_FRACTION = 1 / 16
"""Of what is free at the start, left alone when no --memory-limit is given: for engines' own
contexts and activations."""

MOST_LOADER_THREADS = 1024
"""More readers than any disk serves, and fewer than a process may have threads."""
MOST_BYTES = (1 << 63) - 1
"""Of any size: what a signed number of 64 bits holds, as messages and journals have them."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_NONE = type(None)
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "name": ((str,), "text"),
    "directory": ((str, os.PathLike, _NONE), "a path or None"),
    "device": ((str,), 'text, such as "cuda:0"'),
    "memory_limit": ((str, _NONE), 'text, such as "8g" or "80%", or None'),
    "allow_loaders": ((bool,), "True or False"),
    "loader_threads": ((int,), "a whole number"),
    "limits": ((Limits,), "a broker.limits.Limits"),
    "group": ((int, _NONE), "the number of a group or None"),
    "log_format": ((str,), "text"),
    "metrics": ((str, _NONE), 'text, such as "127.0.0.1:9464", or None'),
    "journal_limit": ((int,), "a whole number of bytes"),
}
"""What each field may be, and how a sentence says so."""


@dataclass(frozen=True)
class BrokerConfig:
    """Everything `weight-broker serve` can be told.

    Attributes:
        name: which broker of this directory; engines name it to find it.
        directory: where the sockets are; None: $WEIGHT_BROKER_DIR or the documented defaults.
        device: "auto" or "cuda" (every GPU this process sees, CUDA or ROCm), GPUs by number
            ("cuda:1") or UUID, several separated by commas; or "simulated".
        memory_limit: bytes per device ("8g", "1048576"), a share of its memory ("80%"), or None:
            what is free at the start less a sixteenth.
        preload: checkpoints to load at the start, on every device, and keep.
        allow_loaders: run loaders that engines ship. Off: they are refused.
        loader_threads: threads that read in one loader process.
        limits: what peers may use (limits.py).
        group: number of the group whose members may use this broker too; None: only our own user.
        log_format: one of `LOG_FORMATS` (logs.py).
        metrics: IP address and port where Prometheus may fetch metrics (metrics/); None: nowhere.
        journal_limit: bytes that the journal's files may have together (journal/); 0: no journal.

    Raises:
        BadRequest: a value that cannot be.
    """

    name: str = DEFAULT_NAME
    directory: str | os.PathLike[str] | None = None
    device: str = AUTO
    memory_limit: str | None = None
    preload: tuple[str | os.PathLike[str], ...] = ()
    allow_loaders: bool = False
    loader_threads: int = 2
    limits: Limits = field(default_factory=Limits)
    group: int | None = None
    log_format: str = LOG_FORMATS[0]
    metrics: str | None = None
    journal_limit: int = 4 << 20

    def __post_init__(self) -> None:
        for name, (types, said) in _TYPES.items():
            _check_type(name, getattr(self, name), types, said)
        _check_preload(self.preload)
        self._check_places()
        check_device(self.device)
        if self.loader_threads < 1:
            raise BadRequest("--loader-threads must be at least 1", setting="loader-threads")
        if self.loader_threads > MOST_LOADER_THREADS:
            raise BadRequest(
                f"--loader-threads must be at most {MOST_LOADER_THREADS}", setting="loader-threads"
            )
        if self.metrics is not None:
            from broker.metrics.address import parse_address

            parse_address(self.metrics)
        memory_limit_bytes(self.memory_limit, free_bytes=0, total_bytes=1)
        if self.log_format not in LOG_FORMATS:
            raise BadRequest(
                f"--log-format {self.log_format!r}: choose {' or '.join(LOG_FORMATS)}",
                setting="log-format",
            )
        if self.group is not None:
            group_id(str(self.group))
        _check_journal(self.journal_limit, self.journal_limit)

    def _check_places(self) -> None:
        """Name and paths, without a look at the disk."""
        if self.directory == "":
            raise BadRequest("--dir is empty: name a directory, or leave it off", setting="dir")
        _check_path("dir", "" if self.directory is None else os.fspath(self.directory))
        for path in self.preload:
            _check_path("preload", os.fspath(path))
        try:
            check_name(self.name)
        except BadRequest as error:
            raise BadRequest(error.sentence, setting="name") from error
        whole = None if self.directory is None else str(Path(self.directory).absolute())
        for candidate in candidate_directories({DIRECTORY_VARIABLE: whole} if whole else None):
            BrokerPaths(candidate, self.name)  # a path that is too long


def _check_type(name: str, given: object, types: tuple[type, ...], said: str) -> None:
    is_bool = isinstance(given, bool) and bool not in types  # which Python takes for a number
    is_bytes = isinstance(given, os.PathLike) and not isinstance(given.__fspath__(), str)
    if is_bool or is_bytes or not isinstance(given, types):
        raise BadRequest(f"BrokerConfig: {name} must be {said}, not {given!r:.100}")


def _check_preload(given: object) -> None:
    """One path alone would be taken letter by letter."""
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        raise BadRequest(
            f'BrokerConfig: preload must be a tuple of paths, ("/models/m",), not {given!r:.100}'
        )
    for path in given:
        _check_type("each path of preload", path, (str, os.PathLike), "a path")


def _check_path(setting: str, path: str) -> None:
    if "\0" in path:
        raise BadRequest(f"--{setting} {path!r}: no path has a NUL in it", setting=setting)


def memory_limit_bytes(text: str | None, *, free_bytes: int, total_bytes: int) -> int:
    """Bytes a broker may hold on a device of this much memory.

    Raises:
        BadRequest: neither bytes (with k, m, g or t for powers of 1024) nor a percentage.
    """
    if text is None:
        return int(free_bytes * (1 - RESERVE_FRACTION))
    word = text.strip().lower()
    is_share = word.endswith("%")
    try:
        number = float(word[:-1]) if is_share else _bytes(word)
        int(number)  # refuses what is not finite
    except (ValueError, KeyError, OverflowError) as error:
        raise _no_limit(text, "that is no number of bytes") from error
    if number <= 0 or (not is_share and number < 1):
        raise _no_limit(text, "no weights at all would fit")
    if not is_share and number > MOST_BYTES:
        raise _no_limit(text, f"{MOST_BYTES} bytes is the most")
    if is_share and number > 100:
        raise _no_limit(text, "that is more memory than a device has")
    return int(total_bytes * number / 100) if is_share else int(number)


def journal_bytes(text: str) -> int:
    """Bytes that a journal may take, from `--journal-limit`.

    Raises:
        BadRequest: no number of bytes, or more than none and still too few.
    """
    try:
        nbytes = int(_bytes(text.strip().lower()))
    except (ValueError, KeyError, OverflowError) as error:
        raise _no_journal(text, "that is no number of bytes") from error
    _check_journal(nbytes, text)
    return nbytes


def _check_journal(nbytes: int, given: str | int) -> None:
    if nbytes > MOST_BYTES:
        raise _no_journal(given, f"{MOST_BYTES} bytes is the most")
    if nbytes != 0 and nbytes < LEAST_BYTES:
        raise _no_journal(given, f"a journal needs {LEAST_BYTES} bytes")


def _no_journal(given: str | int, why: str) -> BadRequest:
    return BadRequest(
        f"--journal-limit {given!r}: {why}; give bytes (4194304, 4m, 512k), or 0 for no journal",
        setting="journal-limit",
    )


def _bytes(word: str) -> float:
    digits = word.rstrip("bi").rstrip("kmgt")
    return float(digits) * _UNITS[word[len(digits) :].rstrip("bi")]


def _no_limit(text: str, why: str) -> BadRequest:
    return BadRequest(
        f"--memory-limit {text!r}: {why}; give bytes (8589934592, 8g, 512m) or a share of each "
        "device's memory, up to 100%",
        setting="memory-limit",
    )


def check_device(device: str) -> None:
    """Raise `BadRequest` unless the name, or each of several, is one that a device can have."""
    if not is_simulated(device) and not means_gpus(device):
        raise BadRequest(
            f"--device {device!r}: choose auto, cuda or simulated, or name GPUs by number (cuda:1) "
            "or UUID, several separated by commas",
            setting="device",
        )
