"""Who wants to hear of a session's events and of the broker's end.

Belongs to the session and not to its channel: what is called back often leads to the client, and
the I/O thread must not be what keeps a client alive that everybody else has dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from broker import wire

log = logging.getLogger("weight-broker.client")


class Listeners:
    """Callbacks, called in the I/O thread. No locks: every step is one operation of a container."""

    def __init__(self) -> None:
        self._of_events: list[Callable[[wire.Event], None]] = []
        self._of_the_end: deque[Callable[[], None]] = deque()
        self._has_ended = False

    def on_event(self, callback: Callable[[wire.Event], None]) -> Callable[[], None]:
        """Call back for every event; the result, called, ends that."""
        self._of_events.append(callback)

        def forget() -> None:
            if callback in self._of_events:
                self._of_events.remove(callback)

        return forget

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call back once when the broker is gone; at once, in this thread, if it is already."""
        self._of_the_end.append(callback)
        if self._has_ended:
            self._tell_of_the_end()

    def tell(self, event: wire.Event) -> None:
        for callback in list(self._of_events):
            _guarded(callback, event)

    def tell_lost(self) -> None:
        """The broker is gone."""
        self._has_ended = True
        self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        while True:
            try:
                callback = self._of_the_end.popleft()
            except IndexError:
                return  # whoever takes a callback out calls it, so each is called once
            _guarded(callback)


def _guarded(callback: Callable[..., None], *arguments: Any) -> None:
    """Run a user's callback; whoever runs it must go on whatever it raises."""
    try:
        callback(*arguments)
    except BaseException:
        log.exception("a callback of the weight broker's client raised")
