"""`weight-broker upgrade` and `shutdown`: the life of a running broker."""

from __future__ import annotations

import argparse

from broker.commands.parsing import Commands, Examples, add_command, observe

UPGRADE: Examples = (("upgrade", "after pip has installed another version"),)
SHUTDOWN: Examples = (
    ("shutdown", "refused while engines hold leases"),
    ("shutdown --force", "their mappings stay valid, but nobody can attach any more"),
)


def add_to(commands: Commands) -> None:
    text = "replace the server by the version installed now; engines notice nothing"
    add_command(commands, "upgrade", upgrade, text, examples=UPGRADE)
    text = "stop the broker in order"
    stop = add_command(commands, "shutdown", shut_down, text, examples=SHUTDOWN)
    stop.add_argument("--force", action="store_true", help="also while engines hold leases")


def upgrade(options: argparse.Namespace) -> int:
    """Returns when the new server answers."""
    with observe(options) as client:
        client.upgrade()
        broker = client.status()["broker"]
    print(f"upgraded: server {broker['pid']} goes on, keeper {broker['keeper_pid']} stays")
    return 0


def shut_down(options: argparse.Namespace) -> int:
    """Returns when the broker has ended."""
    with observe(options) as client:
        client.shutdown(force=options.force)
        client.wait_until_lost()
    print("stopped")
    return 0
