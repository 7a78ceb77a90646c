"""Runs modules of ours in processes forked from this one, which has imported what they need.

Imports are most of the time that a broker or an engine takes to start, and tests start hundreds.
Such a process differs from one of `python -m MODULE ARGUMENTS` in nothing but that. How brokers and
engines start by themselves is what the tests of the command line, of the life of a broker, of the
first server and of the examples look at (tests/support/warm_start.py is their other end).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from typing import Any

IMPORTED = (
    "broker.checkpoints.identity",
    "broker.cli",
    "broker.commands.serving",
    "broker.first_server",
    "broker.journal.recording",
    "broker.server_process",
    "broker.service",
    "engine_client.client",
    "engine_client.watching",
)


def main(link: socket.socket) -> None:
    """Fork and wait for processes as told by the other end, until it closes."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    while True:
        packet, descriptors, _flags, _address = socket.recv_fds(link, 1 << 17, 3)
        if not packet:
            return
        order = json.loads(packet)
        if "wait_for" in order:
            _pid, status = os.waitpid(order["wait_for"], 0)
            link.send(json.dumps(status).encode())
            continue
        pid = os.fork()
        if pid == 0:
            link.close()
            become(order, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        link.send(json.dumps(pid).encode())


def become(order: dict[str, Any], standard: list[int]) -> None:
    """Run the module in this process, as `python -m` would; what it raises ends the process."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv[1:] = order["arguments"]
    sys.modules.pop(f"{order['module']}.__main__", None)  # imported for a constant in it
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
