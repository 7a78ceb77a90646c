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

from broker.checkpoints.files import OpenCheckpoint, open_checkpoint
from broker.checkpoints.plan import plan_checkpoint
from broker.checkpoints.reading import Progress, hash_pieces
from broker.errors import LoadFailed

_MAX_LABEL = 80

Stamp = tuple[str, int, int, int, int, int]
"""Name, device, inode, size, mtime and ctime in nanoseconds."""


class Files(NamedTuple):
    """The weight files of one folder, as they were when they were looked at."""

    path: str
    stamps: tuple[Stamp, ...]

    @property
    def name(self) -> str:
        """The name under which a set published from these very files is found again.

        For `status`, it begins with the folder's own.
        """
        digest = blake3(msgspec.msgpack.encode(self.stamps)).hexdigest()
        return f"vllm:{_label(self.path)}:{digest[:32]}"


def look_at(path: str, vllm_loads: Iterable[str]) -> Files:
    """The weight files of a folder. Reads the folder and the index; blocks on the file system.

    Args:
        vllm_loads: the names of the files that vLLM would load from there.

    Raises:
        NotFound, LoadFailed: no usable checkpoint there, or not the files that vLLM would load.
    """
    with open_checkpoint(path) as opened:
        _require_same_choice(opened, set(vllm_loads))
        return _stamped(opened)


def content_identity(files: Files, threads: int, progress: Progress) -> str:
    """Read and digest every byte: "blake3:…", the broker's own identity of this checkpoint.

    Raises:
        LoadFailed: the checkpoint is damaged, or not any more what was looked at.
    """
    with open_checkpoint(files.path) as opened:
        plan = plan_checkpoint(opened.folder, opened.only, opened.path)
        identity = hash_pieces(plan, opened.folder, threads, progress).checkpoint
    require_unchanged(files)
    return identity


def require_unchanged(files: Files) -> None:
    """Refuse if the files are not what they were: what was read meanwhile may be of both versions.

    Raises:
        LoadFailed: they changed.
    """
    with open_checkpoint(files.path) as opened:
        now = _stamped(opened)
    if now != files:
        raise LoadFailed(
            f"the weight files of {files.path} changed while they were being read; nothing of them "
            "is kept, start again when the checkpoint is complete",
            reason="changed",
            file=files.path,
        )


def _stamped(opened: OpenCheckpoint) -> Files:
    stamps = tuple(_stamp(opened, name) for name in sorted(opened.files.names))
    return Files(opened.path, stamps)


def _stamp(opened: OpenCheckpoint, name: str) -> Stamp:
    status = os.stat(name, dir_fd=opened.folder)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (name, status.st_dev, status.st_ino, status.st_size, *times)


def _require_same_choice(opened: OpenCheckpoint, theirs: set[str]) -> None:
    ours = set(opened.files.shards)
    if theirs == ours:
        return
    odd = ", ".join(sorted(theirs ^ ours))
    raise LoadFailed(
        f"{opened.path}: vLLM would load other files than this checkpoint consists of ({odd}); "
        "move what does not belong to it out of the folder",
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
