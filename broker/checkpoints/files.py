"""Which files a checkpoint consists of, opened relative to its folder.

Client and loader decide alike, each for itself, because the folder alone decides:

1. the one file that was named, if a file was named (an index counts as the files it names);
2. `model.safetensors`, also where an index lies beside it (transformers looks in this order too);
3. `model.safetensors.index.json`, and if that is broken nothing else;
4. `model-00001-of-0000N.safetensors` without an index, if all N are there;
5. the one other `*.safetensors`, if there is exactly one and it is no variant.

Only whole names at the top level count: no subfolder, no variant (`model.fp16.safetensors`), no
`._model.safetensors` that a Mac left behind. Links are followed, for a Hugging Face cache is made
of them, but what they lead to must be a regular file.

Part of the client's torch-free core: imports neither zmq nor torch.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass, field

import msgspec

from broker.checkpoints.faults import load_failed, quoted, system_refused, told_of
from broker.checkpoints.index import (
    PICKLE_SUFFIXES,
    SHARD_SUFFIX,
    check_plain_name,
    read_index,
)
from broker.closing import Closeable
from broker.errors import NotFound

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_VARIANT = re.compile(r"model\..+\.safetensors")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.json)(?<!\.safetensors)")
_NAMES_SHOWN = 8
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class WeightFiles(msgspec.Struct, frozen=True):
    """The files of a checkpoint: plain names in its folder.

    Attributes:
        index: the index, if one decided.
        shards: the weight files, each once, in the order of their names.
        weight_map: tensor name to shard name as the index has it; None without an index.
        total_size: bytes of all weights as the index has it, if it has a number. Advisory: often
            stale, a float, or absent.
        index_digest: BLAKE3 in hex of the index as it was decoded.
    """

    index: str | None
    shards: list[str]
    weight_map: dict[str, str] | None = None
    total_size: float | None = None
    index_digest: str = ""

    @property
    def names(self) -> list[str]:
        """Every file whose bytes decide what is loaded: the index, then the shards."""
        return ([] if self.index is None else [self.index]) + self.shards


@dataclass
class OpenCheckpoint(Closeable):
    """A checkpoint found by path. Owns the folder's descriptor until `close`.

    Attributes:
        folder: an open directory, close-on-exec; the files are opened relative to it.
        path: the path as given, printable, for messages.
        only: the file's name, if the path was that of one file.
        files: what the checkpoint consists of.
    """

    folder: int
    path: str
    only: str | None
    files: WeightFiles = field(repr=False)

    def close(self) -> None:
        """Close the folder. Idempotent."""
        folder, self.folder = self.folder, -1
        if folder >= 0:
            os.close(folder)


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Find a checkpoint: a folder, one safetensors file or an index. Reads no weights.

    Raises:
        NotFound: nothing is there by that path, or a folder without weights (`reason`
            "no_weights").
        LoadFailed: it may not be opened, or there is nothing that could be loaded (`reason`:
            "unreadable", "not_a_file", "unsafe_pickle", "bad_index", …).
    """
    given = os.fspath(path)
    shown = os.fsencode(given).decode("utf-8", "backslashreplace")
    folder, only = _open_folder(given, shown)
    try:
        with told_of(shown):
            return OpenCheckpoint(folder, shown, only, weight_files(folder, only, shown))
    except BaseException:
        os.close(folder)
        raise


def _open_folder(given: str, shown: str) -> tuple[int, str | None]:
    try:
        mode = os.stat(given).st_mode
        directory, only = (given, None) if stat.S_ISDIR(mode) else os.path.split(given)
        if only is not None and not stat.S_ISREG(mode):
            raise load_failed(
                "not_a_file", f"{quoted(shown)} is neither a folder nor a regular file", file=shown
            )
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return os.open(directory or ".", flags), only
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _NOTHING_THERE:
            raise system_refused(error, shown, "opening") from error
        raise NotFound(
            f"there is no checkpoint {quoted(shown)}: no such file or folder; {_cure(shown)}",
            path=shown,
        ) from error


def _cure(path: str) -> str:
    """What to do about a path that leads to nothing."""
    if path.startswith("~"):
        return "`~` is not expanded here: give the whole path"
    if _HUB_ID.fullmatch(path):
        return (
            "check the path; if it is the id of a model on a hub, download it first: only local "
            "folders are read"
        )
    return "check the path"


def weight_files(folder: int, only: str | None, path: str) -> WeightFiles:
    """The files of the checkpoint in an open folder. `path` is for messages only.

    Raises:
        LoadFailed: nothing that could be loaded, or not clear what; shards that are missing are
            named all at once. Only an index is read.
    """
    if only is not None:
        check_plain_name(only, path)
        _refuse_pickle_name(only, path)
        return _by_index(folder, only) if only.endswith(INDEX_SUFFIX) else _single(folder, only)
    names = _list(folder, path)
    if SINGLE_FILE in names:
        return _single(folder, SINGLE_FILE)
    if INDEX_FILE in names:
        return _by_index(folder, INDEX_FILE)
    numbered = _numbered_shards(names, path)
    if numbered:
        return WeightFiles(None, numbered)
    others = [name for name in names if _could_be_the_weights(name)]
    if len(others) == 1:
        return _single(folder, others[0])
    raise _undecided(names, others, path)


def open_regular(folder: int, name: str) -> int:
    """Open a file of the checkpoint for reading; the caller owns the descriptor (close-on-exec).

    Never blocks on a FIFO or device, which are refused.

    Raises:
        LoadFailed: missing, not permitted, or not a regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except (OSError, ValueError) as error:
        failure = error if isinstance(error, OSError) else OSError(str(error))
        raise system_refused(failure, name, "opening") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise load_failed("not_a_file", f"{quoted(name)} is not a regular file", file=name)


def _single(folder: int, name: str) -> WeightFiles:
    os.close(open_regular(folder, name))
    return WeightFiles(None, [name])


def _by_index(folder: int, name: str) -> WeightFiles:
    descriptor = open_regular(folder, name)
    try:
        index = read_index(descriptor, name)
    finally:
        os.close(descriptor)
    shards = sorted(set(index.weight_map.values()))
    return WeightFiles(name, shards, index.weight_map, index.total_size, index.digest)


def _list(folder: int, path: str) -> list[str]:
    """Names in the folder, sorted. Through a descriptor of our own: the position in a directory is
    shared by all who hold the same one, and the client's is also the loader's."""
    try:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            with os.scandir(descriptor) as entries:
                return sorted(entry.name for entry in entries)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise system_refused(error, path, "listing") from error


def _numbered_shards(names: list[str], path: str) -> list[str]:
    """All shards `model-00001-of-N` of one N, or nothing if there is no such file.

    Raises:
        LoadFailed: some are missing, or those of several N lie together.
    """
    found = [match for match in map(_SHARD.fullmatch, names) if match]
    totals = sorted({match[2] for match in found})
    if not totals:
        return []
    if len(totals) > 1:
        raise load_failed(
            "ambiguous_files",
            f"checkpoint {quoted(path)} has shards of {' and of '.join(totals)} without an index; "
            "give the index or the path of one file",
            file=found[0][0],
        )
    expected = [f"model-{number:05}-of-{totals[0]}.safetensors" for number in _numbers(totals[0])]
    missing = sorted(set(expected) - {match[0] for match in found})
    if missing:
        raise _missing_shards(missing, path)
    return expected


def _numbers(total: str) -> range:
    return range(1, int(total) + 1)


def require_shards(folder: int, files: WeightFiles, path: str) -> None:
    """Refuse, naming all of them, if shards are missing.

    Raises:
        LoadFailed: `reason` "missing_shard", all names in `missing`.
    """
    missing = [name for name in files.shards if not _exists(folder, name)]
    if missing:
        raise _missing_shards(missing, path)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise system_refused(error, name, "looking at") from error
    return True


def _missing_shards(missing: list[str], path: str) -> Exception:
    shown = ", ".join(missing[:_NAMES_SHOWN])
    more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
    return load_failed(
        "missing_shard",
        f"checkpoint {quoted(path)} lacks {shown}{more}; download it again",
        file=missing[0],
        missing=missing[:100],
    )


def _could_be_the_weights(name: str) -> bool:
    hidden = name.startswith(".")
    return name.endswith(SHARD_SUFFIX) and not hidden and not _VARIANT.fullmatch(name)


def _refuse_pickle_name(name: str, path: str) -> None:
    if name.endswith(PICKLE_SUFFIXES):
        raise _only_pickles([name], path)


def _only_pickles(names: list[str], path: str) -> Exception:
    return load_failed(
        "unsafe_pickle",
        f"checkpoint {quoted(path)} has its weights only in {_some(names)}: loading that would run "
        "code from the file, so it is refused; if you trust it, convert it to safetensors: for "
        "a class of transformers, from_pretrained and then save_pretrained into another folder",
        file=names[0],
    )


def _undecided(names: list[str], others: list[str], path: str) -> Exception:
    if others:
        return load_failed(
            "ambiguous_files",
            f"checkpoint {quoted(path)} has {_some(others)} but neither {SINGLE_FILE} nor "
            f"{INDEX_FILE}; give the path of the file that is meant",
            file=others[0],
        )
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return _only_pickles(pickles, path)
    found = "it is empty"
    if names:
        found = f"it has no safetensors weights at its top level, only {_some(names)}"
    return NotFound(
        f"there is no checkpoint in {quoted(path)}: {found}; give the folder that has "
        f"{SINGLE_FILE}, or the path of one file",
        reason="no_weights",
        file=path,
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(quoted, names[:_NAMES_SHOWN]))
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
