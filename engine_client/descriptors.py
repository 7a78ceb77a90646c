"""Descriptors that are closed when nobody needs them any more, and in a forked child at once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from broker.forking import no_fork


class Descriptor:
    """Owns a descriptor: closes it when nothing refers to this object any more.

    An interrupt may come between any two steps of the main thread, so that no step may have to be
    taken for a descriptor to be closed. Whoever uses the number keeps the object meanwhile.

    In a forked child it is closed from the start: what it leads to may be memory, which would stay
    in use as long as the child lives. Whoever opens one holds `no_fork` until it is owned, as
    `owned` does.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        _owned[number] = weakref.ref(self)

    def fileno(self) -> int:
        """The number; -1 if it is closed."""
        return self._number

    def close(self) -> None:
        """Close it now; nobody may be using it. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0:
            with no_fork:
                # Not there: a handler in this very thread has forked, and this is the child.
                if _owned.pop(number, None) is not None:
                    os.close(number)

    def forget(self) -> None:
        """It is closed already."""
        self._number = -1

    def __del__(self) -> None:
        self.close()


def owned(opened: Callable[[], int]) -> Descriptor:
    """What a call opens, owned before any fork. Raises what the call raises."""
    with no_fork:
        return Descriptor(opened())


@contextmanager
def closed_after(descriptors: Iterable[Descriptor]) -> Iterator[None]:
    """Close them at the block's end, not only when an error's traceback lets go of them."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            descriptor.close()


_owned: dict[int, weakref.ref[Descriptor]] = {}


def _after_fork_in_child() -> None:
    """Whoever would close them is a thread of the parent's, or a frame that nobody returns to."""
    for number, owner in list(_owned.items()):
        with suppress(OSError):  # somebody else has closed it
            os.close(number)
        descriptor = owner()
        if descriptor is not None:
            descriptor.forget()
    _owned.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
