"""Loader processes of a server that has other things to do first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from broker.custody.actions import StartLoader
from broker.errors import Cancelled
from broker.loading import Loading
from broker.loop import Loop

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
