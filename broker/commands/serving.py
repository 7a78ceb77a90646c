"""`weight-broker serve`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from broker.commands.parsing import Commands, Examples, add_plain
from broker.configuration import CONFIG_OPTION, CONFIG_VARIABLE, configure
from broker.errors import BadRequest, BrokerError
from broker.sd_notify import notify
from broker.settings import SETTINGS, Kind, Setting
from broker.stop_signals import hold_stop_signals

EXAMPLES: Examples = (
    ("serve", "every GPU that this process sees"),
    ("serve --device cuda:1 --memory-limit 40g", "one GPU, at most 40 GiB of it"),
    ("serve --device simulated", "host memory, for trying out"),
    ("serve --preload /models/m --log-format json", "a checkpoint that is there from the start"),
    ("serve --config /etc/weight-broker.toml --print-config", "what would count, and why"),
)
NOTES = f"""\
Settings may also be variables (WEIGHT_BROKER_MEMORY_LIMIT for --memory-limit)
or keys of a TOML file (memory-limit), which {CONFIG_OPTION} or
${CONFIG_VARIABLE} names. An option counts more than a variable, a
variable more than the file. docs/configuration.md has all.
"""


def add_to(commands: Commands) -> None:
    text = "hold weights for the engines of this node"
    serve = add_plain(commands, "serve", serve_engines, text, examples=EXAMPLES, notes=NOTES)
    for setting in SETTINGS:
        serve.add_argument(setting.option, **_argument(setting))
    serve.add_argument(CONFIG_OPTION, metavar="FILE", help="TOML file with any of these settings")
    serve.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting's value and where it comes from, and end",
    )


def _argument(setting: Setting) -> dict[str, Any]:
    """What the parser is told of a setting. No default: which value counts is decided later."""
    said = setting.help
    if setting.kind in (Kind.LIST, Kind.LIMITS):
        said += "; may be given several times"
    if setting.default not in (None, [], False):
        shown = setting.default if not isinstance(setting.default, list) else setting.default[0]
        said += f" (default: {shown})"
    argument: dict[str, Any] = {"help": said.replace("%", "%%")}
    if setting.kind is Kind.SWITCH:
        return {**argument, "action": argparse.BooleanOptionalAction}
    if setting.kind is Kind.NUMBER:
        argument["type"] = int
    if setting.kind in (Kind.LIST, Kind.LIMITS):
        argument["action"] = "append"
    return {**argument, "metavar": setting.metavar, "choices": setting.choices or None}


def serve_engines(options: argparse.Namespace) -> int:
    """Returns when the broker has ended."""
    from broker.logs import log_to_stderr, say_refusal
    from broker.service import Broker

    configuration = configure(vars(options), os.environ, options.config)
    config = configuration.broker_config()
    if options.print_config:
        from broker.commands.print_config import as_toml

        print(as_toml(configuration), end="")
        return 0
    log_to_stderr(config.log_format)
    try:
        broker = Broker(config)
    except BrokerError as error:
        say_refusal(error, config.log_format)
        return error.exit_code
    broker.stop_on_signals()
    code = broker.run(_ready)
    hold_stop_signals()
    return code


def _ready(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as error:
        raise BadRequest(f"standard output cannot be written ({error.strerror})") from error
    notify(f"READY=1\nSTATUS={line}")
