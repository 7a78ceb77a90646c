"""What an engine asks for when it names a path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker.errors import UsageError
from broker.wire import Conversion
from engine_client.arguments import check_name, check_text, said_of
from engine_client.dtypes import dtype_name

if TYPE_CHECKING:
    from engine_client.dtypes import Dtype


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint: a folder, or one safetensors file.

    Attributes:
        path: as this process sees it; the broker may see another path, it opens the files through
            a descriptor.
        name: makes the weights a generation of the line of that name; None: of no line.
        dtype: what floating-point tensors are converted to as they are loaded, once per node; that
            is a weight set of its own. float16, bfloat16, float32 or float64, by name or torch's
            own; None: as stored.
        exceptions: tensors that get another dtype, by stored name. Only with `dtype`.

    Raises:
        UsageError: the path, the name or a dtype is of a type that cannot be one.
    """

    path: str | os.PathLike[str]
    name: str | None = None
    dtype: Dtype | None = None
    exceptions: Mapping[str, Dtype] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            os.fsencode(self.path)
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError(f"Checkpoint: the path cannot be one: {error}") from error
        check_text(self.name, "Checkpoint: name")
        if not isinstance(self.exceptions, Mapping):
            raise UsageError(
                f"Checkpoint: exceptions must give dtypes by name, not {said_of(self.exceptions)}"
            )
        for name in self.exceptions:
            check_name(name, "Checkpoint: a tensor's name in exceptions")
        _ = self.conversion

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
        exceptions = {
            name: dtype_name(dtype, f"the dtype of {name!r}")
            for name, dtype in self.exceptions.items()
        }
        return Conversion(dtype_name(self.dtype), tuple(sorted(exceptions.items())))
