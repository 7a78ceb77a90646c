"""Values of the wrong type get a sentence and a typed error, and concern nobody else."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_client
from broker import errors
from broker.errors import BrokerError, LoadFailed, NotFound, UsageError
from engine_client import Checkpoint, EngineClient, WeightKey
from engine_client.arguments import device_name
from engine_client.deadline import Deadline
from engine_client.dtypes import dtype_name
from engine_client.observer import Observer
from engine_client.pinging import ping_broker
from engine_client.watching import BrokerStopping
from tests.support.processes import RunningBroker
from tests.support.stored import small_checkpoint


def wrong(value: object) -> Any:
    """As a type checker would not let it through."""
    return value


def test_dtypes_by_name_and_by_torch() -> None:
    """Both mean the same; anything else is no dtype."""
    assert dtype_name("bfloat16") == dtype_name(torch.bfloat16) == "bfloat16"
    by_torch = Checkpoint("m", dtype=torch.float16, exceptions={"a": torch.float32})
    by_name = Checkpoint("m", dtype="float16", exceptions={"a": "float32"})
    assert by_torch.conversion == by_name.conversion
    with pytest.raises(UsageError, match="dtype must be a dtype or its name"):
        Checkpoint("m", dtype=wrong(16))
    with pytest.raises(UsageError, match="the dtype of 'a' must be"):
        Checkpoint("m", dtype="float16", exceptions={"a": wrong(16)})


@pytest.mark.parametrize("seconds", ["x", -1, float("nan"), [1]])
def test_no_time(seconds: Any) -> None:
    """A deadline is a number that is not negative."""
    with pytest.raises(UsageError, match="timeout must be seconds, 0 or more, or None"):
        Deadline(seconds)


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e10, 10**400])
def test_all_the_time_there_is(
    client: EngineClient, live_broker: RunningBroker, seconds: float
) -> None:
    """A time-out that never comes waits as long as it takes, wherever one can be given."""
    EngineClient("simulated", directory=live_broker.directory, timeout=seconds).close()
    assert client.ping(seconds).epoch == client.epoch
    assert ping_broker(directory=live_broker.directory, timeout=seconds).epoch == client.epoch
    with pytest.raises(NotFound):
        client.acquire("nobody published this", timeout=seconds)
    with client.watch("nobody published this") as watch:
        watch.put(BrokerStopping("told by the test"))
        assert watch.next(seconds) == BrokerStopping("told by the test")


@pytest.mark.parametrize(
    ("program", "label"),
    [(b"/opt/engine-\xff.py", "engine-\\xff.py"), ("/opt/ä\n.py".encode(), "ä\\n.py")],
)
def test_programs_of_odd_names(
    live_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, program: bytes, label: str
) -> None:
    """A script may have any name that a file can have; `status` shows it printable."""
    monkeypatch.setattr(sys, "argv", [os.fsdecode(program)])
    with EngineClient("simulated", directory=live_broker.directory) as client:
        labels = [session["label"] for session in client.status()["sessions"]]
    assert label in labels


def test_no_path() -> None:
    """What cannot be a path is said so when the checkpoint is named."""
    with pytest.raises(UsageError, match="Checkpoint: the path cannot be one: expected str"):
        Checkpoint(wrong(None))
    with pytest.raises(UsageError, match="Checkpoint: name must be text, not the int 3"):
        Checkpoint("m", name=wrong(3))
    with pytest.raises(UsageError, match="Checkpoint: exceptions must give dtypes by name, not li"):
        Checkpoint("m", dtype="float16", exceptions=wrong(["x"]))


def test_every_error_can_be_imported() -> None:
    """As the reference says: from `engine_client` too."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    public = {kind for kind in kinds if issubclass(kind, BrokerError)}
    assert {getattr(engine_client, kind.__name__) for kind in public} == public


MISTAKES: dict[str, tuple[Callable[[EngineClient], object], type[BrokerError], str]] = {
    "publish: no weights": (lambda c: c.publish("x", wrong(3)), UsageError, "only a torch module"),
    "publish: on meta": (
        lambda c: c.publish("x", {"a": torch.empty(1, device="meta")}),
        UsageError,
        "it is on meta and has no values",
    ),
    "publish: no name": (lambda c: c.publish("", {"a": torch.ones(1)}), UsageError, "is empty"),
    "publish: label": (
        lambda c: c.publish("x", {"a": torch.ones(1)}, generation=wrong(3)),
        UsageError,
        "generation must be text, not the int 3",
    ),
    "get_or_publish: what it would build": (
        lambda c: c.get_or_publish("x", wrong({"a": torch.ones(1)})),
        UsageError,
        "build must be a function that takes no arguments and returns .*, not dict",
    ),
    "get_or_publish: a module": (
        lambda c: c.get_or_publish("x", torch.nn.Linear(1, 1)),
        UsageError,
        "build must be a function .*, not the module itself",
    ),
    "get_or_load: no loader": (
        lambda c: c.get_or_load("x", wrong(5)),
        UsageError,
        "loader must be a function .*, not the int 5",
    ),
    "get_or_load: a yes for a time": (
        lambda c: c.get_or_load("x", dict, seconds=True),
        UsageError,
        "seconds must be a number above 0, not True",
    ),
    "watch: nothing": (
        lambda c: c.watch(wrong(None)),
        UsageError,
        "the name to watch must be text, not NoneType",
    ),
    "evict: nothing": (
        lambda c: c.evict(wrong(None)),
        UsageError,
        "evict: the set must be text, not NoneType",
    ),
    "pin: nothing": (lambda c: c.pin(wrong(None)), UsageError, "pin: the set must be text"),
    "unpin: nothing": (lambda c: c.unpin(wrong(None)), UsageError, "unpin: the set must be text"),
    "acquire: a tensor without a name": (
        lambda c: c.acquire(Checkpoint("m", dtype="float16", exceptions={wrong(5): "float32"})),
        UsageError,
        "a tensor's name in exceptions must be text, not the int 5",
    ),
    "resident_bytes: no device": (
        lambda c: c.resident_bytes(wrong([])),
        UsageError,
        "resident_bytes: device must be text, not list",
    ),
    "key_of: no entry": (
        lambda c: c.key_of({}),
        UsageError,
        r"key_of takes one of status\(\)\['sets'\], not dict",
    ),
    "key_of: a number": (lambda c: c.key_of(wrong(5)), UsageError, "key_of takes one .*the int 5"),
    "acquire: layout": (
        lambda c: c.acquire("x", layout={"tp": wrong(object())}),
        UsageError,
        "layout must give whole numbers by name",
    ),
    "acquire: layout of no names": (
        lambda c: c.acquire("x", layout=wrong([1])),
        UsageError,
        r"layout must give whole numbers by name, .*, not \[1\]",
    ),
    "acquire: dtype": (lambda c: c.acquire("x", dtype=wrong(3)), UsageError, "dtype must be"),
    "acquire: generation": (
        lambda c: c.acquire("x", generation=wrong(1)),
        UsageError,
        "generation must be text, not the int 1",
    ),
    "acquire: progress": (
        lambda c: c.acquire("x", progress=wrong(3)),
        UsageError,
        "progress must be a function that takes how far the load is, not the int 3",
    ),
    "get_or_publish: progress": (
        lambda c: c.get_or_publish("x", lambda: {"a": torch.ones(1)}, progress=wrong(3)),
        UsageError,
        "progress must be a function that takes how far the load is, not the int 3",
    ),
    "get_or_load: progress": (
        lambda c: c.get_or_load("x", lambda: {"a": torch.ones(1)}, progress=wrong(3)),
        UsageError,
        "progress must be a function that takes how far the load is, not the int 3",
    ),
    "get_or_load: seconds": (
        lambda c: c.get_or_load("x", lambda: {"a": torch.ones(1)}, seconds=wrong("5")),
        UsageError,
        "seconds must be a number above 0, not '5'",
    ),
    "publish: another dtype": (
        lambda c: c.publish(WeightKey("", "x", dtype="bfloat16"), {"a": torch.ones(1)}),
        UsageError,
        "the key says dtype 'bfloat16' and the weights are 'float32'",
    ),
    "publish: the key's name": (
        lambda c: c.publish(WeightKey("", wrong(7)), {"a": torch.ones(1)}),
        UsageError,
        "WeightKey: name must be text, not the int 7",
    ),
    "publish: the key's layout": (
        lambda c: c.publish(WeightKey("", "x", layout={"tp": wrong("0")}), {"a": torch.ones(1)}),
        UsageError,
        "layout must give whole numbers by name",
    ),
    "acquire: the key's layout": (
        lambda c: c.acquire(WeightKey("", "x", layout=wrong(None))),
        UsageError,
        "WeightKey: layout must be a dict, not NoneType",
    ),
    "acquire: the key's format": (
        lambda c: c.acquire(WeightKey("", "x", format=wrong(None))),
        UsageError,
        "WeightKey: format must be text, not NoneType",
    ),
    "acquire: the key's dtype": (
        lambda c: c.acquire(WeightKey("", "x", dtype=wrong(5))),
        UsageError,
        "WeightKey: dtype must be a dtype or its name",
    ),
    "evict": (lambda c: c.evict(wrong(["a"])), UsageError, "evict: the set must be text, not list"),
    "watch": (lambda c: c.watch(wrong(3)), UsageError, "the name to watch must be text"),
    "on_broker_lost": (lambda c: c.on_broker_lost(wrong(3)), UsageError, "must be a function that"),
}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"device": 0}, 'device must be a name or a torch.device, "cuda:0", not the int 0'),
        ({"device": ["simulated"]}, "not list"),
        ({"device": b"simulated"}, "not bytes"),
        ({"device": "simulated", "broker": 3}, "broker must be text, not the int 3"),
        ({"device": "simulated", "directory": 5}, "directory must be a path, not the int 5"),
        ({"device": "simulated", "label": 5}, "label must be text, not the int 5"),
    ],
)
def test_clients_of_nothing(arguments: dict[str, Any], sentence: str) -> None:
    """Before anything is opened."""
    with pytest.raises(UsageError, match=sentence):
        EngineClient(**arguments)


def test_devices_by_torch() -> None:
    """A device of torch's own means what its name means."""
    assert device_name(torch.device("cuda:3")) == device_name("cuda:3") == "cuda:3"


@pytest.mark.parametrize(
    "demand",
    [{"layout": {"tp_rank": 1}}, {"format": "zzz"}, {"quantization": "awq"}, {"dtype": "float16"}],
)
def test_a_demand_that_the_key_contradicts(client: EngineClient, demand: dict[str, Any]) -> None:
    """It is refused, not forgotten; what both say alike is said once."""
    key = WeightKey(device="", name="both", format="published", dtype="float32")
    with client.publish("both", {"a": torch.ones(1)}) as published:
        (field,) = demand
        with pytest.raises(UsageError, match=f"the key says {field} .* and the argument"):
            client.acquire(key, **demand)
        with client.acquire(key, dtype=torch.float32, layout={}, format="published") as weights:
            assert weights.set_id == published.set_id


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_weights_as_a_whole(
    client: EngineClient, tmp_path: Path, copied: Callable[[object], object]
) -> None:
    """They are neither copied nor sent, and the sentence says what to do instead."""
    with (
        client.acquire(Checkpoint(small_checkpoint(tmp_path))) as weights,
        pytest.raises(UsageError, match="another process acquires them by itself"),
    ):
        copied(weights)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(client: EngineClient, live_broker: RunningBroker, mistake: str) -> None:
    """The caller is told; the broker has seen no trouble and holds nothing."""
    call, kind, sentence = MISTAKES[mistake]
    before = live_broker.status()
    with pytest.raises(kind, match=sentence):
        call(client)
    after = live_broker.status()
    assert (after["broker"]["troubles"], after["sets"]) == (
        before["broker"]["troubles"],
        before["sets"],
    )
    assert client.ping().pid == live_broker.server_pid()


def test_bound_to_no_module(client: EngineClient, tmp_path: Path) -> None:
    """Only a module can be bound, with names by name."""
    with client.acquire(Checkpoint(small_checkpoint(tmp_path))) as weights:
        with pytest.raises(UsageError, match="only a torch module can be bound, not int"):
            weights.bind(wrong(3))
        with pytest.raises(UsageError, match="bind: names must give the stored name of each"):
            weights.bind(torch.nn.Linear(1, 1), names=wrong(["weight"]))
        with pytest.raises(UsageError, match="bind: names must give the stored name of each"):
            weights.bind(torch.nn.Linear(1, 1), names={"weight": wrong(5)})
        with pytest.raises(UsageError, match="bind: names gives no place a stored tensor"):
            weights.bind(torch.nn.Linear(1, 1), names={})
        for prefix, said in ((3, "the int 3"), (None, "NoneType")):
            with pytest.raises(UsageError, match=f"bind: prefix must be text, not {said}"):
                weights.bind(torch.nn.Linear(1, 1), prefix=wrong(prefix))
        for call in (weights.detach, weights.swap):
            for what in (None, 5):
                with pytest.raises(UsageError, match="only a torch module can be bound, not "):
                    call(wrong(what))
        with pytest.raises(UsageError, match="read: offset and size must be whole numbers, not st"):
            weights.read(wrong("0"), 4)


@pytest.mark.parametrize("ignore", ["layer.*", b"layer.*", 5, [5], iter(["layer.*"])])
def test_patterns_that_are_none(client: EngineClient, tmp_path: Path, ignore: Any) -> None:
    """A text alone would be taken letter by letter, and its `*` for every name."""
    with (
        client.acquire(Checkpoint(small_checkpoint(tmp_path))) as weights,
        pytest.raises(UsageError, match=r"bind: ignore must be a list of text, \[.*\], not "),
    ):
        weights.bind(torch.nn.Linear(1, 1), ignore=ignore)


def test_keys_with_a_dtype_of_torch(client: EngineClient) -> None:
    """It means what its name means, in whatever way it is given."""
    key = WeightKey("", "by torch", dtype=wrong(torch.float32))
    with client.publish(key, {"a": torch.ones(1)}) as published:
        assert published.key.dtype == "float32"
        for dtype in (torch.float32, "float32", "torch.float32"):
            with client.acquire("by torch", dtype=dtype) as weights:
                assert weights.set_id == published.set_id


def test_a_name_that_is_a_folder(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has this name: the folder that has is probably meant."""
    monkeypatch.chdir(tmp_path)
    small_checkpoint(tmp_path / "folder")
    with pytest.raises(NotFound, match=r"; the checkpoint in 'folder' is acquire\(Checkpoint\("):
        client.acquire("folder")
    with pytest.raises(NotFound, match="is not resident"):
        client.acquire("n" * 256)  # no file may have so long a name


@pytest.mark.parametrize("make", [Observer, ping_broker])
def test_observers_of_nothing(live_broker: RunningBroker, make: Callable[..., object]) -> None:
    """Name and directory are looked at where they are given; a directory may be text."""
    for arguments, sentence in (
        ((5,), "broker must be text, not the int 5"),
        (("default", 5), "directory must be a path, not the int 5"),
        (("default", "a\0b"), "directory must be a path, and none has a NUL"),
        (("default", "\ud800"), "directory must be a path, and none has such letters"),
    ):
        with pytest.raises(UsageError, match=sentence):
            make(*arguments)
    made = make("default", str(live_broker.directory))
    if isinstance(made, Observer):
        made.close()


@pytest.mark.parametrize(
    ("path", "name", "sentence"),
    [
        (None, "x", "publish: the checkpoint must be a path, not NoneType"),
        (Checkpoint("m"), "x", "publish: the checkpoint must be a path, not Checkpoint"),
        ("m", None, "publish: the name must be text, not NoneType"),
    ],
)
def test_checkpoints_that_cannot_be_published(
    live_broker: RunningBroker, path: Any, name: Any, sentence: str
) -> None:
    """Before anything is opened."""
    with live_broker.observer() as observer, pytest.raises(UsageError, match=sentence):
        observer.publish_checkpoint(path, name)


def test_configuration_that_is_none(client: EngineClient, tmp_path: Path) -> None:
    """The sentence says of which checkpoint."""
    folder = small_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text("{bad")
    with pytest.raises(LoadFailed, match=f"checkpoint '{folder}': 'config.json' is not JSON"):
        client.acquire(Checkpoint(folder))
