"""`weight-broker status`."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from broker.commands.parsing import Commands, Examples, add_command, observe
from broker.commands.text import human, shown, table

COLUMNS = ("SET", "STATE", "NAME", "BYTES", "TENSORS", "LEASES", "WAITING", "DTYPE", "FROM")


def add_to(commands: Commands) -> None:
    examples: Examples = (
        ("status", "who holds what"),
        ("status --json", "the same for programs (docs/status.schema.json)"),
    )
    text = "show everything on the broker's books"
    status = add_command(commands, "status", print_status, text, examples=examples)
    status.add_argument("--json", action="store_true", help="as one JSON object")


def print_status(options: argparse.Namespace) -> int:
    with observe(options) as client:
        report = client.status()
    if options.json:
        print(json.dumps(report, indent=2, sort_keys=True))
    else:
        print(status_table(report))
    return 0


def status_table(report: dict[str, Any]) -> str:
    """The status for a person."""
    broker = report["broker"]
    age = time.time() - broker["started"]
    lines = [f"broker {broker['name']} (pid {broker['pid']}, {broker['platform']}, up {age:.0f} s)"]
    if broker["simulated"]:
        lines.append("SIMULATED DEVICE: host memory, for trying out only")
    for uuid, use in report["devices"].items():
        purposes = ("leased", "idle", "reserved", "free")
        parts = ", ".join(f"{purpose} {human(use[purpose])}" for purpose in purposes)
        lines.append(f"device {uuid}: {parts}, limit {human(use['limit'])}")
    lines += ["", *table(COLUMNS, [_set_row(entry) for entry in report["sets"]])]
    sessions = [_session_row(entry) for entry in report["sessions"]]
    lines += ["", *table(("SESSION", "PID", "COMMAND", "LABEL", "LEASES", "WAITING"), sessions)]
    counters = ", ".join(f"{key} {value}" for key, value in sorted(report["counters"].items()))
    return "\n".join([*lines, "", f"counters: {counters}"])


def _set_row(entry: dict[str, Any]) -> tuple[str, ...]:
    names = ", ".join(f"{name}#{label}" for name, label in entry["names"].items())
    state = entry["state"] + (" (pinned)" if entry["pinned"] else "")
    if entry["progress"]:
        stage, done, total = entry["progress"]
        state += f" {stage} {100 * done // max(total, 1)}%"
    return (
        str(entry["id"]),
        state,
        names or "-",
        human(entry["nbytes"]),
        str(entry["tensors"]),
        str(len(entry["leases"])),
        str(entry["waiting"]),
        entry["key"]["dtype"] or "-",
        shown(entry["path"]),
    )


def _session_row(entry: dict[str, Any]) -> tuple[str, ...]:
    fields = ("id", "pid", "command", "label", "leases", "waiting")
    return tuple(shown(str(entry[field])) for field in fields)
