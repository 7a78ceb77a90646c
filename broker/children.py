"""What child processes that run modules of ours are started with."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Our own environment, in which this very copy of the broker is found first.

    Start the child with the working directory "/": `-m` puts that first on its path.
    """
    root = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}
