"""The command line: `weight-broker COMMAND`.

Exit codes are those of the error classes (errors.py) and documented in README.md; 0 is success.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from broker.admin import (
    evict_sets,
    list_names,
    pin_sets,
    print_status,
    publish_checkpoint,
    shutdown_broker,
    upgrade_broker,
    verify_sets,
)
from broker.config import BrokerConfig
from broker.credentials import group_id
from broker.device_names import AUTO
from broker.errors import BrokerError
from broker.limits import parse_limits
from broker.rundir import DEFAULT_NAME, DIRECTORY_VARIABLE
from broker.sd_notify import notify
from broker.stop_signals import hold_stop_signals

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        code = command(options)
        sys.stdout.flush()  # here, where a reader that went away is no error
        return code
    except BrokerError as error:
        print(_sentence(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, but nothing may be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _sentence(error: BrokerError) -> str:
    prefixed = error.sentence.startswith("[weight-broker:")
    return error.sentence if prefixed else f"weight-broker: {error.sentence}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weight-broker",
        description="Inference engines on one GPU node share one copy of the model weights.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    status = _add(commands, "status", _status, "show everything on the broker's books")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    evict = _add(commands, "evict", _evict, "forget weight sets as soon as nobody leases them")
    evict.add_argument("set", help="a set's id, name or content identity, as status shows it")
    verify = _add(commands, "verify", _verify, "digest resident weights and compare")
    verify.add_argument("set", nargs="?", help="a set's id or name; default: every sealed set")
    names = _add(commands, "list", _list, "show names and their generations")
    names.add_argument("--json", action="store_true", help="as one JSON object")
    publish = _add(
        commands, "publish", _publish, "load a checkpoint as a new generation of a name", "--broker"
    )
    publish.add_argument("path", help="a folder, or one safetensors file")
    publish.add_argument("--name", required=True, dest="line", help="whose new generation it is")
    publish.add_argument("--generation", help="its label (default: the next number)")
    publish.add_argument("--device", metavar="UUID", help="if the broker serves several devices")
    pin = _add(commands, "pin", _pin, "keep weight sets although nobody leases them")
    unpin = _add(commands, "unpin", _unpin, "the opposite of pin")
    for command in (pin, unpin):
        command.add_argument("set", help="a set's id, name or content identity")
    _add(commands, "upgrade", _upgrade, "replace the server; engines notice nothing")
    shutdown = _add(commands, "shutdown", _shutdown, "stop the broker in order")
    shutdown.add_argument("--force", action="store_true", help="also while engines hold leases")
    doctor = _add(commands, "doctor", _doctor, "check step by step whether a broker can work here")
    _add_device(doctor)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    broker: str = "--name",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    parser.add_argument(
        broker, dest="name", default=DEFAULT_NAME, help="which broker (default: %(default)s)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        dest="directory",
        help=f"directory of its sockets (default: ${DIRECTORY_VARIABLE} or the user's own)",
    )
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = _add(commands, "serve", _serve, "hold weights for the engines of this node")
    _add_device(serve)
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


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help="auto or cuda: every GPU this process sees, also AMD's; GPUs by number (cuda:1) or "
        "UUID, several with commas or by giving this several times; simulated: host memory, for "
        "trying out only (default: auto)",
    )


def _devices(options: argparse.Namespace) -> str:
    return ",".join(options.device or [AUTO])


def _serve(options: argparse.Namespace) -> int:
    from broker.logs import log_to_stderr
    from broker.service import Broker

    log_to_stderr()
    config = BrokerConfig(
        name=options.name,
        directory=options.directory,
        device=_devices(options),
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


def _status(options: argparse.Namespace) -> int:
    return print_status(options.name, options.directory, as_json=options.json)


def _evict(options: argparse.Namespace) -> int:
    return evict_sets(options.name, options.directory, options.set)


def _verify(options: argparse.Namespace) -> int:
    return verify_sets(options.name, options.directory, options.set)


def _upgrade(options: argparse.Namespace) -> int:
    return upgrade_broker(options.name, options.directory)


def _list(options: argparse.Namespace) -> int:
    return list_names(options.name, options.directory, as_json=options.json)


def _publish(options: argparse.Namespace) -> int:
    return publish_checkpoint(
        options.name,
        options.directory,
        options.path,
        options.line,
        generation=options.generation,
        device=options.device,
    )


def _pin(options: argparse.Namespace) -> int:
    return pin_sets(options.name, options.directory, options.set, pinned=True)


def _unpin(options: argparse.Namespace) -> int:
    return pin_sets(options.name, options.directory, options.set, pinned=False)


def _shutdown(options: argparse.Namespace) -> int:
    return shutdown_broker(options.name, options.directory, force=options.force)


def _doctor(options: argparse.Namespace) -> int:
    from broker.doctor import examine

    return examine(_devices(options))
