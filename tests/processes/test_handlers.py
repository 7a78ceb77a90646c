"""Handlers of signals: they come between any two steps of the main thread, and close or raise."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.errors import BrokerError, Busy, UsageError
from broker.limits import DEFAULTS
from engine_client import Checkpoint, EngineClient, WeightSet
from engine_client.channel import CLOSE_SECONDS
from tests.support.clock import SCALE, eventually
from tests.support.moments import at_line
from tests.support.processes import RunningBroker

HANG_SECONDS = 3.0

ENGINE = """
import signal, sys
from engine_client import Checkpoint, EngineClient
client = EngineClient("simulated", directory=sys.argv[1])
def stop(*_):
    client.close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    client.acquire(Checkpoint(sys.argv[2])).release()
"""


def check_nothing_is_left(broker: RunningBroker, slab_mappings: Callable[[], int]) -> None:
    eventually(lambda: broker.leases() == 0, 1, "the end of every lease")
    eventually(lambda: slab_mappings() == 0, 1, "the end of every mapping")


def descriptors() -> Counter[str]:
    """What is open, by name."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            found[str(link.readlink())] += 1
    return found


def lines_tried(try_at: Callable[[int], bool]) -> int:
    """Tries a handler at every line until it says that there is no such line; how many it tried.

    Each in a thread of its own, which must not wait for ever.
    """
    line, reached = 0, [True]
    while reached[-1]:
        thread = threading.Thread(
            target=lambda number: reached.append(try_at(number)), args=(line,), daemon=True
        )
        thread.start()
        thread.join(HANG_SECONDS * SCALE)
        assert not thread.is_alive(), f"it hangs when the handler comes at its line {line}"
        line += 1
    return line


# --- handlers that close the client ---------------------------------------------------------------


def ping(client: EngineClient, _weights: WeightSet) -> None:
    client.ping()


def release(_client: EngineClient, weights: WeightSet) -> None:
    weights.release()


def view(_client: EngineClient, weights: WeightSet) -> None:
    bytes(weights.memory("layer.1.weight"))


def read(_client: EngineClient, weights: WeightSet) -> None:
    weights.read(0, 16)


def tensor(_client: EngineClient, weights: WeightSet) -> None:
    weights["layer.1.weight"].sum()


def close(client: EngineClient, _weights: WeightSet) -> None:
    client.close()


@pytest.mark.parametrize("call", [ping, release, view, read, tensor, close])
def test_closing_in_the_middle_of_a_call(
    shared_broker: RunningBroker,
    checkpoint: Checkpoint,
    slab_mappings: Callable[[], int],
    call: Callable[[EngineClient, WeightSet], None],
) -> None:
    """Wherever a handler closes the client, neither it nor the call it came into waits for ever."""

    def try_at(line: int) -> bool:
        client = shared_broker.client()
        weights = client.acquire(checkpoint)
        weights.memory("layer.1.weight").release()  # the first call does more than the others
        try:
            reached = at_line(line, client.close, lambda: call(client, weights))
        except BrokerError:
            reached = True
        client.close()
        return reached

    assert lines_tried(try_at) > 3
    check_nothing_is_left(shared_broker, slab_mappings)


@pytest.mark.parametrize(
    ("how", "call"),
    [
        *itertools.product(("release", "let_go"), (view, read, tensor)),
        *itertools.product(("sleep", "wake"), (view, read)),  # who touches a sleeping tensor faults
    ],
)
def test_giving_back_in_the_middle_of_a_use(
    shared_broker: RunningBroker,
    checkpoint: Checkpoint,
    slab_mappings: Callable[[], int],
    how: str,
    call: Callable[[EngineClient, WeightSet], None],
) -> None:
    """A handler does it, or is told that they are in use; what it came into reads on or is told."""
    client = shared_broker.client()

    def try_at(line: int) -> bool:
        weights = client.acquire(checkpoint)

        def give_back() -> None:
            with contextlib.suppress(UsageError):
                getattr(weights, how)()

        try:
            reached = at_line(line, give_back, lambda: call(client, weights))
        except UsageError:
            reached = True
        weights.let_go()
        return reached

    assert lines_tried(try_at) > 3
    check_nothing_is_left(shared_broker, slab_mappings)
    client.close()


def test_engine_that_closes_at_sigterm(
    shared_broker: RunningBroker, checkpoint: Checkpoint
) -> None:
    """An engine whose handler closes its client and exits ends at once, with its exit status."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, shared_broker.directory, str(checkpoint.path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    with engine:
        assert engine.stdout.readline() == "ready\n"
        engine.send_signal(signal.SIGTERM)
        try:
            assert engine.wait(HANG_SECONDS * SCALE) == 0
        finally:
            engine.kill()


@pytest.mark.parametrize("call", ["acquire('m')", "status()", "ping()", "watch('m')"])
def test_engine_that_calls_while_the_interpreter_ends(
    shared_broker: RunningBroker, call: str
) -> None:
    """It is told at once that nothing can be asked any more; what it holds is given back."""
    script = (
        "import sys\n"
        "from engine_client import EngineClient, UsageError\n"
        "class Engine:\n"
        "    def __init__(self): self.client = EngineClient('simulated', directory=sys.argv[1])\n"
        "    def __del__(self):\n"
        f"        try: self.client.{call}\n"
        "        except UsageError as error: print(error)\n"
        "engine = Engine()\n"
    )
    command = [sys.executable, "-c", script, str(shared_broker.directory)]
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=20 * SCALE
    ).stdout
    assert said.startswith("the interpreter is ending, and nothing can be asked of the broker")


def test_engine_that_closes_while_the_interpreter_ends(shared_broker: RunningBroker) -> None:
    """Then no other thread runs any more, and none is waited for."""
    script = (
        "import sys\n"
        "from engine_client import EngineClient\n"
        "class Engine:\n"
        "    def __init__(self): self.client = EngineClient('simulated', directory=sys.argv[1])\n"
        "    def __del__(self): self.client.close()\n"
        "engine = Engine()\n"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script, shared_broker.directory], check=True)
    assert time.monotonic() - began < CLOSE_SECONDS


def test_watching_in_the_middle_of_a_watch(shared_broker: RunningBroker) -> None:
    """Wherever a handler opens and closes a watch, nobody waits for ever and none is left."""

    def watch(name: str) -> None:
        client.watch(name).close()

    def try_at(line: int) -> bool:
        return at_line(line, lambda: watch("handler's"), lambda: watch("engine's"))

    with shared_broker.client() as client:
        assert lines_tried(try_at) > 10
        check_it_may_watch(client)


def check_it_may_watch(client: EngineClient) -> None:
    """As many names as a session may, so none of another is left at the broker."""
    client.ping()  # what was told before is carried out
    watches = [client.watch(f"name {number}") for number in range(DEFAULTS.watches)]
    with pytest.raises(Busy, match="this session watches 64 names already"):
        client.watch("one too many")
    for watch in watches:
        watch.close()


# --- handlers that raise -------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupted_acquire_leaves_nothing(
    shared_broker: RunningBroker, checkpoint: Checkpoint, slab_mappings: Callable[[], int]
) -> None:
    """Wherever Ctrl-C comes in `acquire`: no lease, mapping, descriptor or call is left."""
    assert threading.current_thread() is threading.main_thread()  # where handlers run
    with shared_broker.client() as client:
        client.acquire(checkpoint).release()
        eventually(lambda: shared_broker.leases() == 0, 1, "the end of the first lease")
        before = descriptors()
        acquired: list[WeightSet] = []
        line = 0
        while not acquired:
            with contextlib.suppress(KeyboardInterrupt):
                at_line(line, interrupt, lambda: acquired.append(client.acquire(checkpoint)))
            line += 1
        acquired.pop().release()
        gc.collect()
        assert line > 10
        check_nothing_is_left(shared_broker, slab_mappings)
        eventually(lambda: not descriptors() - before, 1, "the end of every descriptor")
        channel = client._session._channel
        eventually(lambda: not channel._entered(), 1, "the answer of every call")


def test_interrupted_connect_leaves_nothing(shared_broker: RunningBroker) -> None:
    """Wherever Ctrl-C comes while a client is made: no session and no descriptor is left."""
    shared_broker.client().close()
    gc.collect()
    before, sessions = descriptors(), len(shared_broker.status()["sessions"])
    made: list[EngineClient] = []
    line = 0
    while not made:
        with contextlib.suppress(KeyboardInterrupt):
            at_line(line, interrupt, lambda: made.append(shared_broker.client()))
        line += 1
    made.pop().close()
    gc.collect()
    assert line > 10
    eventually(lambda: len(shared_broker.status()["sessions"]) == sessions, 1, "all sessions' end")
    eventually(lambda: descriptors() == before, 1, "the end of every descriptor")


def test_interrupted_watch_leaves_nothing(shared_broker: RunningBroker) -> None:
    """Wherever Ctrl-C comes while a watch is opened or closed: the broker watches no name."""

    def watch(name: str) -> None:
        with client.watch(name):
            pass

    with shared_broker.client() as client:
        line, reached = 0, True
        while reached:
            with contextlib.suppress(KeyboardInterrupt):
                reached = at_line(line, interrupt, lambda: watch("given up"))
            line += 1
        assert line > 20
        gc.collect()
        check_it_may_watch(client)


def test_interrupted_release_is_completed(
    shared_broker: RunningBroker, checkpoint: Checkpoint, slab_mappings: Callable[[], int]
) -> None:
    """Wherever Ctrl-C comes in `release`: the weights are given back when they are dropped."""
    with shared_broker.client() as client:
        line, reached = 0, True
        while reached:
            weights = client.acquire(checkpoint)
            with contextlib.suppress(KeyboardInterrupt):
                reached = at_line(line, interrupt, weights.release)
            line += 1
            del weights
        assert line > 10
        check_nothing_is_left(shared_broker, slab_mappings)


def test_interrupted_view_is_not_counted(
    shared_broker: RunningBroker, checkpoint: Checkpoint
) -> None:
    """Wherever Ctrl-C comes in `memory`: no view is taken for alive that nobody holds."""
    with shared_broker.client() as client:
        weights = client.acquire(checkpoint)
        views = [weights.memory("layer.1.weight")]  # the first call does more than the others
        views.clear()
        line = 0
        while not views:
            with contextlib.suppress(KeyboardInterrupt):
                at_line(line, interrupt, lambda: views.append(weights.memory("layer.1.weight")))
            line += 1
        views.clear()
        assert line > 5
        assert weights.live_tensors() == []
        weights.release()
