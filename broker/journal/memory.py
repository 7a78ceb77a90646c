"""What the devices' memory is used for, written down whenever that has changed."""

from __future__ import annotations

from broker.custody import Books
from broker.custody.audit import usage
from broker.journal.recording import Journal
from broker.loop import Loop

LOOK_SECONDS = 0.5
"""Between a change and the look at it: a burst of changes is one line. What comes and goes within
this time is not seen."""


class MemoryNotes:
    """Belongs to the loop's thread."""

    def __init__(self, loop: Loop, books: Books, journal: Journal) -> None:
        self._loop = loop
        self._books = books
        self._journal = journal
        self._noted: dict[str, dict[str, int]] = {}
        self._is_due = False

    def look_soon(self) -> None:
        """Something on the books may have changed."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(LOOK_SECONDS, self.look)

    def look(self) -> None:
        """Write down each device whose use is not what was written last."""
        self._is_due = False
        for device in self._books.budgets:
            now = usage(self._books, device)
            if now != self._noted.get(device):
                self._noted[device] = now
                self._journal.note("memory", {"device": device, **now})
