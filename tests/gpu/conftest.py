"""A real GPU for the tests of this folder; they skip with the reason where there is none."""

from __future__ import annotations

from tests.gpu.fixtures import gpu

__all__ = ["gpu"]
