"""Loader processes of a server that has other things to do first, or no room for them."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from broker.custody.actions import StartLoader
from broker.errors import Cancelled
from broker.loaders import CheckpointWork, Job, spawn
from broker.loading import Loading
from broker.loop import Loop
from tests.support.processes import descriptors

GONE, SESSION = 7, 3


def test_a_load_whose_set_is_gone() -> None:
    """Nothing is started for what was evicted while the keeper was behind; the session ends."""
    loop = Loop()
    ended: list[tuple[int, type]] = []
    broker: Any = SimpleNamespace(
        books=SimpleNamespace(sets={}),
        loop=loop,
        end_session=lambda session, cause: ended.append((session, type(cause))),
    )
    loading = Loading(broker)
    source: Any = None
    loading.start(StartLoader(GONE, SESSION, "load", 1, source, hash_first=False))
    loading.stop(SESSION)  # which the books have said too
    assert (loading.queued, ended) == (0, [])
    loop.run_pending()
    assert ended == [(SESSION, Cancelled)]
    loop.close()


def test_a_loader_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no descriptor behind."""

    def refuse(_flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    source: Any = None
    job = Job("load", "/nowhere", "SIM-0", "simulated", 1, CheckpointWork(source, hash_first=False))
    before = descriptors(os.getpid())
    monkeypatch.setattr(os, "pipe2", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        spawn(job, 0)
    assert descriptors(os.getpid()) == before
