"""The page: its names are documented, its labels bounded, and its text is Prometheus's."""

from __future__ import annotations

import re
from collections import Counter

from broker.metrics.endpoint import Page
from broker.metrics.families import COUNTERS, LARGEST, families
from broker.metrics.measures import Histogram
from broker.metrics.snapshot import SessionNumbers, SetNumbers
from tests.metrics.pages import TEXT, Samples, snapshot
from tests.test_observability import ROOT, documented

HOSTILE = 'x"} 1\nweight_broker_leases 7\n\\'


def test_every_counter_has_a_metric() -> None:
    """The counters of `status` are all there, also those that nothing has been counted for."""
    assert {*COUNTERS, *LARGEST} == set(documented("Counters"))
    samples = Samples.of(snapshot(counters={"evictions": 3}))
    assert (samples.value("evictions_total"), samples.value("loads_failed_total")) == (3, 0)


def test_every_metric_is_documented() -> None:
    """docs/metrics.md has each metric's name, type, labels and help text, in order."""
    rows = re.findall(
        r"^\| `(weight_broker_\w+)` \| (\w+) \| (.*?) \| (.*) \|$",
        (ROOT / "docs/metrics.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (
            metric.name + ("_total" if metric.type == "counter" else ""),
            metric.type,
            ", ".join(f"`{label}`" for label in metric._labelnames) or "none",  # type: ignore[attr-defined]
            metric.documentation,
        )
        for metric in families(snapshot())
    ]


def test_a_histogram() -> None:
    """Buckets are cumulative, the last one has all; sum and count agree with them."""
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.7, 3.0):
        histogram.add(value)
    samples = Samples.of(snapshot(requests={"acquire": histogram}))
    buckets = [samples.values("request_seconds_bucket", le=le) for le in ("0.5", "1.0", "+Inf")]
    assert buckets == [[1.0], [2.0], [3.0]]
    assert samples.value("request_seconds_count", operation="acquire") == 3
    assert samples.value("request_seconds_sum") == 3.8


def test_labels_are_escaped() -> None:
    """A name cannot end its label: what a peer made up comes back as it was, and adds no sample."""
    sets = [SetNumbers("SIM-0", "1", HOSTILE, "idle", 5, 0, 0)]
    samples = Samples.of(snapshot(sets=sets))
    assert samples.labels("set_bytes")[0]["name"] == HOSTILE
    assert samples.values("leases") == [0.0]


def test_what_is_not_so_has_no_sample() -> None:
    """A resident set has no writer and does not drain; a draining one does."""
    sets = [
        SetNumbers("SIM-0", "1", "m", "leased", 5, 1, 0),
        SetNumbers("SIM-0", "2", "m", "leased", 5, 1, 0, draining=9.0),
        SetNumbers("SIM-0", "3", "m", "reserved", 5, 0, 2, writing=4.0, quiet=0.5),
    ]
    samples = Samples.of(snapshot(sets=sets))
    assert samples.labels("set_draining_seconds") == [{"device": "SIM-0", "set": "2", "name": "m"}]
    assert samples.value("set_writing_seconds") == 4.0
    assert samples.value("set_quiet_seconds", set="3") == 0.5
    assert samples.values("set_leases", name="m") == [1.0, 1.0, 0.0]


def test_the_other_text_format() -> None:
    """A scraper that asks for OpenMetrics gets it, from the same numbers."""
    sessions = [SessionNumbers("1", "77", "vllm", 5, 1)]
    page = Page(snapshot(sessions=sessions, load_failures=Counter(truncated=2)))
    content_type, text = page.text("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert b'weight_broker_load_failures_total{cause="truncated"} 2' in text
    assert page.text(TEXT)[0].startswith("text/plain")
