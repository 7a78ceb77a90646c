"""What an engine asks for when it names a path."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint: a folder, or one safetensors file.

    Attributes:
        path: as this process sees it; the broker may see another path, it opens the files through
            a descriptor.
        name: makes the weights a generation of the line of that name; None: of no line.
    """

    path: str | os.PathLike[str]
    name: str | None = None
