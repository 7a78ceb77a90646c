"""`weight-broker publish` and `list`: names and their generations."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from broker.amounts import human
from broker.commands.parsing import Commands, Examples, add_command, observe
from broker.commands.text import table, warn_of_left_off
from broker.errors import BadRequest


def add_to(commands: Commands) -> None:
    examples: Examples = (("list", "every name and its generations, the newest last"),)
    text = "show names and their generations"
    names = add_command(commands, "list", list_names, text, examples=examples)
    names.add_argument("--json", action="store_true", help="as a JSON array")
    examples = (
        (
            "publish /models/m --name prod",
            "load it if need be; it is then prod's newest generation",
        ),
        (
            "publish /models/m2 --name prod --generation rc1",
            "another checkpoint, with a label of one's own",
        ),
    )
    text = "make a checkpoint, loaded if need be, the newest generation of a name"
    publish = add_command(
        commands, "publish", publish_checkpoint, text, examples=examples, broker="--broker"
    )
    publish.add_argument("path", help="a folder, or one safetensors file")
    publish.add_argument(
        "--name",
        required=True,
        dest="line",
        metavar="NAME",
        help="the name whose newest generation it becomes",
    )
    publish.add_argument(
        "--generation",
        help="its label (default: the next number, or the one that this content has already)",
    )
    publish.add_argument("--device", metavar="UUID", help="if the broker serves several devices")


def list_names(options: argparse.Namespace) -> int:
    with observe(options) as client:
        report = client.status()
    rows = generations_in(report)
    warn_of_left_off(report)
    if options.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        cells = [tuple(_shown(cell) for cell in row.values()) for row in rows]
        print("\n".join(table(tuple(key.upper() for key in rows[0]), cells)))
    else:
        print("no weights have a name here; `status` shows those without", file=sys.stderr)
    return 0


def generations_in(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every generation of every name in a status, oldest set first; also those being written.

    Layout and format tell lines of one name apart.
    """
    rows = []
    for entry in report["sets"]:
        names = entry["names"] or {entry["key"]["name"]: "-"}
        for name, label in names.items():
            if name:
                is_newest = name in entry["newest"] and entry["state"] != "draining"
                state = "newest" if is_newest else entry["state"]
                rows.append(
                    {
                        "name": name,
                        "generation": label,
                        "set": entry["id"],
                        "state": state + (" (pinned)" if entry["pinned"] else ""),
                        "bytes": entry["nbytes"],
                        "leases": len(entry["leases"]),
                        "dtype": entry["key"]["dtype"] or "-",
                        "layout": entry["key"]["layout"],
                        "format": entry["key"]["format"],
                    }
                )
    return sorted(rows, key=lambda row: (row["name"], row["set"]))


def _shown(cell: object) -> str:
    """A layout as `tp_rank=0,tp_size=2`."""
    if not isinstance(cell, dict):
        return str(cell)
    return ",".join(f"{name}={size}" for name, size in sorted(cell.items())) or "-"


def publish_checkpoint(options: argparse.Namespace) -> int:
    """Returns when the generation is resident."""
    from broker.wire import is_name  # needs msgspec, which not every command does

    for option, text in (("--name", options.line), ("--generation", options.generation)):
        if text is not None and not is_name(text):
            raise BadRequest(f"{option} {text!r}: give a printable name of 1 to 256 bytes")
    try:
        with observe(options) as client:
            granted = client.publish_checkpoint(
                options.path, options.line, generation=options.generation, device=options.device
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"gave up waiting for {options.path}; a load that has begun goes on, but gives "
            f"{options.line} no new generation"
        ) from None
    where = f"{options.line}: generation {granted.generation}, set {granted.set}"
    print(f"{where}, {human(granted.nbytes)}, {granted.how}")
    return 0
