"""What callbacks do to each other: nothing."""

from __future__ import annotations

import pytest

from engine_client.listeners import Listeners


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Those after it are called all the same, also if it wanted to end the process."""
    listeners, called = Listeners(), [0]

    def bad() -> None:
        called.append(1)
        raise error("on purpose")

    listeners.on_lost(bad)
    listeners.on_lost(lambda: called.append(2))
    listeners.tell_lost()
    listeners.on_lost(bad)
    assert called == [0, 1, 2, 1]
    assert caplog.text.count("a callback of the weight broker's client raised") == 2
