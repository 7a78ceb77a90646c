"""Did you mean …? For names that are not there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

MOST_COMPARED = 512
"""Names that are looked at: the broker's loop has other things to do."""
LONGEST_COMPARED = 64


def did_you_mean(name: str, known: Iterable[str], most: int = 2) -> str:
    """The end of a sentence, "did you mean prod or prod-2?", or "" if nothing is near."""
    import difflib  # a module that only mistakes need

    candidates = [each for each in islice(known, MOST_COMPARED) if len(each) <= LONGEST_COMPARED]
    near = difflib.get_close_matches(name[:LONGEST_COMPARED], candidates, n=most)
    return f"did you mean {' or '.join(near)}?" if near else ""
