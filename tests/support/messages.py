"""One of each message, and how a payload is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from broker import wire
from broker.errors import BadRequest
from broker.weights import WeightKey

STAMP = wire.FileStamp("model.safetensors", 1, 2, 3, 4, 5, "digest")
SOURCE = wire.Source("/models/m", None, [STAMP], "shape")
KEY = WeightKey("GPU-0", "m", "blake3:a", "bfloat16", {"tp_rank": 0, "tp_size": 2})
GRANTED = wire.Granted("w", 1, KEY, "1", 100, 3, "loaded")

EXAMPLES: dict[str, wire.Message] = {
    "shutdown": wire.Shutdown(force=True),
    "upgrade": wire.Upgrade(),
    "hello": wire.Hello(b"token", wire.PROTOCOL, "simulated", "engine"),
    "acquire": wire.Acquire("w", wire.Demand("GPU-0", "m", layout={"tp_size": 2}), SOURCE),
    "claim": wire.Claim("c", KEY, willing=False, generation="7", fresh=True),
    "load": wire.Load("w", KEY, "build", 60.0),
    "resolve": wire.Resolve("load", "blake3:a", [STAMP]),
    "reserve": wire.Reserve("load", 100, 3, "bfloat16", "fp8"),
    "seal": wire.Seal("load", "blake3:a", [STAMP], keep=True),
    "abandon": wire.Abandon("load", "load-failed", "the file is truncated"),
    "report": wire.Report("load", "copying", 1, 2),
    "release": wire.Release("w"),
    "cancel": wire.Cancel("w"),
    "evict": wire.Evict("7"),
    "pin": wire.Pin("m"),
    "unpin": wire.Unpin("m"),
    "watch": wire.Watch(""),
    "unwatch": wire.Unwatch("m"),
}
"""One of each request that has a payload."""

REPLIES: list[msgspec.Struct] = [
    wire.Pong(1, "epoch", 42, 0.5),
    wire.Welcomed(1, "epoch", ["GPU-0"]),
    GRANTED,
    wire.Claimed("c"),
    wire.Resolved(resident=True),
    wire.Reserved("load", 100),
    wire.Sealed(1, "blake3:a", None, resident=False, granted=GRANTED),
    wire.Done(),
    wire.Pinned([1]),
    wire.Evicted([1, 2], [2]),
    wire.Progress("copying", 1, 2),
    wire.StatusReport({"pid": 1}, {}, [{"id": 1}], [], {"loads_started": 1}),
    wire.Event("evicted", {"name": "m"}),
]


def refusal(operation: str, payload: bytes) -> str:
    """The sentence with which a payload is refused."""
    with pytest.raises(BadRequest) as error:
        wire.decode_request(operation, payload)
    return error.value.sentence


def packed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def as_fields(operation: str) -> dict[str, Any]:
    """The example of an operation, its bytes still bytes."""
    fields: dict[str, Any] = msgspec.msgpack.decode(wire.encode(EXAMPLES[operation]))
    return fields


def changed(operation: str, **fields: Any) -> bytes:
    """The example of an operation with other fields."""
    return msgspec.msgpack.encode({**as_fields(operation), **fields})
