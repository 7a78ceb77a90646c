"""What no fork of another thread may cut in two.

A forked child has what was opened or mapped by then, and none of the threads that would have closed
it, or marked it as not for children.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class _NoFork:
    """A fork waits for it: hold it for a few system calls that do not wait for anybody. Reentrant,
    for a fork by a signal's handler in the midst of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        # Not held: a handler has forked in the midst, and this is the child, which has another.
        with suppress(RuntimeError):
            self._lock.release()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The frame that a handler interrupted may never go on, and other threads would wait."""
        self._lock = threading.RLock()


no_fork = _NoFork()

os.register_at_fork(
    before=no_fork.before_fork,
    after_in_parent=no_fork.after_fork_in_parent,
    after_in_child=no_fork.after_fork_in_child,
)
