"""`weight-broker ping`, for people and for the probes of whatever runs the broker."""

from __future__ import annotations

import argparse

from broker.commands.parsing import Commands, Examples, add_command

EXAMPLES: Examples = (
    ("ping", "0: it answers; 11: not in time; 13: there is no broker"),
    ("ping --timeout 1", "as a probe of a container"),
)
DEFAULT_SECONDS = 5.0


def add_to(commands: Commands) -> None:
    text = "ask whether the broker answers"
    ping = add_command(commands, "ping", ping_once, text, examples=EXAMPLES)
    ping.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for the answer (default: %(default)g)",
    )


def ping_once(options: argparse.Namespace) -> int:
    """Leaves no trace in the broker's log: it may be asked every second for a year."""
    from engine_client.pinging import ping_broker

    pong = ping_broker(options.name, options.directory, options.timeout)
    print(f"server {pong.pid} answers, protocol {pong.protocol}")
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds to wait")
    return seconds
