"""How code that an engine ships travels. Opened by the loader process alone."""

from __future__ import annotations

import msgspec


class ShippedCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The code by cloudpickle, and the engine's import path, so that what it names is found."""

    path: list[str]
    pickled: bytes
