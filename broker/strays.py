"""Closing what peers have sent, in threads of its own: it may block.

The last close of a TCP socket with SO_LINGER waits until its data has arrived somewhere, that of a
file until its file system, perhaps one in user space, has answered, that of a large memfd until its
pages are free. Imported when there is something to close.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable

from broker.limits import descriptor_limit

THREADS = 8
"""At most: so many closes that never end, and others still do."""
SPARE_DESCRIPTORS = 128
"""Where only so many are left, nothing waits: libzmq ends the process when it finds none."""
_NO_LINGER = struct.pack("ii", 0, 0)


def close_stray(descriptor: int) -> None:
    """Close it, in this thread. A socket lingers no more, also for who else has it."""
    with contextlib.suppress(OSError):  # its file system's trouble, and its sender's
        try:
            stray = socket.socket(fileno=descriptor)
        except OSError:  # it is no socket
            os.close(descriptor)
            return
        with stray:
            stray.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


class Closer:
    """Closes descriptors in up to `THREADS` threads: one more whenever all have something to do.

    Args:
        close: closes one.
    """

    def __init__(self, close: Callable[[int], None] = close_stray) -> None:
        self._close = close
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads = 0

    def close_aside(self, descriptor: int) -> None:
        """Close it soon. From any thread; blocks only where descriptors, or threads, run out."""
        # The kernel gives out the lowest number that is free: so many are open.
        if descriptor >= descriptor_limit() - SPARE_DESCRIPTORS:
            self._close(descriptor)
            return
        self._waiting.put(descriptor)
        if not self._idle.acquire(blocking=False) and not self._has_thread():
            self._close(self._waiting.get_nowait())

    def _has_thread(self) -> bool:
        """Start one more, if there may be one; false if there is none at all."""
        with self._lock:
            if self._threads < THREADS:
                # A daemon: nobody waits for it at the end of the process.
                thread = threading.Thread(target=self._run, name="broker-closer", daemon=True)
                with contextlib.suppress(RuntimeError):  # the system allows no more
                    thread.start()
                    self._threads += 1
            return self._threads > 0

    def _run(self) -> None:
        while True:
            try:
                descriptor = self._waiting.get_nowait()
            except queue.Empty:
                self._idle.release()
                descriptor = self._waiting.get()
            self._close(descriptor)


close_aside = Closer().close_aside
