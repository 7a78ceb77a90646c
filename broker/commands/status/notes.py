"""Sentences on what somebody may have to look at. Pure: a report in, text out."""

from __future__ import annotations

import time
from typing import Any

from broker.amounts import counted, human
from broker.commands.status.tables import holders, names_of, person, since, who_is_who
from broker.commands.text import duration, shown

QUIET_SECONDS = 30.0
"""A writer that was not heard of for so long may be stuck."""
LAG_SECONDS = 1.0
"""A peer that has not read for so long."""


def notes(report: dict[str, Any]) -> list[str]:
    """What is not as it is when all is well, gravest first."""
    every = (_preloads, _stuck, _waiting, _old_generations, _lagging, _restarts, _left_off)
    return [sentence for look in every for sentence in look(report)]


def _preloads(report: dict[str, Any]) -> list[str]:
    return [
        f"--preload {shown(entry['path'])} is not resident on {entry['device']}: "
        f"{shown(entry['cause'])}"
        for entry in report["broker"]["preloads"]
        if entry["state"] == "failed"
    ]


def _stuck(report: dict[str, Any]) -> list[str]:
    people = who_is_who(report)
    return [
        f"set {entry['id']} ({shown(entry['path'] or entry['key']['name'])}) has not moved for "
        f"{duration(entry['progress']['quiet_seconds'])}: "
        f"{people.get(entry['writer'], 'nobody')} writes it, "
        f"{counted(entry['waiting'], 'waits', 'wait')} for it"
        for entry in report["sets"]
        if entry["progress"] and entry["progress"]["quiet_seconds"] >= QUIET_SECONDS
    ]


def _waiting(report: dict[str, Any]) -> list[str]:
    waits = [entry for entry in report["sessions"] if entry["waiting"]]
    if not waits:
        return []
    longest = max(waits, key=lambda entry: entry["waiting_seconds"] or 0.0)
    number = sum(entry["waiting"] for entry in waits)
    queued = report["broker"]["loads_queued"]
    loads = counted(queued, "load waits", "loads wait")
    more = f"; {loads} for a loader" if queued else ""
    asking = counted(number, "request waits", "requests wait")
    longest_wait = duration(longest["waiting_seconds"])
    return [f"{asking} for weights, the oldest for {longest_wait}: {person(longest)}{more}"]


def _old_generations(report: dict[str, Any]) -> list[str]:
    people, now = who_is_who(report), report["broker"]["now"]
    sentences = []
    for entry in report["sets"]:
        if entry["state"] == "draining":
            oldest = min((lease["since"] or 0.0 for lease in entry["leases"]), default=0.0)
            held = f", since {since(oldest, now)}" if oldest else ""
            sentences.append(
                f"set {entry['id']} ({names_of(entry)}, {human(entry['nbytes'])}) goes when its "
                f"last lease ends; held by {holders(entry, people)}{held}"
            )
    return sentences


def _lagging(report: dict[str, Any]) -> list[str]:
    return [
        f"session {entry['id']}, {person(entry)}, has not read its answers for "
        f"{duration(entry['lag_seconds'])}"
        for entry in report["sessions"]
        if entry["lag_seconds"] >= LAG_SECONDS
    ]


def _restarts(report: dict[str, Any]) -> list[str]:
    broker = report["broker"]
    if not broker["restarts"]:
        return []
    often = counted(broker["restarts"], "time", "times")
    ago = since(broker["server_started"], broker["now"])
    return [f"the server was replaced {often}, last {ago} ago; counters count from then"]


def _left_off(report: dict[str, Any]) -> list[str]:
    left_off = report["broker"]["left_off"].items()
    left = [counted(number, what.removesuffix("s")) for what, number in left_off if number]
    return [f"not shown, a reply has no room for them: {', '.join(left)}"] if left else []


def troubles(report: dict[str, Any]) -> list[str]:
    """The latest warnings and errors of the log, newest last."""
    return [_trouble(entry, report["broker"]["now"]) for entry in report["broker"]["troubles"]]


def _trouble(entry: dict[str, Any], now: float) -> str:
    said = {key: value for key, value in entry.items() if key not in ("time", "event", "cause")}
    facts = " ".join(f"{key}={shown(str(value))}" for key, value in said.items())
    clock = time.strftime("%H:%M:%S", time.localtime(entry["time"]))
    cause = f": {shown(str(entry['cause']))}" if "cause" in entry else ""
    return f"{clock} ({since(entry['time'], now)} ago) {entry['event']} {facts}{cause}"
