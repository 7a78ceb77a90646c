"""`weight-broker evict`, `pin`, `unpin` and `verify`: what becomes of resident sets."""

from __future__ import annotations

import argparse
from typing import Any

from broker.commands.parsing import Commands, Examples, add_command, observe
from broker.commands.text import set_numbers, warn_of_left_off
from broker.device_names import SIMULATED
from broker.errors import LoadFailed, NotFound
from broker.suggest import did_you_mean

EVICT: Examples = (
    ("evict 3", "set 3, as status numbers them"),
    ("evict prod", "every set that has this name"),
)
EVICT_NOTES = """\
A set that is being loaded or published ends at once, and who waits for it is
told so."""
PIN: Examples = (("pin prod", "also when memory is needed, or a newer generation comes"),)
UNPIN: Examples = (("unpin prod", "they stay until memory is needed or they are superseded"),)
VERIFY: Examples = (
    ("verify", "every sealed set that came from a checkpoint"),
    ("verify prod", "those of this name"),
)


def add_to(commands: Commands) -> None:
    text = "forget weight sets, also pinned ones, as soon as nobody leases them"
    evict = add_command(commands, "evict", evict_sets, text, examples=EVICT, notes=EVICT_NOTES)
    evict.add_argument("set", help="a set's id, name or content identity (--name is the broker's)")
    text = "keep weight sets although nobody leases them"
    pin = add_command(commands, "pin", pin_sets, text, examples=PIN)
    text = "let pinned weight sets go when nobody leases them"
    unpin = add_command(commands, "unpin", unpin_sets, text, examples=UNPIN)
    for command in (pin, unpin):
        command.add_argument(
            "set", help="a set's id, name or content identity (--name is the broker's)"
        )
    text = "digest resident weights and compare with what was loaded"
    verify = add_command(commands, "verify", verify_sets, text, examples=VERIFY)
    verify.add_argument(
        "set", nargs="?", help="a set's id, name or content identity; default: every sealed set"
    )


def evict_sets(options: argparse.Namespace) -> int:
    with observe(options) as client:
        evicted = client.evict(options.set)
    gone = [number for number in evicted.sets if number not in evicted.draining]
    if gone:
        print(f"evicted: {set_numbers(gone)}")
    if evicted.draining:
        print(
            f"evicted when their last lease ends, unless an engine asks for them before: "
            f"{set_numbers(evicted.draining)}"
        )
    return 0


def pin_sets(options: argparse.Namespace) -> int:
    with observe(options) as client:
        pinned = client.pin(options.set)
    print(f"pinned: {set_numbers(pinned.sets)}")
    if pinned.kept:
        print(f"no longer to go with the last lease: {set_numbers(pinned.kept)}")
    return 0


def unpin_sets(options: argparse.Namespace) -> int:
    with observe(options) as client:
        unpinned = client.unpin(options.set)
    print(f"not pinned any more: {set_numbers(unpinned.sets)}")
    return 0


def verify_sets(options: argparse.Namespace) -> int:
    """Digest what is resident and compare with what was loaded.

    Raises:
        LoadFailed: a set's bytes are not what its identity says.
        NotFound: no sealed set of that id, name or content identity.
    """
    with observe(options) as observer:
        report = observer.status()
    warn_of_left_off(report)
    chosen = [entry for entry in report["sets"] if _is_chosen(entry, options.set)]
    if not chosen:
        raise _nothing_to_verify(report, options.set)
    for entry in chosen:
        _verify(entry, SIMULATED if report["broker"]["simulated"] else None, options)
    return 0


def _nothing_to_verify(report: dict[str, Any], which: str | None) -> NotFound:
    what, near = "weight set that came from a checkpoint", ""
    if which:
        names = sorted({name for entry in report["sets"] for name in entry["names"]})
        what, near = f"sealed weight set {which!r}", did_you_mean(which, names)
    hint = f"{near} " if near else ""
    return NotFound(f"there is no {what} to verify; {hint}`status` lists what is resident")


def _is_chosen(entry: dict[str, Any], which: str | None) -> bool:
    # What an engine published is whatever its key says: there is nothing to compare with.
    if entry["state"] != "sealed" or entry["path"] is None:
        return False
    known = (str(entry["id"]), *entry["names"], entry["key"]["checkpoint"])
    return which is None or which in known


def _verify(entry: dict[str, Any], simulated: str | None, options: argparse.Namespace) -> None:
    from broker.checkpoints.identity import slab_identity
    from engine_client.client import EngineClient

    device = simulated or entry["key"]["device"]
    broker, directory = options.name, options.directory
    with (
        EngineClient(device, broker=broker, directory=directory, label="verify") as client,
        client.acquire(client.key_of(entry)) as weights,
    ):
        found = slab_identity(weights.manifest, weights.read)
    if found != entry["key"]["checkpoint"]:
        raise LoadFailed(
            f"set {entry['id']} is damaged: its bytes are {found}, loaded was "
            f"{entry['key']['checkpoint']}; evict it and load it again",
            reason="damaged",
            set=entry["id"],
        )
    print(f"set {entry['id']}: {entry['nbytes']} bytes, {found}: as loaded")
