"""Hypothesis profiles, and what is shared by all tests because it takes seconds to start.

The suite's profile is deterministic and does not shrink: a failure is reported within the test's
time-out. `--hypothesis-profile=thorough --timeout 3600` searches on, and shrinks what it finds.
"""

from __future__ import annotations

import compileall
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.nursery import Nursery
from tests.support.processes import ROOT

# As in the background of a shell without job control, and under nohup; what tests start would
# inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    max_examples=100,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    derandomize=False,
    deadline=None,
    print_blob=True,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


LONGEST = ("test_examples.py", "test_keeper.py", "test_faults.py", "test_one_load_for_many.py")
"""Files that run first, so that no worker is left alone with one of them at the end."""


SELDOM = (20_000, 20, 20)
"""When garbage is looked for while tests run: models make objects by the ten thousand, and tests
that need a collection ask for it."""


def pytest_configure() -> None:
    """Compile once what hundreds of processes import, whether or not they may write it down."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for package in ("broker", "engine_client", "tests"):
            compileall.compile_dir(ROOT / package, quiet=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in all tests and all of torch, now or later: none of it will go."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*SELDOM)
        gc.enable()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where engines that need torch come from."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private directory whose path is short enough for sockets."""
    folder = tmp_path_factory.mktemp("d")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def umask_restored() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
