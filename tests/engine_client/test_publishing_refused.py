"""What cannot be published, and what fails on the way: one sentence each, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from broker.devices.base import DeviceError, DeviceOutOfMemory
from broker.errors import BadRequest, BrokerError, InternalError, OverBudget, UsageError
from broker.weights import MAX_METADATA_BYTES, WeightKey
from engine_client import EngineClient
from engine_client.publishing import plan_publication
from tests.support.processes import RunningBroker

# --- what is refused ----------------------------------------------------------------------------


def without_storage() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapped(Tensor):
    """A tensor of somebody's own class."""


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(2, device="meta"), "it is on meta and has no values"),
        (lambda: torch.eye(2).to_sparse(), "its layout is torch.sparse_coo"),
        (without_storage, "its storage is smaller than the tensor"),
        (
            lambda: torch.ones(2).as_subclass(Wrapped),
            "it is a Wrapped, whose values may live elsewhere",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "it is quantised with scales that live outside its storage",
        ),
    ],
    ids=["meta", "sparse", "without storage", "subclass", "quantised"],
)
def test_tensors_that_are_not_their_bytes(
    client: EngineClient, make: Callable[[], Tensor], why: str
) -> None:
    """Refused with name and reason before any memory is reserved; the claim is over."""
    with pytest.raises(UsageError) as error:
        client.publish("m", {"good": torch.ones(1), "bad": make()})
    assert error.value.sentence == (
        f"these tensors cannot be published: 'bad' ({why}); "
        "publish plain strided tensors that hold values"
    )
    assert error.value.tensors == 1
    assert client.status()["sets"] == []


def test_all_bad_tensors_are_counted_and_some_are_named() -> None:
    """A model left on meta does not fill the screen."""
    with pytest.raises(UsageError, match=r"'w0' \(.*'w4' \([^']* and 3 more; ") as error:
        plan_publication({f"w{n}": torch.empty(1, device="meta") for n in range(8)})
    assert error.value.tensors == 8


def test_a_lazy_module_is_refused(client: EngineClient) -> None:
    """Parameters that have no shape yet have no values either."""
    said = r"'weight' \(it has not been initialised\), 'bias' \(it has not been initialised\)"
    with pytest.raises(UsageError, match=said):
        client.publish("m", torch.nn.LazyLinear(2))


def test_a_module_that_contains_itself_is_refused(client: EngineClient) -> None:
    """Its parameters have no last name."""
    module = Module()
    module.add_module("again", module)
    with pytest.raises(UsageError, match=r"^Module contains itself"):
        client.publish("m", module)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (5, "only a torch module or a mapping of names to tensors can be published, not int"),
        ([torch.ones(1)], "only a torch module or a mapping of names .* not list"),
        ({"w": [1.0]}, "a mapping to publish holds names and tensors, 'w' leads to list"),
        ({7: torch.ones(1)}, "a mapping to publish holds names and tensors, 7 leads to Tensor"),
        ({"\ud800": torch.ones(1)}, r"'\\ud800' \(its name is not valid Unicode\)"),
    ],
    ids=["number", "list", "list of numbers", "number for a name", "surrogate"],
)
def test_what_is_neither_module_nor_mapping(
    client: EngineClient, weights: Any, sentence: str
) -> None:
    """The sentence says what it was, and the claim is over."""
    with pytest.raises(UsageError, match=sentence):
        client.publish("m", weights)
    assert client.status()["sets"] == []


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"a": object()}, r"^metadata must be what msgpack can hold, .*: .*object"),
        ({1: "a"}, "^metadata must be what msgpack can hold, with text for keys"),
        ({"a": 1 << 70}, "^metadata must be what msgpack can hold"),
        (
            {"a": "x" * MAX_METADATA_BYTES},
            rf"^metadata has 655\d\d bytes, {MAX_METADATA_BYTES} are allowed",
        ),
        ([("a", 1)], "^metadata must be a mapping, not list"),
    ],
    ids=["object", "number for a key", "large number", "too much", "list"],
)
def test_metadata_that_cannot_travel(client: EngineClient, metadata: Any, sentence: str) -> None:
    """Refused before any memory is reserved."""
    with pytest.raises(UsageError, match=sentence):
        client.publish("m", {"w": torch.ones(1)}, metadata=metadata)
    assert client.status()["sets"] == []


def test_metadata_that_contains_itself() -> None:
    """A cycle is a sentence too."""
    metadata: dict[str, Any] = {}
    metadata["again"] = metadata
    with pytest.raises(UsageError, match=r"^metadata must be what msgpack can hold"):
        plan_publication({}, metadata)


@pytest.mark.parametrize(
    ("key", "error", "sentence"),
    [
        (7, UsageError, "the key must be a name or a WeightKey, not the int 7"),
        ("", UsageError, "the name of what is to be published is empty"),
        ("two\nlines", BadRequest, "claim: name must be a printable name of 1 to 256 bytes"),
        (
            WeightKey("GPU-7", "m"),
            BadRequest,
            "the key is for device GPU-7, this client is on SIM-0",
        ),
    ],
    ids=["number", "empty", "control character", "another device"],
)
def test_keys_that_cannot_be(
    client: EngineClient, key: Any, error: type[BrokerError], sentence: str
) -> None:
    """Each has its sentence."""
    with pytest.raises(error) as raised:
        client.publish(key, {"w": torch.ones(1)})
    assert raised.value.sentence == sentence


# --- what fails on the way ----------------------------------------------------------------------


class FullDevice:
    """A device on which nothing can be mapped any more."""

    def __init__(self, device: Any, error: DeviceError) -> None:
        self.properties = device.properties
        self.ordinal = 0
        self._error = error

    def map(self, *given: Any, **options: Any) -> None:
        raise self._error

    def free_bytes(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DeviceOutOfMemory("map on SIM-0: no addresses"), OverBudget),
        (DeviceError("map on SIM-0: bad descriptor"), InternalError),
    ],
)
def test_a_device_that_fails(
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    error: DeviceError,
    kind: type[BrokerError],
) -> None:
    """Its words are in a broker error; the claim and its memory are given back."""
    monkeypatch.setattr(client, "_device", FullDevice(client._device, error))
    with pytest.raises(kind, match=f"^the slab to publish into cannot be mapped: {error}$"):
        client.publish("m", {"w": torch.ones(1)})
    (device,) = client.status()["devices"].values()
    assert (client.status()["sets"], device["free"]) == ([], device["limit"])


def test_an_interrupt_during_the_build(client: EngineClient) -> None:
    """Ctrl-C in `build` gives the claim up at once and is raised as it came."""

    def build() -> dict[str, Tensor]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.get_or_publish("m", build)
    assert client.status()["sets"] == []
    with client.get_or_publish("m", lambda: {"w": torch.ones(1)}) as weights:
        assert weights.how == "published"


def test_a_build_that_loses_the_broker(live_broker: RunningBroker) -> None:
    """What `build` raises comes out, not what giving the claim up would run into."""
    client = live_broker.client()

    def build() -> dict[str, Tensor]:
        client.close()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        client.get_or_publish("m", build)
    with pytest.raises(UsageError, match=r"^this client is closed"):
        client.publish("m", {"w": torch.ones(1)})


def test_what_waits_is_told_which_engine_failed_and_how(client: EngineClient) -> None:
    """A publisher whose tensors are refused is, for those who wait, a build that failed."""
    told: list[BrokerError] = []
    building = threading.Event()

    def wait() -> None:
        building.wait(10)
        with pytest.raises(BrokerError) as error:
            client.acquire("m", timeout=10)
        told.append(error.value)

    def build() -> dict[str, Tensor]:
        building.set()
        while not any(entry["waiting"] for entry in client.status()["sets"]):
            pass
        return {"w": torch.empty(1, device="meta")}

    waiter = threading.Thread(target=wait)
    waiter.start()
    with pytest.raises(UsageError):
        client.get_or_publish("m", build)
    waiter.join(10)
    assert [type(error).__name__ for error in told] == ["LoadFailed"]
    assert told[0].sentence.startswith(
        "the engine that built the weights failed: UsageError: these tensors cannot be published: "
    )


def test_progress_of_a_builder_reaches_who_waits(client: EngineClient) -> None:
    """First that it builds, then how much is copied."""
    seen: list[tuple[str, int, int]] = []
    both = threading.Barrier(2)

    def build() -> dict[str, Tensor]:
        both.wait(10)
        while not any(entry["waiting"] for entry in client.status()["sets"]):
            pass
        return {"w": torch.ones(1 << 16)}

    builder = threading.Thread(target=lambda: client.get_or_publish("m", build).let_go())
    builder.start()
    both.wait(10)
    with client.get_or_publish(
        "m", dict, progress=lambda p: seen.append((p.stage, p.done, p.total)), timeout=10
    ):
        builder.join(10)
    assert seen[0] == ("building", 0, 0)
    assert set(seen[1:]) <= {("copying", 1 << 18, 1 << 18)}
