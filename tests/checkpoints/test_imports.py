"""What importing this package brings into a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CLIENT = ("torch", "zmq", "numpy", "safetensors")
LOADER = ("torch", "zmq", "numpy")


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("files", CLIENT),
        ("identity", CLIENT),
        ("header", CLIENT),
        ("stability", CLIENT),
        ("plan", LOADER),
        ("reading", LOADER),
    ],
)
def test_light_imports(module: str, unwanted: tuple[str, ...]) -> None:
    """The client's part imports no torch, zmq, numpy or safetensors; the loader's only the last."""
    code = (
        f"import sys, broker.checkpoints.{module}\n"
        f"print([name for name in {unwanted!r} if name in sys.modules])"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
