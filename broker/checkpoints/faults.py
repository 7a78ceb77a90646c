"""How a fault of a checkpoint is told: one sentence, and the fields behind it.

The words used as `reason`:

    lfs_pointer       a Git LFS pointer lies where the weights should
    not_safetensors   another kind of file (a web page, GGUF, an archive), or one that the
                      safetensors library refuses
    unsafe_pickle     weights that could only be had by unpickling; never done
    header_too_large  a header length above the format's limit
    header_truncated  the file ends inside its header
    header_start      the header does not begin with "{"
    bad_json          the header is not strict JSON in UTF-8
    duplicate_key     a key appears twice
    bad_metadata      "__metadata__" is not a map from strings to strings
    bad_entry         a tensor's entry is incomplete or of the wrong types
    unknown_dtype     a dtype that safetensors and torch do not both know
    bad_shape         a shape no tensor can have
    subbyte_shape     packed elements that do not fill whole bytes in each row
    size_mismatch     dtype and shape need another number of bytes than the offsets give
    overlap, hole     two tensors share bytes; bytes belong to no tensor
    truncated         the file ends before its last tensor does
    trailing_bytes    the file goes on after its last tensor
    bad_index         the index is not an index
    missing_shard     shards that are not there
    missing_tensor    the index names a tensor its shard has not got
    ambiguous_tensor  two shards hold a tensor of the same name and no index settles it
    no_weights        nothing there that could be loaded
    ambiguous_files   several files could be meant
    too_many_files    more shards than a request can describe
    bad_config        config.json is not a JSON object
    conversion        the weights cannot have the dtype that was asked for
    tie_conflict      the configuration says tied, the bytes say untied
    unreadable        the system refused to open or to read
    not_a_file        a directory, FIFO or device where a file should be
    changed           the file changed while it was read
    device            the device failed while the bytes were copied

Pure: imports neither zmq nor torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from broker.errors import LoadFailed

_LONGEST_NAME = 300
"""A hostile header may name a tensor in megabytes; a sentence shows this much of it."""


def load_failed(
    reason: str, sentence: str, *, file: str, tensor: str | None = None, **more: Any
) -> LoadFailed:
    """The error to raise; `sentence` should name file and tensor already."""
    fields: dict[str, Any] = {"reason": reason, "file": file, **more}
    if tensor is not None:
        fields["tensor"] = tensor[:_LONGEST_NAME]
    return LoadFailed(sentence, **fields)


@contextmanager
def told_of(path: str) -> Iterator[None]:
    """Begin the sentence of every `LoadFailed` from inside with the checkpoint it is about."""
    try:
        yield
    except LoadFailed as error:
        if quoted(path) in error.sentence:
            raise
        sentence = f"checkpoint {quoted(path)}: {error.sentence}"
        raise LoadFailed(sentence, **error.fields) from error


def quoted(name: object) -> str:
    """A name from a file as it may stand in a sentence: on one line, printable, not too long."""
    text = repr(name)
    return text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…"


def system_refused(error: OSError, file: str, doing: str) -> LoadFailed:
    """The error for a system call that failed on a file of the checkpoint."""
    words = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ENOENT:
        return load_failed(
            "missing_shard",
            f"{quoted(file)} is not there (or is a link to a file that is not); "
            "download the checkpoint again",
            file=file,
            missing=[file],
        )
    advice = "check the file system"
    if error.errno in _DENIED:
        advice = "check its permissions"
    elif error.errno == errno.EMFILE:
        advice = "raise this process's limit of open files (`ulimit -n`), or close some"
    return load_failed("unreadable", f"{doing} {quoted(file)} failed: {words}; {advice}", file=file)


_DENIED = (errno.EACCES, errno.EPERM)
