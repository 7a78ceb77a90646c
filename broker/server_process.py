"""`python -m broker.server_process LINK`, by the keeper only, which tells it what to serve."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from broker.config import BrokerConfig
from broker.errors import BrokerError
from broker.limits import LIMITS, Limits, raise_descriptor_limit
from broker.link import receive_item, unpack_record
from broker.logs import log_crash, log_to_stderr, say_refusal
from broker.rundir import BrokerPaths
from broker.server import Server
from broker.stop_signals import hold_stop_signals


def main(arguments: list[str]) -> int:
    """Serve until told to stop; the exit code, which tells the keeper whether to go on."""
    link = socket.socket(fileno=int(arguments[0]))
    begin = receive_item(link)
    if begin is None:
        return 0  # the keeper has ended, or needs none
    config, paths = config_from(unpack_record(begin))
    raise_descriptor_limit()  # the first server was there before its keeper did it
    log_to_stderr(config.log_format)
    sys.excepthook = log_crash
    router, sessions = (socket.socket(fileno=number) for number in begin.descriptors)
    try:
        server = Server(config, paths, link, router, sessions, int(begin.key))
    except BrokerError as error:
        say_refusal(error, config.log_format)
        return error.exit_code
    server.stop_on_signals()
    code = server.run()
    hold_stop_signals()
    return code


def config_from(options: bytes) -> tuple[BrokerConfig, BrokerPaths]:
    """A server's configuration as its keeper passed it on."""
    given = json.loads(options)
    directory = Path(given.pop("directory"))
    known = {name: value for name, value in given["limits"].items() if name in LIMITS}
    given["preload"], given["limits"] = tuple(given["preload"]), Limits(**known)
    config = BrokerConfig(directory=directory, **given)
    return config, BrokerPaths(directory, config.name, config.group)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
