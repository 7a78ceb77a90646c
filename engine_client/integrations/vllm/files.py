"""Which files vLLM would load, and whose content that is. Opens no weight file to recognise them.

A folder's weight files are recognised by what the kernel says of them (device, inode, size, times
in nanoseconds): equal stamps mean equal bytes. Their *content identity*, by which the same bytes
in two folders are the same weights, takes reading every byte; it is only worked out when nobody
has published from these very files.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from broker.checkpoints.faults import system_refused
from broker.checkpoints.files import INDEX_SUFFIX, OpenCheckpoint, open_checkpoint
from broker.checkpoints.plan import plan_checkpoint
from broker.checkpoints.reading import Progress, hash_pieces
from broker.errors import LoadFailed

_MAX_LABEL = 80

Stamp = tuple[str, int, int, int, int, int]
"""Name, device, inode, size, mtime and ctime in nanoseconds."""


class Files(NamedTuple):
    """The weight files of one folder, as they were when they were looked at."""

    path: str
    shards: tuple[str, ...]
    stamps: tuple[Stamp, ...]

    @property
    def name(self) -> str:
        """The name under which a set published from these very files is found again.

        For `status`, it begins with the folder's own.
        """
        digest = blake3(msgspec.msgpack.encode(self.stamps)).hexdigest()
        return f"vllm:{_label(self.path)}:{digest[:32]}"


def look_at(path: str, shards: Iterable[str]) -> Files:
    """Stamps of a checkpoint's files, its index included. Opens none of them.

    Args:
        shards: names of the weight files that vLLM would load from the folder.

    Raises:
        LoadFailed: one of them is not there, or may not be looked at.
    """
    names = tuple(sorted(shards))
    try:
        indices = [at.name for at in Path(path).iterdir() if at.name.endswith(INDEX_SUFFIX)]
        stamps = tuple(_stamp(path, name) for name in (*names, *sorted(indices)))
    except OSError as error:
        raise system_refused(error, path, "looking at") from error
    return Files(path, names, stamps)


def content_identity(files: Files, threads: int, progress: Progress) -> str:
    """Read and digest every byte: "blake3:…", the broker's own identity of this checkpoint.

    Raises:
        NotFound, LoadFailed: it is damaged, consists of other files than vLLM would load, or is not
            any more what was looked at.
    """
    with open_checkpoint(files.path) as opened:
        _require_same_choice(opened, files)
        plan = plan_checkpoint(opened.folder, opened.only, opened.path)
        identity = hash_pieces(plan, opened.folder, threads, progress).checkpoint
    require_unchanged(files)
    return identity


def require_unchanged(files: Files) -> None:
    """Refuse if the files are not what they were: what was read meanwhile may be of both versions.

    Raises:
        LoadFailed: they changed.
    """
    if look_at(files.path, files.shards) != files:
        raise LoadFailed(
            f"the weight files of {files.path} changed while they were being read; nothing of them "
            "is kept, start again when the checkpoint is complete",
            reason="changed",
            file=files.path,
        )


def _stamp(path: str, name: str) -> Stamp:
    status = os.stat(os.path.join(path, name))
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (name, status.st_dev, status.st_ino, status.st_size, *times)


def _require_same_choice(opened: OpenCheckpoint, files: Files) -> None:
    odd = sorted(set(files.shards) ^ set(opened.files.shards))
    if odd:
        raise LoadFailed(
            f"{opened.path}: vLLM would load other files than this checkpoint consists of "
            f"({', '.join(odd)}); move what does not belong to it out of the folder",
            reason="ambiguous",
            file=opened.path,
        )


def _label(path: str) -> str:
    """A folder's name for people; of a Hugging Face cache the model's, not the revision's."""
    for part in reversed(Path(path).absolute().parts):
        if part.startswith("models--"):
            part = part.removeprefix("models--").replace("--", "/")
        elif re.fullmatch("[0-9a-f]{40}|snapshots", part):
            continue
        return "".join(character for character in part if character.isprintable())[:_MAX_LABEL]
    return "model"
