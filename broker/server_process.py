"""`python -m broker.server_process OPTIONS RESTARTS LINK ROUTER SESSIONS`: by the keeper only."""

from __future__ import annotations

import socket
import sys

from broker.errors import BrokerError
from broker.logs import log_crash, log_to_stderr, say_refusal
from broker.server import Server
from broker.service import config_from
from broker.stop_signals import hold_stop_signals


def main(arguments: list[str]) -> int:
    """Serve until told to stop; the exit code, which tells the keeper whether to go on."""
    options, restarts, *descriptors = arguments
    config, paths = config_from(options)
    log_to_stderr(config.log_format)
    sys.excepthook = log_crash
    link, router, sessions = (socket.socket(fileno=int(number)) for number in descriptors)
    try:
        server = Server(config, paths, link, router, sessions, int(restarts))
    except BrokerError as error:
        say_refusal(error, config.log_format)
        return error.exit_code
    server.stop_on_signals()
    code = server.run()
    hold_stop_signals()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
