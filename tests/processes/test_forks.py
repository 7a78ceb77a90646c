"""A fork by one thread while another connects, acquires or publishes: nothing stays with the child.

The child lives on, as a data loader's worker does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.forking import no_fork
from engine_client import Checkpoint, EngineClient, lease, session
from tests.support.clock import SCALE, eventually
from tests.support.processes import RIGHT_SECONDS, RunningBroker

SECONDS = 10.0


@contextlib.contextmanager
def forked() -> Iterator[int]:
    """A child that does nothing, until the block's end: its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Stop:
    """Has a thread wait before, or after, it calls a function of a module."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any, name: str, *, after: bool) -> None:
        self._call, self._after = getattr(module, name), after
        self._reached, self._go_on = threading.Event(), threading.Event()
        patch.setattr(module, name, self)

    def __call__(self, *arguments: Any) -> Any:
        result = self._call(*arguments) if self._after else None
        self._reached.set()
        assert self._go_on.wait(SECONDS * SCALE)
        return result if self._after else self._call(*arguments)

    @contextlib.contextmanager
    def holding(self, call: Callable[[], object]) -> Iterator[Callable[[], None]]:
        """Another thread makes the call and waits there; what is yielded has it end the call."""
        thread = threading.Thread(target=call)
        thread.start()
        assert self._reached.wait(SECONDS * SCALE)

        def finish() -> None:
            self._go_on.set()
            thread.join(SECONDS * SCALE)
            assert not thread.is_alive()

        try:
            yield finish
        finally:
            finish()


def opened(pid: int) -> Counter[str]:
    """Slabs and manifests that a process has open or mapped. Another test may have left some."""
    found = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.append(str(link.readlink()))
    return Counter(name for name in found if "weight-broker" in name)


def test_while_a_client_connects(
    shared_broker: RunningBroker, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is closed ends its session, though a child has a copy of its socket."""
    sessions = len(shared_broker.status()["sessions"])
    stop = Stop(monkeypatch, session, "_check_listener", after=True)

    def live() -> None:
        with shared_broker.client() as client:
            client.acquire(checkpoint)

    with stop.holding(live) as finish, forked():
        finish()
        eventually(lambda: not shared_broker.leases(), RIGHT_SECONDS, "the end of the lease")
        ended = lambda: len(shared_broker.status()["sessions"]) == sessions  # noqa: E731
        eventually(ended, RIGHT_SECONDS, "the end of the session")


def test_while_weights_are_acquired(
    shared_broker: RunningBroker, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has neither the slab nor the manifest, which the parent has received."""
    with shared_broker.client() as client:
        client.acquire(checkpoint).release()
        before = opened(os.getpid())
        stop = Stop(monkeypatch, lease, "map_granted", after=False)
        with stop.holding(lambda: client.acquire(checkpoint).release()), forked() as child:
            assert (opened(os.getpid()) - before).total() >= 2
            eventually(lambda: not opened(child) - before, RIGHT_SECONDS, "the child's closing")


def test_while_weights_are_mapped(
    shared_broker: RunningBroker, checkpoint: Checkpoint, slab_mappings: Callable[[], int]
) -> None:
    """A fork waits until what is mapped is marked as not for children."""
    before = opened(os.getpid())
    with shared_broker.client() as client, client.acquire(checkpoint):
        assert slab_mappings() == 1
        forking, forked_at_last = threading.Event(), threading.Event()

        def fork() -> None:
            forking.set()
            with forked() as child:
                eventually(lambda: not opened(child) - before, RIGHT_SECONDS, "the child's closing")
                forked_at_last.set()

        with no_fork:
            thread = threading.Thread(target=fork)
            thread.start()
            assert forking.wait(SECONDS * SCALE)
            assert not forked_at_last.wait(0.2)
        thread.join(SECONDS * SCALE)
        assert forked_at_last.is_set()


def test_a_client_of_the_childs_own(shared_broker: RunningBroker, checkpoint: Checkpoint) -> None:
    """What the parent has open is closed there, and nothing that the child opens itself."""
    with shared_broker.client() as client, client.acquire(checkpoint):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = _serve_in_child(client, shared_broker, checkpoint)
            os._exit(code)
        _pid, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert client.ping().pid == shared_broker.server_pid()


def _serve_in_child(client: EngineClient, broker: RunningBroker, checkpoint: Checkpoint) -> int:
    with broker.client() as own, own.acquire(checkpoint) as weights:
        del client
        assert weights.read(0, 4)
        assert own.ping()
    return 0


def test_by_a_handler_that_came_into_a_closed_moment(shared_broker: RunningBroker) -> None:
    """The child makes a client of its own, though nobody goes on where the handler came."""
    with no_fork, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
        if child == 0:
            signal.alarm(round(SECONDS * SCALE))
            try:
                shared_broker.client().close()
            except BaseException:  # noqa: BLE001 - the child must not run on in the tests
                os._exit(1)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with no_fork:  # and here it is as it was
        pass
