"""How devices are asked for, and which of the visible ones are meant. Knows nothing of drivers."""

from __future__ import annotations

import re
from collections.abc import Sequence

AUTO = "auto"
SIMULATED = "simulated"
SIMULATED_UUID = "SIM-0"
"""The simulated device is one for each node."""

_EVERY_GPU = (AUTO, "cuda")
_GPU = re.compile(r"auto|cuda(:[0-9]{1,9})?|(GPU|MIG)-.+")
"""torch's names (ROCm devices are "cuda" to torch too) and UUIDs."""


def is_simulated(device: str) -> bool:
    """Whether it is a name of the simulated device: its own, or its UUID."""
    return device in (SIMULATED, SIMULATED_UUID)


def uuid_of(device: str) -> str:
    """A device's UUID, given that or the simulated device's name."""
    return SIMULATED_UUID if is_simulated(device) else device


def means_gpus(device: str) -> bool:
    """Whether every name in the list (names separated by commas) is one of a GPU's."""
    return all(_GPU.fullmatch(name) for name in _names(device))


def devices_meant(device: str, visible: Sequence[str]) -> tuple[list[str], list[str]]:
    """The devices a list of names means, and the names of those that are not there.

    Args:
        device: "auto" or "cuda" for every GPU, "cuda:N" for that of this number, or a UUID; or
            several of them, separated by commas.
        visible: the UUIDs this process sees, by its own numbers.

    Returns:
        UUIDs in the order of the names, each once; and names, as they were given.
    """
    found: dict[str, None] = {}
    missing = []
    for name in _names(device):
        meant = _meant(name, visible)
        found.update(dict.fromkeys(meant))
        if not meant:
            missing.append(name)
    return list(found), missing


def _names(device: str) -> list[str]:
    return [name.strip() for name in device.split(",")]


def _meant(name: str, visible: Sequence[str]) -> list[str]:
    if name in _EVERY_GPU:
        return list(visible)
    number = name.partition(":")[2]
    if name.startswith("cuda:") and number.isdecimal():
        return list(visible[int(number) : int(number) + 1])
    return [name] if name in visible else []
