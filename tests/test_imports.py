"""What must stay light does: proven in fresh interpreters, not by reading the imports."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

NO_CONVERSATION = ("zmq", "torch", "numpy", "safetensors")
NO_TORCH = ("torch", "numpy", "safetensors", "rich", "prometheus_client", "jinja2")
LIGHT = {
    "broker.custody": NO_CONVERSATION,
    "broker.custody.audit": NO_CONVERSATION,
    "broker.wire": NO_CONVERSATION,
    "broker.errors": NO_CONVERSATION,
    "broker.weights": NO_CONVERSATION,
    "broker.server": (*NO_TORCH, "asyncio"),
    "broker.keeper": NO_TORCH,
    "broker.server_process": NO_TORCH,
    "broker.cli": (*NO_TORCH, "zmq", "shtab"),
    "broker.loader.worker": ("torch", "numpy", "asyncio"),
    "engine_client.session": (*NO_TORCH, "asyncio"),
    "engine_client.integrations.transformers": ("transformers",),
}
"""Module: what importing it must not load."""


def is_there(module: str) -> bool:
    package = module.rpartition(".")[0]
    return importlib.util.find_spec(package) is not None and (
        importlib.util.find_spec(module) is not None
    )


@pytest.mark.parametrize("module", LIGHT)
def test_what_an_import_pulls_in(module: str) -> None:
    """Importing the module in a fresh interpreter loads nothing it must not."""
    if not is_there(module):
        pytest.skip(f"{module} is not there")
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    ).stdout.split()
    assert module in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(LIGHT[module])
