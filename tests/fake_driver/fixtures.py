"""Fixtures that give a test a fake driver; import them into a conftest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.devices.libraries import OVERRIDES, Vendor
from tests.fake_driver.build import CannotBuild, FakeDriver, build, in_environment

REQUIRED = "WEIGHT_BROKER_REQUIRE_FAKE_DRIVERS"
"""Set where compiler and headers must be there (CI): the tests then fail instead of skipping."""

VENDORS: tuple[Vendor, ...] = ("nvidia", "amd")

_libraries: dict[Vendor, Path | str] = {}


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Vendor, Path | str]:
    """Each vendor's compiled fake driver, or why there is none."""
    if not _libraries:  # compiled once, also where several conftests have this fixture
        folder = tmp_path_factory.mktemp("fake-drivers")
        with ThreadPoolExecutor(len(VENDORS)) as pool:
            built = pool.map(lambda vendor: _built(vendor, folder), VENDORS)
            _libraries.update(zip(VENDORS, built, strict=True))
    return _libraries


def _built(vendor: Vendor, folder: Path) -> Path | str:
    try:
        return build(vendor, folder)
    except CannotBuild as error:
        return str(error)


def library_of(vendor: Vendor, libraries: dict[Vendor, Path | str]) -> Path:
    """The vendor's compiled fake driver; the test skips, or fails, where there is none."""
    library = libraries[vendor]
    if isinstance(library, str):
        if os.environ.get(REQUIRED):
            pytest.fail(library)
        pytest.skip(library)
    return library


def fake_driver(
    vendor: Vendor,
    libraries: dict[Vendor, Path | str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeDriver:
    """The vendor's fake driver for this process and its children; skips where there is none."""
    library = library_of(vendor, libraries)
    for name in (*OVERRIDES.values(), "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeDriver(vendor, library, tmp_path / "fake-driver.log", tmp_path / "sys")
    in_environment(fake, monkeypatch.setenv)
    return fake


def checked(fake: FakeDriver) -> Iterator[FakeDriver]:
    """The fake driver; the test fails if its code misused it or left anything behind."""
    fake.start()
    yield fake
    assert fake.complaints() == ""
    assert fake.live() == {}


@pytest.fixture(params=VENDORS)
def fake(
    request: pytest.FixtureRequest,
    fake_libraries: dict[Vendor, Path | str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FakeDriver]:
    """Each vendor's fake driver in turn."""
    yield from checked(fake_driver(request.param, fake_libraries, tmp_path, monkeypatch))


@pytest.fixture
def fake_cuda(
    fake_libraries: dict[Vendor, Path | str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDriver]:
    yield from checked(fake_driver("nvidia", fake_libraries, tmp_path, monkeypatch))


@pytest.fixture
def fake_hip(
    fake_libraries: dict[Vendor, Path | str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDriver]:
    yield from checked(fake_driver("amd", fake_libraries, tmp_path, monkeypatch))
