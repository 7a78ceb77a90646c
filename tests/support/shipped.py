"""Loaders that fail, each in its way. Imported by the process that runs them: no torch."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def raises() -> Any:
    print("about to fail", flush=True)
    raise FileNotFoundError("/models/adapter")


def exits() -> Any:
    os.write(2, b"giving up\n")
    os._exit(3)


def crashes() -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def is_killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> Any:
    while True:
        time.sleep(1)
