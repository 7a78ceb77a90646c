from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import pytest
from torch import Tensor

from tests.engine_client.slabs import Slab, slab_of


class MakeSlab(Protocol):
    def __call__(self, tensors: Mapping[str, Tensor], kinds: Mapping[str, str] = ...) -> Slab: ...


@pytest.fixture
def make_slab() -> Iterator[MakeSlab]:
    made: list[Slab] = []

    def make(tensors: Mapping[str, Tensor], kinds: Mapping[str, str] | None = None) -> Slab:
        made.append(slab_of(tensors, kinds or {}))
        return made[-1]

    yield make
    for slab in made:
        slab.close()
