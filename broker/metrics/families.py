"""The page of metrics: each family's name, type, labels and help text.

Names and units as Prometheus advises: a prefix, seconds and bytes, `_total` for what only grows.
What only grows begins anew with each server; `rate()` allows for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from broker.metrics.measures import Histogram
from broker.metrics.snapshot import SetNumbers, Snapshot

PREFIX = "weight_broker"

COUNTERS = {
    "accepts_failed": "Connections to the session socket that the system did not let us accept.",
    "claims_inherited": "Writers that failed and were followed by an engine that waited.",
    "claims_lost": "Claims that ended with their session.",
    "connections_cut": "Conversations cut off: they never read, or never ended their requests.",
    "connections_failed": "Conversations that the system did not let us accept.",
    "connections_refused": "Conversations that never began: another user's, or too many.",
    "conversations_dropped": "Conversations cut off because they never read.",
    "conversations_lost": "Conversations cut off that belonged to a session.",
    "evictions": "Weight sets evicted, by hand or because memory was needed.",
    "internal_errors": "Requests and sessions that failed because of a mistake of the broker's.",
    "leases_granted": "Leases granted.",
    "leases_reclaimed": "Leases that ended with their session.",
    "loaders_died": "Loaders that ended before their weights were complete.",
    "loads_failed": "Loads that ended with an error; load_failures_total has them by cause.",
    "loads_finished": "Loads that ended with a sealed set.",
    "loads_queued": "Loads that had to wait for another one's end.",
    "loads_shared_by_content": "Loads and publications that turned out to be resident already.",
    "loads_started": "Loads started.",
    "notices_dropped": "Progress and events that an engine which does not read has missed.",
    "packets_refused": "Session packets answered with an error.",
    "preloads_failed": "Checkpoints of --preload that could not be loaded onto a device.",
    "publications_failed": "Weight sets of engines that ended unsealed.",
    "replies": "Final replies, progress and events sent.",
    "replies_dropped": "Final replies kept for a peer whose conversation then ended.",
    "replies_to_the_gone": "Replies whose peer had gone.",
    "requests": "Requests received.",
    "requests_late": "Requests that came after their session's end.",
    "requests_refused": "Requests answered with an error at once.",
    "requests_repeated": "Requests that came again and were not done again.",
    "server_restarts": "Servers before this one.",
    "sessions_refused": "Processes that got no session: another user's, or too many.",
    "sets_sealed": "Weight sets sealed.",
    "writers_stalled": "Claims that ended because they were not sealed in time.",
}
"""The counters of `status`, which are there from the start: `increase()` of a metric that has just
appeared is nothing."""
LARGEST = {
    "largest_reply_bytes": "Largest reply so far.",
    "largest_request_bytes": "Largest request so far.",
}

_SET = ("device", "set", "name")
_USES = ("leased", "idle", "reserved", "free")

Row = tuple[Sequence[str], float]
"""Values of the labels, and the number."""


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Every metric of one moment; those about nothing have no sample, but are there."""
    for part in (_broker, _devices, _sets, _sessions, _waiting, _loads, _requests, _counters):
        yield from part(snapshot)


def _broker(snapshot: Snapshot) -> Iterator[Metric]:
    facts = (snapshot.version, snapshot.name, snapshot.platform)
    yield _gauge("info", "The broker; always 1.", ("version", "name", "platform"), [(facts, 1)])
    yield _gauge(
        "start_time_seconds", "When its first server started.", (), [((), snapshot.started)]
    )
    yield _gauge(
        "server_start_time_seconds",
        "When the server that answers started.",
        (),
        [((), snapshot.server_started)],
    )
    yield _gauge(
        "slowest_turn_seconds",
        "Longest turn of its loop: how long a ping may have waited.",
        (),
        [((), snapshot.slowest_turn)],
    )


def _devices(snapshot: Snapshot) -> Iterator[Metric]:
    devices = snapshot.devices.items()
    yield _gauge(
        "device_bytes",
        "Bytes of the limit by what they are for; they add up to it.",
        ("device", "use"),
        [((device, use), usage[use]) for device, usage in devices for use in _USES],
    )
    yield _gauge(
        "device_limit_bytes",
        "Bytes that the broker may hold.",
        ("device",),
        [((device,), usage["limit"]) for device, usage in devices],
    )


def _sets(snapshot: Snapshot) -> Iterator[Metric]:
    sets = snapshot.sets
    yield _gauge(
        "sets", "Weight sets by their state.", ("device", "state"), snapshot.states.items()
    )
    yield _gauge(
        "set_bytes",
        "Bytes of a weight set, and what they are for.",
        (*_SET, "use"),
        [((*_place(each), each.use), each.nbytes) for each in sets],
    )
    yield _of_sets("set_leases", "Leases on a weight set.", sets, lambda each: each.leases)
    yield _of_sets(
        "set_waiting_requests",
        "Requests that wait for a weight set.",
        sets,
        lambda each: each.waiting,
    )
    yield _of_sets(
        "set_writing_seconds",
        "How long a weight set has been loaded or written for.",
        sets,
        lambda each: each.writing,
    )
    yield _of_sets(
        "set_quiet_seconds",
        "How long nothing was heard of whoever loads or writes a weight set.",
        sets,
        lambda each: each.quiet,
    )
    yield _of_sets(
        "set_draining_seconds",
        "How long a weight set has been leased that is not wanted any more.",
        sets,
        lambda each: each.draining,
    )


def _sessions(snapshot: Snapshot) -> Iterator[Metric]:
    kinds = [(("engine",), snapshot.engines), (("loader",), snapshot.loaders)]
    yield _gauge("sessions", "Processes with a session.", ("kind",), kinds)
    yield _gauge(
        "connections", "Conversations, tied to a session or not.", (), [((), snapshot.connections)]
    )
    yield _gauge("leases", "Leases.", (), [((), snapshot.leases)])
    labels = ("session", "pid", "label")
    rows = [((each.number, each.pid, each.label), each) for each in snapshot.sessions]
    yield _gauge(
        "session_leased_bytes",
        "Bytes of all weight sets that a process leases; they are counted for each of them.",
        labels,
        [(values, each.nbytes) for values, each in rows],
    )
    yield _gauge(
        "session_leases",
        "Leases of a process.",
        labels,
        [(values, each.leases) for values, each in rows],
    )


def _waiting(snapshot: Snapshot) -> Iterator[Metric]:
    waiting = snapshot.waiting.items()
    yield _gauge(
        "waiting_requests",
        "Requests that wait for weights.",
        ("operation",),
        [((operation,), count) for operation, (count, _longest) in waiting],
    )
    yield _gauge(
        "longest_wait_seconds",
        "How long the request has waited that has waited longest.",
        ("operation",),
        [((operation,), longest) for operation, (_count, longest) in waiting],
    )
    yield _gauge(
        "queued_loads", "Loads that wait for another one's end.", (), [((), snapshot.loads_queued)]
    )


def _loads(snapshot: Snapshot) -> Iterator[Metric]:
    yield _histogram(
        "load_seconds",
        "How long loads took that ended with a sealed set.",
        (),
        [((), snapshot.load_seconds)],
    )
    yield _counter(
        "loaded_bytes", "Bytes of weight sets loaded.", (), [((), snapshot.loaded_bytes)]
    )
    for name, failures in (
        ("load_failures", snapshot.load_failures),
        ("publication_failures", snapshot.publication_failures),
    ):
        help_text = f"{name.partition('_')[0].capitalize()}s that ended unsealed, by cause."
        rows = [((cause,), count) for cause, count in failures.items()]
        yield _counter(name, help_text, ("cause",), rows)


def _requests(snapshot: Snapshot) -> Iterator[Metric]:
    yield _histogram(
        "request_seconds",
        "From a request to its final answer, waiting for weights included.",
        ("operation",),
        [((operation,), histogram) for operation, histogram in snapshot.requests.items()],
    )
    yield _counter(
        "request_errors",
        "Requests answered with an error, by its status.",
        ("operation", "status"),
        snapshot.request_errors.items(),
    )


def _counters(snapshot: Snapshot) -> Iterator[Metric]:
    for name, help_text in COUNTERS.items():
        yield _counter(name, help_text, (), [((), snapshot.counters.get(name, 0))])
    for name, help_text in LARGEST.items():
        yield _gauge(name, help_text, (), [((), snapshot.counters.get(name, 0))])


# --- kinds of metric ----------------------------------------------------------------------------


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for values, histogram in rows:
        family.add_metric(values, _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    ends = [*map(str, histogram.ends), "+Inf"]
    counted = itertools.accumulate(histogram.counts)
    return list(zip(ends, counted, strict=True))


def _of_sets(
    name: str,
    text: str,
    sets: Iterable[SetNumbers],
    number: Callable[[SetNumbers], float | None],
) -> Metric:
    found = ((_place(each), number(each)) for each in sets)
    return _gauge(name, text, _SET, [(place, value) for place, value in found if value is not None])


def _place(each: SetNumbers) -> tuple[str, str, str]:
    return each.device, each.number, each.name
