"""Descriptors that are closed when nobody needs them any more."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Descriptor:
    """Owns a descriptor: closes it when nothing refers to this object any more.

    An interrupt may come between any two steps of the main thread, so that no step may have to be
    taken for a descriptor to be closed. Whoever uses the number keeps the object meanwhile.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        """Close it now; nobody may be using it. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


@contextmanager
def closed_after(descriptors: Iterable[Descriptor]) -> Iterator[None]:
    """Close them at the block's end, not only when an error's traceback lets go of them."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            descriptor.close()
