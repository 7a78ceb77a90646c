"""What an engine asks for when it names a path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.errors import UsageError
from broker.wire import Conversion


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint: a folder, or one safetensors file.

    Attributes:
        path: as this process sees it; the broker may see another path, it opens the files through
            a descriptor.
        name: makes the weights a generation of the line of that name; None: of no line.
        dtype: what floating-point tensors are converted to as they are loaded, once per node; that
            is a weight set of its own. float16, bfloat16, float32 or float64; None: as stored.
        exceptions: tensors that get another dtype, by stored name. Only with `dtype`.
    """

    path: str | os.PathLike[str]
    name: str | None = None
    dtype: str | None = None
    exceptions: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def conversion(self) -> Conversion | None:
        """What a loader is to do to the stored dtypes.

        Raises:
            UsageError: exceptions without the rule that they are exceptions from.
        """
        if self.dtype is None:
            if self.exceptions:
                raise UsageError("Checkpoint: exceptions say nothing without a dtype")
            return None
        return Conversion(self.dtype, tuple(sorted(self.exceptions.items())))
