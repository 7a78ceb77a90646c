"""Names of devices: what they mean, and what is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from broker.config import BrokerConfig
from broker.device_names import devices_meant, means_gpus
from broker.errors import BadRequest

VISIBLE = ["GPU-a", "GPU-b", "MIG-c"]


@pytest.mark.parametrize(
    ("device", "found", "missing"),
    [
        ("auto", VISIBLE, []),
        ("cuda", VISIBLE, []),
        ("cuda:1", ["GPU-b"], []),
        ("MIG-c", ["MIG-c"], []),
        ("MIG-c, cuda:0,GPU-a", ["MIG-c", "GPU-a"], []),
        ("cuda:0,auto", VISIBLE, []),
        ("cuda:3,GPU-x,GPU-b", ["GPU-b"], ["cuda:3", "GPU-x"]),
        ("GPU-", [], ["GPU-"]),
    ],
)
def test_what_names_mean(device: str, found: list[str], missing: list[str]) -> None:
    """Devices in the order of their names, each once; and the names that mean none."""
    assert devices_meant(device, VISIBLE) == (found, missing)


def test_nothing_is_visible() -> None:
    """Then every name is missing."""
    assert devices_meant("auto,cuda:0", []) == ([], ["auto", "cuda:0"])


@pytest.mark.parametrize(
    "device", ["auto", "cuda", "cuda:12", "GPU-1f", "MIG-1/2/3", "cuda:0, auto"]
)
def test_gpus(device: str) -> None:
    """Names that a GPU is meant by; a broker takes each."""
    assert means_gpus(device)
    assert BrokerConfig(device=device).device == device


@pytest.mark.parametrize(
    "device",
    [
        "",
        "cpu",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "cuda:" + "9" * 5000,
        "CUDA",
        "GPU-",
        "xpu",
        "simulated,cuda",
        "cuda,,auto",
    ],
)
def test_names_that_are_none(device: str) -> None:
    """A broker refuses them with the names there are."""
    assert not means_gpus(device)
    with pytest.raises(BadRequest) as caught:
        BrokerConfig(device=device)
    assert str(caught.value) == (
        f"--device {device!r}: choose auto, cuda or simulated, or name GPUs by number (cuda:1) or "
        "UUID, several separated by commas"
    )


def test_several_options_are_one_list() -> None:
    """`--device` may be given again, and a name that is none is refused before anything is done."""
    command = [sys.executable, "-m", "broker", "serve", "--device", "cuda:0", "--device", "mps"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("weight-broker: --device 'cuda:0,mps': choose auto, cuda or ")
