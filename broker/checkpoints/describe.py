"""A checkpoint as an `acquire` describes it: which files, and what the kernel says of them."""

from __future__ import annotations

import os

from broker.checkpoints.files import OpenCheckpoint
from broker.checkpoints.identity import fingerprint, stamp_files
from broker.wire import Conversion, Source


def describe_source(checkpoint: OpenCheckpoint, conversion: Conversion | None = None) -> Source:
    """Read the index and the headers, no weight. Blocks on the file system.

    Raises:
        NotFound, LoadFailed: no usable checkpoint there; the sentence names the file.
    """
    stamps = stamp_files(checkpoint.folder, checkpoint.files, checkpoint.path)
    path = os.path.abspath(checkpoint.path)
    return Source(path, checkpoint.only, stamps, fingerprint(stamps), conversion)
