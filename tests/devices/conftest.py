"""Fixtures of the device tests."""

from __future__ import annotations

from tests.fake_driver.fixtures import fake, fake_cuda, fake_hip, fake_libraries
from tests.gpu.fixtures import gpu

__all__ = ["fake", "fake_cuda", "fake_hip", "fake_libraries", "gpu"]
