"""A keeper whose servers are a few lines of Python: for what real servers hardly ever do.

    python -m tests.support.fake_keeper DIRECTORY LONGEST_DELAY SCRIPT

The script runs as `python -c SCRIPT LINK`.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from broker import keeper as module
from broker.errors import BrokerError
from broker.keeper import Keeper
from broker.logs import log_to_stderr
from broker.rundir import BrokerPaths

READY = """
import socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
restarts = int(link.recv(65536).split()[2])
link.send(b"ready - -\\nthe fake server is ready")
"""
"""The beginning of a script whose server comes up."""


STOP_SECONDS = 0.5
LOOK_SECONDS = 0.2
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(directory: str, longest_delay: str, script: str) -> int:
    log_to_stderr()
    module.STOP_SECONDS = STOP_SECONDS
    module.LOOK_SECONDS = LOOK_SECONDS
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # as the first process of a container
    try:
        command = [sys.executable, "-c", script]
        keeper = Keeper(BrokerPaths(Path(directory)), b"{}", float(longest_delay), command)
    except BrokerError as error:
        print(error.sentence, file=sys.stderr)
        return error.exit_code
    keeper.stop_on_signals()
    return keeper.run(_say)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # in one piece: the server writes into the same pipe
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
