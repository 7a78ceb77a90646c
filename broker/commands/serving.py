"""`weight-broker serve`."""

from __future__ import annotations

import argparse

from broker.commands.parsing import Commands, add_command, add_device
from broker.config import BrokerConfig
from broker.credentials import group_id
from broker.device_names import AUTO
from broker.limits import parse_limits
from broker.sd_notify import notify
from broker.stop_signals import hold_stop_signals


def add_to(commands: Commands) -> None:
    serve = add_command(
        commands, "serve", serve_engines, "hold weights for the engines of this node"
    )
    add_device(serve)
    serve.add_argument(
        "--memory-limit",
        metavar="BYTES|SHARE",
        help="per device: 8g, 512m or 80%% (default: what is free at the start less a sixteenth)",
    )
    serve.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="PATH",
        help="load this checkpoint at the start and keep it (may be given several times)",
    )
    serve.add_argument(
        "--allow-loaders",
        action="store_true",
        help="run loaders that engines ship (code of theirs, in a process of its own)",
    )
    serve.add_argument(
        "--group",
        metavar="NAME",
        help="engines of this group's members may use the broker too (docs/security.md)",
    )
    serve.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what peers may use, e.g. sessions=1000 (may be given several times; docs/limits.md "
        "lists all)",
    )
    serve.add_argument(
        "--loader-threads", type=int, default=2, help="reading threads of one load (default: 2)"
    )


def serve_engines(options: argparse.Namespace) -> int:
    """Returns when the broker has ended."""
    from broker.logs import log_to_stderr
    from broker.service import Broker

    log_to_stderr()
    config = BrokerConfig(
        name=options.name,
        directory=options.directory,
        device=",".join(options.device or [AUTO]),
        memory_limit=options.memory_limit,
        preload=tuple(options.preload),
        allow_loaders=options.allow_loaders,
        loader_threads=options.loader_threads,
        limits=parse_limits(options.limit),
        group=None if options.group is None else group_id(options.group),
    )
    broker = Broker(config)
    broker.stop_on_signals()
    code = broker.run(_ready)
    hold_stop_signals()
    return code


def _ready(line: str) -> None:
    print(line, flush=True)
    notify("READY=1")
