"""What has a `close` can be used in a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closeable")


class Closeable(ABC):
    """A context manager that closes itself at the block's end, whatever has happened in it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this object holds."""

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019 - `Self` is not in the library of 3.10
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
