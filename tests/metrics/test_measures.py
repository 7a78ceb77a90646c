"""What is counted while it happens."""

from __future__ import annotations

import re

from broker.errors import ERROR_STATUSES
from broker.metrics.causes import OTHER, REASONS, cause_of
from broker.metrics.measures import REQUEST_SECONDS, Histogram, Measures
from broker.settings import BY_NAME
from tests.test_observability import ROOT, SOURCE, documented


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def measures_at(clock: Clock) -> Measures:
    return Measures(clock)


def test_buckets() -> None:
    """A value at a bucket's end belongs to it; what is above the last has a bucket too."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.1)


def test_a_copy_stays() -> None:
    """What a page is made of does not change any more."""
    histogram = Histogram((1.0,))
    copied = histogram.copy()
    histogram.add(0.5)
    assert (copied.counts, copied.total) == ([0, 0], 0.0)


def test_answers() -> None:
    """Each answer is in its operation's histogram, an error with its status."""
    clock = Clock()
    measures = measures_at(clock)
    clock.now = 10.0
    measures.answered("acquire", None, 9.0)
    measures.answered("acquire", "busy", 10.0)
    histogram = measures.requests["acquire"]
    assert (sum(histogram.counts), histogram.total) == (2, 1.0)
    assert histogram.counts[REQUEST_SECONDS.index(1.0)] == 1
    assert measures.request_errors == {("acquire", "busy"): 1}


def test_loads() -> None:
    """From the start of a load to its seal; what fails is counted by its cause, once."""
    clock = Clock()
    measures = measures_at(clock)
    for number in (1, 2, 3):
        measures.note("load-started", {"set": number})
    clock.now = 3.0
    measures.note("set-sealed", {"set": 1, "nbytes": 512})
    measures.note("set-failed", {"set": 2, "status": "load-failed", "reason": "truncated"})
    measures.note("same-content", {"set": 3, "resident": 1})
    assert (measures.load_seconds.total, measures.loaded_bytes) == (3.0, 512)
    assert +measures.load_failures == {"truncated": 1}
    assert sum(measures.load_seconds.counts) == 1


def test_publications() -> None:
    """An engine's set is no load: its failure is counted by itself, its seal not as one."""
    measures = measures_at(Clock())
    measures.note("claim-granted", {"set": 1})
    measures.note("set-sealed", {"set": 1, "nbytes": 512})
    measures.note("set-failed", {"set": 2, "status": "cancelled"})
    assert (measures.loaded_bytes, +measures.load_failures) == (0, {})
    assert +measures.publication_failures == {"cancelled": 1}


def test_causes_are_few_words() -> None:
    """Whatever words a peer has chosen, a cause is one of ours."""
    assert cause_of("load-failed", "truncated") == "truncated"
    assert cause_of("load-failed", "my own word") == "load-failed"
    assert cause_of("over-budget", "truncated") == "over-budget"
    assert cause_of("my own status", None) == OTHER
    assert cause_of(None, ["truncated"]) == OTHER
    assert not REASONS & ERROR_STATUSES
    assert set(measures_at(Clock()).load_failures) == {*REASONS, *ERROR_STATUSES, OTHER}


def test_every_reason_is_known() -> None:
    """The reasons that the code gives for failed loads are those of the list."""
    table = (ROOT / "broker/checkpoints/faults.py").read_text().partition("`reason`:")[2]
    told = re.findall(r"^    ((?:\w+, )*\w+)  ", table.partition("Pure:")[0], re.MULTILINE)
    listed = {word for words in told for word in words.split(", ")}
    assert len(listed) > 20
    named = set(re.findall(r'"((?:loader|builder)-[a-z-]+)"', SOURCE))
    others = {*documented("The log"), *BY_NAME}  # events and settings
    assert listed | named - others | {"builder-failed", "writer-stalled"} == REASONS
