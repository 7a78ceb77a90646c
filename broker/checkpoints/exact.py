"""Reading exactly the bytes that were asked for. Imports neither zmq nor torch."""

from __future__ import annotations

import os

from broker.checkpoints.faults import load_failed, quoted, system_refused

_MOST_VIEWS = os.sysconf("SC_IOV_MAX")
"""preadv takes no more buffers in one call."""


def read_exactly(
    descriptor: int, views: list[memoryview], offset: int, *, file: str, tensor: str
) -> None:
    """Fill the views, one after the other, from `offset` on. Releases the GIL while it reads.

    `views` is consumed. `file` and `tensor` are for messages: where the range begins.

    Raises:
        LoadFailed: "truncated": the file ends before the last view is full; "unreadable": the
            system could not read (a failing disk, a lost server).
    """
    done = 0
    while done < len(views):
        try:
            got = os.preadv(descriptor, views[done : done + _MOST_VIEWS], offset)
        except OSError as error:
            raise system_refused(error, file, f"reading tensor {quoted(tensor)} of") from error
        if got == 0:
            raise load_failed(
                "truncated",
                f"{quoted(file)} ended at tensor {quoted(tensor)} while it was being read; wait "
                "until it is complete and load again",
                file=file,
                tensor=tensor,
            )
        offset += got
        done = _advance(views, done, got)


def _advance(views: list[memoryview], done: int, got: int) -> int:
    """The number of the first view that is not full; of that, only the rest is kept."""
    while got and got >= len(views[done]):
        got -= len(views[done])
        done += 1
    if got:
        views[done] = views[done][got:]
    return done
