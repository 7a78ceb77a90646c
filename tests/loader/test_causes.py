"""What a loader says of its failure to everybody who waits."""

from __future__ import annotations

import pytest

from broker.devices.base import DeviceError, DeviceOutOfMemory
from broker.errors import BrokerError, InternalError, LoadFailed, OverBudget
from broker.loader.worker import _cause
from broker.loaders import UNWANTED, Ending, Job, ShippedWork
from broker.loading import NOT_WANTED

JOB = Job("1", "/nowhere", "GPU-1", "cuda", 2, ShippedWork("m.load"))


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (LoadFailed("it is cut short"), LoadFailed, "it is cut short"),
        (
            DeviceOutOfMemory("cuMemHostAlloc on GPU-1: out of memory"),
            OverBudget,
            (
                "device GPU-1 has no room for what a loader itself needs: cuMemHostAlloc on GPU-1: "
                "out of memory"
            ),
        ),
        (
            DeviceError("cuStreamSynchronize on GPU-1: an illegal memory access"),
            InternalError,
            (
                "the loader of m.load failed on its device: cuStreamSynchronize on GPU-1: an "
                "illegal memory access"
            ),
        ),
        (
            ValueError("nobody knows"),
            InternalError,
            "the loader of m.load failed: ValueError: nobody knows",
        ),
    ],
)
def test_causes(error: Exception, kind: type[BrokerError], sentence: str) -> None:
    """Errors of ours arrive as they are; the device's and any other become one sentence."""
    cause = _cause(error, JOB)
    assert type(cause) is kind
    assert cause.sentence == sentence


def test_who_was_ended_was_not_silent() -> None:
    """That a loader left no word is said only of one that ended by itself."""
    assert str(Ending(NOT_WANTED, UNWANTED, "")) == NOT_WANTED
    assert str(Ending("ended with exit code 3", "loader-exited", "")).endswith(" without a word")
    assert str(Ending(NOT_WANTED, UNWANTED, "a\n")) == f"{NOT_WANTED}; its last words: a"
