"""`weight-broker upgrade` and `shutdown`: the life of a running broker."""

from __future__ import annotations

import argparse

from broker.commands.parsing import Commands, add_command, observe


def add_to(commands: Commands) -> None:
    add_command(commands, "upgrade", upgrade, "replace the server; engines notice nothing")
    stop = add_command(commands, "shutdown", shut_down, "stop the broker in order")
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
