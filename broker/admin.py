"""The commands that talk to a running broker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from broker.device_names import SIMULATED
from broker.errors import LoadFailed, NotFound

COLUMNS = ("SET", "STATE", "NAME", "BYTES", "TENSORS", "LEASES", "WAITING", "DTYPE", "FROM")


def print_status(name: str, directory: Path | None, *, as_json: bool) -> int:
    """`weight-broker status`."""
    with _observe(name, directory) as client:
        report = client.status()
    if as_json:
        print(json.dumps(report, indent=2, sort_keys=True))
    else:
        print(status_table(report))
    return 0


def evict_sets(name: str, directory: Path | None, which: str) -> int:
    """`weight-broker evict`."""
    with _observe(name, directory) as client:
        evicted = client.evict(which)
    gone = [number for number in evicted.sets if number not in evicted.draining]
    if gone:
        print(f"evicted: {_numbers(gone)}")
    if evicted.draining:
        print(f"evicted when their last lease ends: {_numbers(evicted.draining)}")
    return 0


def list_names(name: str, directory: Path | None, *, as_json: bool) -> int:
    """`weight-broker list`."""
    with _observe(name, directory) as client:
        rows = generations_in(client.status())
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        cells = [tuple(str(cell) for cell in row.values()) for row in rows]
        print("\n".join(_table(tuple(key.upper() for key in rows[0]), cells)))
    return 0


def generations_in(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every generation of every name in a status, oldest set first; also those being written."""
    rows = []
    for entry in report["sets"]:
        names = entry["names"] or {entry["key"]["name"]: "-"}
        for name, label in names.items():
            if name:
                state = "newest" if name in entry["newest"] else entry["state"]
                rows.append(
                    {
                        "name": name,
                        "generation": label,
                        "set": entry["id"],
                        "state": state + (" (pinned)" if entry["pinned"] else ""),
                        "bytes": entry["nbytes"],
                        "leases": len(entry["leases"]),
                        "dtype": entry["key"]["dtype"] or "-",
                    }
                )
    return sorted(rows, key=lambda row: (row["name"], row["set"]))


def publish_checkpoint(
    name: str,
    directory: Path | None,
    path: str,
    line: str,
    *,
    generation: str | None,
    device: str | None,
) -> int:
    """`weight-broker publish`: returns when the generation is resident."""
    with _observe(name, directory) as client:
        granted = client.publish_checkpoint(path, line, generation=generation, device=device)
    size = human(granted.nbytes)
    print(f"{line}: generation {granted.generation}, set {granted.set}, {size}, {granted.how}")
    return 0


def pin_sets(name: str, directory: Path | None, which: str, *, pinned: bool) -> int:
    """`weight-broker pin` and `unpin`."""
    with _observe(name, directory) as client:
        meant = client.pin(which) if pinned else client.unpin(which)
    print(f"{'pinned' if pinned else 'not pinned any more'}: {_numbers(meant.sets)}")
    return 0


def upgrade_broker(name: str, directory: Path | None) -> int:
    """`weight-broker upgrade`: returns when the new server answers."""
    with _observe(name, directory) as client:
        client.upgrade()
        broker = client.status()["broker"]
    print(f"upgraded: server {broker['pid']} goes on, keeper {broker['keeper_pid']} stays")
    return 0


def shutdown_broker(name: str, directory: Path | None, *, force: bool) -> int:
    """`weight-broker shutdown`: returns when the broker has ended."""
    with _observe(name, directory) as client:
        client.shutdown(force=force)
        client.wait_until_lost()
    print("stopped")
    return 0


def verify_sets(name: str, directory: Path | None, which: str | None) -> int:
    """`weight-broker verify`: digest what is resident and compare with what was loaded.

    Raises:
        LoadFailed: a set's bytes are not what its identity says.
        NotFound: no sealed set of that id or name.
    """
    from broker.checkpoints.identity import slab_identity
    from engine_client.client import EngineClient

    with _observe(name, directory) as observer:
        report = observer.status()
    chosen = [entry for entry in report["sets"] if _is_chosen(entry, which)]
    if not chosen:
        what = f"sealed weight set {which!r}" if which else "weight set that came from a checkpoint"
        raise NotFound(f"there is no {what} to verify; `status` lists what is resident")
    simulated = SIMULATED if report["broker"]["simulated"] else None
    for entry in chosen:
        device = simulated or entry["key"]["device"]
        with EngineClient(device, broker=name, directory=directory, label="verify") as client:
            with client.acquire(client.key_of(entry)) as weights:
                found = slab_identity(weights.manifest, weights.read)
            if found != entry["key"]["checkpoint"]:
                raise LoadFailed(
                    f"set {entry['id']} is damaged: its bytes are {found}, loaded was "
                    f"{entry['key']['checkpoint']}; evict it and load it again",
                    reason="damaged",
                    set=entry["id"],
                )
            print(f"set {entry['id']}: {entry['nbytes']} bytes, {found}: as loaded")
    return 0


def _is_chosen(entry: dict[str, Any], which: str | None) -> bool:
    # What an engine published is whatever its key says: there is nothing to compare with.
    if entry["state"] != "sealed" or entry["path"] is None:
        return False
    return which is None or which in (str(entry["id"]), *entry["names"])


def _observe(name: str, directory: Path | None) -> Any:
    from engine_client.observer import Observer

    return Observer(name, directory)


def _numbers(sets: list[int]) -> str:
    return ", ".join(f"set {number}" for number in sets)


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
    lines += ["", *_table(COLUMNS, [_set_row(entry) for entry in report["sets"]])]
    sessions = [_session_row(entry) for entry in report["sessions"]]
    lines += ["", *_table(("SESSION", "PID", "COMMAND", "LABEL", "LEASES", "WAITING"), sessions)]
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
        _shown(entry["path"]),
    )


def _session_row(entry: dict[str, Any]) -> tuple[str, ...]:
    fields = ("id", "pid", "command", "label", "leases", "waiting")
    return tuple(_shown(str(entry[field])) for field in fields)


def _shown(text: str | None) -> str:
    """What an engine says of itself, without what would move the cursor of a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text or "")
    return shown or "-"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def human(nbytes: int) -> str:
    """Bytes as people read them, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
