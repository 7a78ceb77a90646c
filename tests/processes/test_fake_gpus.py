"""Brokers, loaders and engines as they are on a GPU, on the fake drivers of both vendors.

Real processes and everything they do, up to the address of a slab: what torch makes of that, only
a GPU can show.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.devices.libraries import Vendor
from tests.fake_driver.fixtures import VENDORS, fake_libraries, library_of
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import eventually
from tests.support.gpu_node import CANARY, TOTAL, FakeNode, GpuEngine
from tests.support.processes import RIGHT_SECONDS, ROOT, Engine, RunningBroker
from tests.support.stored import small_checkpoint

__all__ = ["fake_libraries"]  # a fixture of this file's tests

GRANULE = 2 << 20
nvidia_only = pytest.mark.parametrize("node", ["nvidia"], indirect=True)
"""For what does not depend on the vendor."""


@pytest.fixture(scope="module", params=VENDORS)
def node(
    request: pytest.FixtureRequest,
    fake_libraries: dict[Vendor, Path | str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FakeNode]:
    """A machine with two GPUs; at the end no process of its may have misused or kept anything."""
    library = library_of(request.param, fake_libraries)
    node = FakeNode(request.param, library, tmp_path_factory.mktemp("node"))
    yield node
    assert node.fake.complaints() == ""


@pytest.fixture(scope="module")
def served(node: FakeNode) -> Iterator[RunningBroker]:
    """A broker for both GPUs of the node: chosen by nobody, found by itself."""
    with private_directory() as directory, brokers(directory) as start:
        yield start(device="auto", environ=node.environ())


@pytest.fixture(scope="module")
def pair(node: FakeNode, served: RunningBroker) -> Iterator[tuple[GpuEngine, GpuEngine]]:
    """Two engines for all tests of a vendor. The second numbers the devices in another order."""
    swapped = node.environ(CUDA_VISIBLE_DEVICES="1,0")
    first, second = GpuEngine(node, served), GpuEngine(node, served, "cuda:1", environ=swapped)
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def newcomer(node: FakeNode, served: RunningBroker) -> Iterator[GpuEngine]:
    """A process that has not used the device yet; not connected yet either."""
    with GpuEngine(node, served, connect=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def checkpoint(node: FakeNode, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What engines of most tests ask for; resident from the first of them on."""
    return str(small_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(autouse=True)
def what_a_test_took_comes_back(
    served: RunningBroker, pair: tuple[GpuEngine, GpuEngine]
) -> Iterator[None]:
    """After each test nobody leases anything, and the device holds what is on the books."""
    yield
    eventually(lambda: served.leases() == 0, 5, "the end of every lease")
    books = served.status()["devices"][pair[0].device["uuid"]]
    held = books["limit"] - books["free"]
    eventually(
        lambda: pair[0].ask("free_bytes") == TOTAL - CANARY - held, 5, "memory off the books"
    )


# --- weights ------------------------------------------------------------------------------------


def test_the_broker_serves_every_gpu(node: FakeNode, served: RunningBroker) -> None:
    """It finds both by itself, says so, and may hold what was free less a sixteenth."""
    report = served.status()
    assert report["broker"]["platform"] == ("cuda" if node.vendor == "nvidia" else "rocm")
    assert not report["broker"]["simulated"]
    assert len(report["devices"]) == 2
    for uuid, use in report["devices"].items():
        assert uuid.startswith("GPU-")
        assert uuid in served.ready_line
        assert use["limit"] == (TOTAL - CANARY) * 15 // 16


def test_two_engines_map_one_slab(pair: tuple[GpuEngine, GpuEngine], tmp_path: Path) -> None:
    """One load through the pinned ring, one copy on the device, the right bytes in both engines.

    Engines that number the devices differently mean the same one.
    """
    first, second = pair
    assert first.device["uuid"] == second.device["uuid"]
    assert (first.device["ordinal"], second.device["ordinal"]) == (0, 1)
    checkpoint = str(small_checkpoint(tmp_path, tensors=5, nbytes=900 << 10))
    before, held = first.ask("free_bytes"), first.ask("resident_bytes")
    cold, warm = first.ask("acquire", path=checkpoint), second.ask("acquire", path=checkpoint)
    assert (cold["how"], warm["how"]) == ("loaded", "resident")
    assert cold["nbytes"] == 3 * GRANULE
    assert before - first.ask("free_bytes") == cold["nbytes"]
    assert first.ask("identity") == second.ask("identity") == cold["checkpoint"]
    assert first.ask("resident_bytes") == held + cold["nbytes"]
    for engine in pair:
        engine.ask("release")
        assert engine.ask("live", kind="handles") == 0
        assert engine.ask("live", kind="reservations") == 0


def test_one_engine_maps_a_set_once(newcomer: GpuEngine, checkpoint: str) -> None:
    """Two leases of one process on one set are one range of addresses, until the last ends.

    It opens no context before its first weights, and keeps none after its last.
    """
    engine = newcomer
    engine.ask("connect")
    assert engine.ask("live", kind="contexts") == 0
    engine.ask("acquire", path=checkpoint)
    engine.ask("acquire", path=checkpoint, keep="again")
    assert engine.ask("address") == engine.ask("address", keep="again")
    assert engine.ask("live", kind="mappings") == 1
    engine.ask("release")
    assert engine.ask("identity", keep="again").startswith("blake3:")
    engine.ask("release", keep="again")
    for kind in ("mappings", "reservations", "handles", "contexts"):
        assert engine.ask("live", kind=kind) == 0


def test_each_device_has_a_set_of_its_own(
    served: RunningBroker, pair: tuple[GpuEngine, GpuEngine], checkpoint: str
) -> None:
    """The same checkpoint for two devices is loaded on each, and released on each."""
    first, second = pair
    assert second.ask("connect", device="cuda:0")["uuid"] != first.device["uuid"]
    here, there = first.ask("acquire", path=checkpoint), second.ask("acquire", path=checkpoint)
    assert there["how"] == "loaded"
    assert here["set"] != there["set"]
    assert first.ask("identity") == second.ask("identity")
    for use in served.status()["devices"].values():
        assert use["leased"] == here["nbytes"]
    for engine in pair:
        engine.ask("release")
    second.ask("connect", device="cuda:1")


def test_sleeping_weights_are_not_held(
    served: RunningBroker, pair: tuple[GpuEngine, GpuEngine], checkpoint: str
) -> None:
    """Asleep an engine keeps addresses alone; awake it reads the same weights there."""
    first, second = pair
    granted = first.ask("acquire", path=checkpoint)
    second.ask("acquire", path=checkpoint)
    address = first.ask("address")
    first.ask("sleep")
    assert first.ask("live", kind="handles") == 0
    assert first.ask("live", kind="reservations") == 1
    assert served.leases() == 1
    first.ask("wake")
    assert first.ask("address") == address
    assert first.ask("identity") == granted["checkpoint"]
    for engine in pair:
        engine.ask("release")


def test_a_device_that_cannot_be_waited_for_keeps_the_lease(
    node: FakeNode, served: RunningBroker, pair: tuple[GpuEngine, GpuEngine], checkpoint: str
) -> None:
    """As in the capture of a CUDA graph: still mapped is still leased, until it can be unmapped."""
    engine = pair[0]
    engine.ask("acquire", path=checkpoint)
    engine.ask("script", faults=f"{node.call('CtxSynchronize', 'DeviceSynchronize')}=900")
    engine.ask("release")
    assert engine.ask("live", kind="mappings") == 1
    assert served.leases() == 1
    engine.ask("script", faults="")
    eventually(lambda: served.leases() == 0, 5, "the end of the lease")
    assert engine.ask("live", kind="mappings") == 0


def test_a_killed_engine_leaves_nothing(
    served: RunningBroker, newcomer: GpuEngine, pair: tuple[GpuEngine, GpuEngine], checkpoint: str
) -> None:
    """Its lease is back at once; the memory of an evicted set goes with the last who maps it."""
    engine, onlooker = newcomer, pair[0]
    engine.ask("connect")
    nbytes = engine.ask("acquire", path=checkpoint)["nbytes"]
    served.evict_all()
    left = TOTAL - CANARY - nbytes
    eventually(lambda: onlooker.ask("free_bytes") == left, 5, "the end of what nobody maps")
    engine.kill()
    eventually(lambda: served.status()["sets"] == [], RIGHT_SECONDS, "the reclaim")
    # A process that is killed closes its session before it has given up its memory.
    eventually(lambda: onlooker.ask("free_bytes") == TOTAL - CANARY, 5, "the end of its memory")


# --- the broker ---------------------------------------------------------------------------------


def test_a_new_server_has_the_canaries(
    served: RunningBroker, pair: tuple[GpuEngine, GpuEngine], checkpoint: str
) -> None:
    """After the server's death its successor serves GPU memory, and what proves it shared."""
    first, second = pair
    granted = first.ask("acquire", path=checkpoint)
    os.kill(served.server_pid(), signal.SIGKILL)
    second.ask("trust_nobody")
    again = second.ask("acquire", path=checkpoint)
    assert (again["how"], again["set"]) == ("resident", granted["set"])
    assert first.ask("identity") == second.ask("identity") == granted["checkpoint"]
    for engine in pair:
        engine.ask("release")


@nvidia_only
def test_verify_reads_what_is_on_the_device(
    node: FakeNode, served: RunningBroker, pair: tuple[GpuEngine, GpuEngine], checkpoint: str
) -> None:
    """The command maps the weights as an engine does and digests them."""
    granted = pair[0].ask("acquire", path=checkpoint)
    done = subprocess.run(
        [sys.executable, "-m", "broker", "verify", "--dir", str(served.directory)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(node.site), **node.environ()},
        check=False,
    )
    size, identity = granted["nbytes"], granted["checkpoint"]
    assert done.stdout == f"set {granted['set']}: {size} bytes, {identity}: as loaded\n"
    pair[0].ask("release")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "reason", "words"),
    [
        ("elsewhere", "canary-wrong-bytes", "shared between processes reads wrong bytes: byte "),
        ("801", "canary-failed", "operation not supported"),
    ],
)
def test_an_engine_that_sees_other_memory(
    node: FakeNode,
    served: RunningBroker,
    pair: tuple[GpuEngine, GpuEngine],
    checkpoint: str,
    what: str,
    reason: str,
    words: str,
) -> None:
    """The broker's own processes share, this one does not: it learns so before it uses a weight.

    It holds no lease then, and nothing is mapped.
    """
    engine = pair[0]
    engine.ask("trust_nobody")
    engine.ask("script", faults=f"{node.call('MemImportFromShareableHandle')}={what}")
    engine.tell("acquire", path=checkpoint)
    answer = engine.answer()
    engine.ask("script", faults="")
    assert answer["error"] == "UnsupportedPlatformForIPCError"
    assert answer["fields"]["reason"] == reason
    assert words in answer["sentence"]
    assert answer["sentence"].startswith("[weight-broker:engine] found platform ")
    eventually(lambda: served.leases() == 0, 5, "the end of the lease")
    for kind in ("mappings", "handles", "reservations", "contexts"):
        assert engine.ask("live", kind=kind) == 0
    assert engine.ask("acquire", path=checkpoint)["how"] == "resident"
    engine.ask("release")


def refusal(engine: Engine, device: str | None = None) -> dict[str, object]:
    engine.tell("connect", device=device)
    answer = engine.answer()
    assert answer["error"] == "UnsupportedPlatformForIPCError", answer
    return answer


NARROW = f"devices=2 total={3 * GRANULE >> 20}M"


@pytest.fixture(scope="module")
def narrow(node: FakeNode) -> Iterator[GpuEngine]:
    """An engine of a broker that serves the second device only, and that has little memory."""
    environ = node.environ(NARROW)
    with private_directory() as directory, brokers(directory) as start:
        broker = start("--memory-limit", "1g", device="cuda:1", environ=environ)
        assert len(broker.status()["devices"]) == 1
        with GpuEngine(node, broker, connect=False, environ=environ) as engine:
            yield engine


@nvidia_only
def test_a_device_that_only_one_side_sees(
    pair: tuple[GpuEngine, GpuEngine], narrow: GpuEngine
) -> None:
    """An engine whose device the broker does not serve, or which cannot see it: both lists."""
    one = pair[0].device["uuid"]
    unserved, unseen = refusal(narrow, "cuda:0"), refusal(narrow, "cuda:2")
    found = narrow.ask("connect")
    two = found["uuid"]
    assert (found["ordinal"], one != two) == (1, True)
    assert unserved["sentence"] == (
        f"[weight-broker:engine] found platform cuda: device cuda:0 means {one} in this process, "
        f"and the broker serves {two}; only CUDA and ROCm devices that both sides see can share "
        "memory between processes; choose a device that is on both lists, start the broker with "
        "this one (--device), or load the checkpoint the ordinary way on this device"
    )
    sentence = str(unseen["sentence"])
    assert f"device cuda:2 cannot be seen by this process, which sees {one}, {two};" in sentence
    assert sentence.endswith(f"; the broker serves {two}")


@nvidia_only
def test_more_than_the_device_has(narrow: GpuEngine, tmp_path: Path) -> None:
    """What the limit allows and the driver has not got: refused, with numbers, and no harm done."""
    uuid = narrow.ask("connect")["uuid"]
    narrow.tell("acquire", path=str(small_checkpoint(tmp_path / "a", tensors=4, nbytes=2 << 20)))
    answer = narrow.answer()
    assert answer["error"] == "OverBudget"
    assert answer["fields"] == {
        "requested": 4 * GRANULE,
        "free": GRANULE,
        "limit": 1 << 30,
        "device": uuid,
    }
    assert answer["sentence"] == (
        f"the broker's limit allows 8.0 MiB more on device {uuid}, which has not got "
        f"them: create on {uuid}: {4 * GRANULE} bytes were asked for, {GRANULE} of {3 * GRANULE} "
        "bytes are free"
    )
    assert narrow.ask("acquire", path=str(small_checkpoint(tmp_path / "b")))["how"] == "loaded"
    narrow.ask("release")


@nvidia_only
def test_an_engine_whose_devices_are_hidden(node: FakeNode, served: RunningBroker) -> None:
    """Its own environment hides them: refused before any socket is opened."""
    hidden = node.environ(CUDA_VISIBLE_DEVICES="")
    with GpuEngine(node, served, connect=False, environ=hidden) as engine:
        assert "its GPU is hidden by CUDA_VISIBLE_DEVICES=''" in str(refusal(engine)["sentence"])
