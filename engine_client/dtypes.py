"""Dtypes as people write them: torch's name, or torch's own object. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from broker.errors import UsageError

if TYPE_CHECKING:
    import torch

    Dtype: TypeAlias = str | torch.dtype


def dtype_name(given: Dtype, what: str = "dtype") -> str:
    """The name, "bfloat16" of `torch.bfloat16` and of its text; whether there is such a dtype,
    others say.

    Args:
        what: what messages call it.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str):
        return given.removeprefix("torch.")
    kind = type(given)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(given).removeprefix("torch.")
    raise UsageError(f'{what} must be a dtype or its name, "bfloat16", not {kind.__name__}')
