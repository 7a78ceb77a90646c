"""A broker that lies is found out before anything is mapped, with an error that says how."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker import wire
from broker.errors import (
    BadRequest,
    BrokerError,
    BrokerLost,
    InternalError,
    RequestTimeout,
    StaleEpoch,
)
from broker.memfd import sealed_memfd
from broker.weights import AliasGroup, Manifest, TensorGroup, WeightKey
from engine_client import EngineClient
from tests.support.clock import eventually
from tests.support.lying_broker import EPOCH, HONEST, SEALS, SLAB_BYTES, LyingBroker, manifest, slab
from tests.support.processes import descriptors

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def lying(broker_dir: Path) -> Iterator[LyingBroker]:
    with LyingBroker(broker_dir) as broker:
        yield broker


def client_of(directory: Path, timeout: float = 10.0) -> EngineClient:
    return EngineClient("simulated", directory=directory, timeout=timeout)


def slabs_in_maps() -> set[str]:
    """Slabs that this process maps now: other tests of it may have left some."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "weight-broker-slab" in line}


def refusal(directory: Path) -> BrokerError:
    """The error that acquiring raises; nothing is mapped or left open then."""
    before, mapped = len(descriptors(os.getpid())), slabs_in_maps()
    with client_of(directory) as client, pytest.raises(BrokerError) as caught:
        client.acquire("m", timeout=10)
    assert slabs_in_maps() <= mapped
    eventually(lambda: len(descriptors(os.getpid())) <= before, 2, "closed descriptors")
    return caught.value


def test_honest_broker(lying: LyingBroker, broker_dir: Path) -> None:
    """What the lies below start from is accepted: two tensors in a sealed slab."""
    with client_of(broker_dir) as client, client.acquire("m") as weights:
        assert weights.manifest.tensor_count == 2
        assert bytes(weights.slab_memory()) == bytes(SLAB_BYTES)


# --- grants -------------------------------------------------------------------------------------

GRANTS: dict[str, Callable[[wire.Granted], wire.Granted | bytes]] = {
    "another lease": lambda granted: replace(granted, lease="another"),
    "another device": lambda granted: replace(granted, key=replace(granted.key, device="GPU-1")),
    "another name": lambda granted: replace(granted, key=replace(granted.key, name="n")),
}


@pytest.mark.parametrize("lie", GRANTS)
def test_grant_of_something_else(lying: LyingBroker, broker_dir: Path, lie: str) -> None:
    """A lease on other weights than were asked for is refused, naming what differs."""
    lying.granted = GRANTS[lie]
    error = refusal(broker_dir)
    assert type(error) is InternalError
    assert lie.removeprefix("another ") in error.differing
    assert "nothing was mapped" in error.sentence


def test_grant_of_another_dtype(lying: LyingBroker, broker_dir: Path) -> None:
    """What the engine demands it gets or an error, whatever the broker believes it has."""
    with client_of(broker_dir) as client:
        with pytest.raises(InternalError, match="bfloat16"):
            client.acquire("m", dtype="bfloat16")
        with pytest.raises(InternalError, match="generation"):
            client.acquire("m", generation="2")
        with pytest.raises(InternalError, match="layout"):
            client.acquire(WeightKey(device="", name="m", layout={"tp_rank": 1}))


def test_grant_that_is_none(lying: LyingBroker, broker_dir: Path) -> None:
    """An answer that is no lease is refused for what it is."""
    for garbage in (b"", b"\xc1", wire.encode(wire.Done()), b"x" * (1 << 20)):
        lying.granted = lambda _granted, garbage=garbage: garbage  # type: ignore[misc]
        error = refusal(broker_dir)
        assert type(error) is BadRequest
        assert "Granted" in error.sentence


# --- descriptors --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4, 200])
def test_wrong_number_of_descriptors(lying: LyingBroker, broker_dir: Path, count: int) -> None:
    """Missing descriptors, and too many, are refused; those that came are closed."""
    lying.descriptors = lambda: [slab() for _ in range(count)]
    error = refusal(broker_dir)
    assert type(error) is InternalError
    assert "descriptors" in error.sentence


SLABS: dict[str, tuple[Callable[[], int], str]] = {
    "too small": (lambda: slab(4096), "4096 bytes, 8192 were announced"),
    "empty": (lambda: slab(0), "0 bytes"),
    "not sealed at all": (lambda: slab(seals=0), "not sealed"),
    "size not sealed": (lambda: slab(seals=fcntl.F_SEAL_WRITE), "size is not sealed"),
    "still writable": (lambda: slab(seals=SIZE_SEALS), "not sealed"),
    "a pipe": (lambda: one_end_of_a_pipe(), "not a slab"),
    "a folder": (lambda: os.open("/", os.O_RDONLY), "not a slab"),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), "not a slab"),
}


def one_end_of_a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize("lie", SLABS)
def test_slab_that_is_none(lying: LyingBroker, broker_dir: Path, lie: str) -> None:
    """A slab that is too small, or could become so or be written to, is never mapped."""
    make, words = SLABS[lie]
    lying.descriptors = lambda: [make(), manifest()]
    error = refusal(broker_dir)
    assert type(error) is InternalError
    assert words in error.sentence


def test_sizes_that_do_not_agree(lying: LyingBroker, broker_dir: Path) -> None:
    """Grant, packet and descriptor have to say the same size."""
    lying.attached = lambda attached: replace(attached, nbytes=2 * SLAB_BYTES)
    assert "granted 8192 bytes and delivered 16384" in refusal(broker_dir).sentence
    for nbytes in (0, -1, 1 << 62):
        lying.granted = lambda granted, n=nbytes: replace(granted, nbytes=n)  # type: ignore[misc]
        lying.attached = lambda attached, n=nbytes: replace(attached, nbytes=n)  # type: ignore[misc]
        assert type(refusal(broker_dir)) is InternalError


def test_descriptors_of_another_epoch(lying: LyingBroker, broker_dir: Path) -> None:
    """What another broker's life has granted is not mapped."""
    lying.attached = lambda attached: replace(attached, epoch="before")
    error = refusal(broker_dir)
    assert type(error) is StaleEpoch
    assert EPOCH in error.sentence


def test_refusal_instead_of_descriptors(lying: LyingBroker, broker_dir: Path) -> None:
    """A refusal on the session socket is the error it says it is, or an internal one."""
    lying.descriptors = list
    lying.attached = lambda attached: wire.Refused(attached.lease, "busy", "not now")
    assert refusal(broker_dir).sentence == "not now"
    lying.attached = lambda attached: wire.Refused(attached.lease, "nonsense", "\x00\n{]")
    assert type(refusal(broker_dir)) is InternalError


# --- manifests ----------------------------------------------------------------------------------


def group(offsets: list[int], length: int = 512, name: str = "t") -> TensorGroup:
    names = [f"{name}{number}" for number in range(len(offsets))]
    return TensorGroup("float32", [length], [1], "tensor", names, offsets)


MANIFESTS: dict[str, tuple[Manifest, str]] = {
    "larger than the slab": (Manifest(SLAB_BYTES + 1, [group([0])]), "its slab has 8192"),
    "outside the slab": (Manifest(4096, [group([4096])]), "outside the slab"),
    "before the slab": (Manifest(4096, [group([-512])]), "outside the slab"),
    "over the end": (Manifest(4096, [group([2560])]), "outside the slab"),
    "overlapping": (Manifest(4096, [group([0, 1024])]), "overlap"),
    "misaligned": (Manifest(4096, [group([4], 8)]), "aligned"),
    "tied outside": (
        Manifest(4096, [group([0])], [AliasGroup(["t0"], 4096, 4096)]),
        "outside the slab",
    ),
    "of unknown dtype": (
        Manifest(4096, [TensorGroup("float99", [1], [1], "tensor", ["t"], [0])]),
        "float99",
    ),
    "of another version": (Manifest(4096, [group([0])], version=99), "version 99"),
}


@pytest.mark.parametrize("lie", MANIFESTS)
def test_manifest_that_does_not_fit(lying: LyingBroker, broker_dir: Path, lie: str) -> None:
    """A manifest that would read outside its slab, or one tensor for another, is refused."""
    described, words = MANIFESTS[lie]
    lying.descriptors = lambda: [slab(), manifest(described)]
    error = refusal(broker_dir)
    assert type(error) is InternalError
    assert words in error.sentence


def unsealed(data: bytes, size: int = 0) -> int:
    descriptor = os.memfd_create("manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    os.truncate(descriptor, max(size, len(data)))
    return descriptor


def enormous() -> int:
    descriptor = unsealed(b"", 1 << 40)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


BLOBS: dict[str, tuple[Callable[[], int], str]] = {
    "empty": (lambda: sealed_memfd("m", b""), "0 bytes"),
    "garbage": (lambda: sealed_memfd("m", b"\xc1" * 100), "cannot be decoded"),
    "deep": (lambda: sealed_memfd("m", b"\x91" * 100_000), "cannot be decoded"),
    "not sealed": (lambda: unsealed(b"whatever"), "not sealed"),
    "enormous": (enormous, "1099511627776 bytes"),
    "a pipe": (one_end_of_a_pipe, "not sealed"),
    "a folder": (lambda: os.open("/", os.O_RDONLY), "not sealed"),
}


@pytest.mark.parametrize("lie", BLOBS)
def test_manifest_that_is_none(lying: LyingBroker, broker_dir: Path, lie: str) -> None:
    """What is no sealed manifest is refused, whatever it is and however large."""
    make, words = BLOBS[lie]
    lying.descriptors = lambda: [slab(), make()]
    error = refusal(broker_dir)
    assert type(error) is InternalError
    assert words in error.sentence


# --- the beginning ------------------------------------------------------------------------------


@pytest.mark.parametrize("packet", [b"\xc1", b"hello", wire.encode(wire.Done())])
def test_garbage_for_a_welcome(lying: LyingBroker, broker_dir: Path, packet: bytes) -> None:
    """What does not speak our protocol is no broker: the client says so at once."""
    lying.welcome = packet
    with pytest.raises(BrokerLost, match="cannot be decoded"):
        client_of(broker_dir)


def test_no_welcome(lying: LyingBroker, broker_dir: Path) -> None:
    """Descriptors before the welcome are none of this client's; it waits no longer than it may."""
    lying.welcome = wire.encode(wire.Attached("1", SLAB_BYTES, EPOCH))
    with pytest.raises(RequestTimeout, match="welcome"):
        client_of(broker_dir, timeout=0.2)


def test_two_brokers_in_one(lying: LyingBroker, broker_dir: Path) -> None:
    """Both channels have to lead to the same broker."""
    lying.hello = (wire.OK, wire.encode(wire.Welcomed(1, "another", ["SIM-0"])))
    with pytest.raises(StaleEpoch, match="another"):
        client_of(broker_dir)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((wire.OK, b"garbage"), BadRequest),
        (("what", b"a status of the future"), InternalError),
        (("busy", b"\xff\xfe\n[1]"), BrokerError),
    ],
)
def test_garbage_for_a_hello(
    lying: LyingBroker, broker_dir: Path, answer: tuple[str, bytes], kind: type[BrokerError]
) -> None:
    """An answer that is none becomes an error of the documented tree."""
    lying.hello = answer
    with pytest.raises(kind):
        client_of(broker_dir)


def test_honest_manifest_is_what_it_seems() -> None:
    """The lies above differ from a manifest that is accepted."""
    assert HONEST.nbytes < SLAB_BYTES
