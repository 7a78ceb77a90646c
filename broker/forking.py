"""What no fork of another thread may cut in two.

A forked child has what was opened or mapped by then, and none of the threads that would have closed
it, or marked it as not for children.
"""

from __future__ import annotations

import os
import threading

no_fork = threading.RLock()
"""A fork waits for it: hold it for a few system calls that do not wait for anybody. Reentrant, for
a fork by a signal's handler in the midst of them."""

os.register_at_fork(
    before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
)
