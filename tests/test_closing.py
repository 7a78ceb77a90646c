"""`with` blocks over what has a `close`."""

from __future__ import annotations

import pytest

from broker.closing import Closeable


class Held(Closeable):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_closed_at_the_end_of_the_block() -> None:
    """The block gets the object itself, open; after it the object is closed."""
    held = Held()
    with held as given:
        assert given is held
        assert held.closed == 0
    assert held.closed == 1


def test_closed_after_an_error() -> None:
    """An error closes it too, and is not swallowed."""
    held = Held()
    with pytest.raises(KeyError), held:
        raise KeyError
    assert held.closed == 1


def test_close_has_to_be_written() -> None:
    """A class that forgets its `close` cannot be used at all."""

    class Careless(Closeable): ...

    with pytest.raises(TypeError, match="abstract"):
        Careless()  # type: ignore[abstract]
