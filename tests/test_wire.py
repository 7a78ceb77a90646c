"""The wire: whatever bytes come in, a struct or the documented error comes out."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import wire
from broker.errors import BadRequest, UnknownOperation
from tests.support.messages import (
    EXAMPLES,
    GRANTED,
    REPLIES,
    STAMP,
    as_fields,
    changed,
    packed,
    refusal,
)

# --- any bytes at all -------------------------------------------------------------------------

WORDS = st.one_of(
    st.binary(max_size=40), st.sampled_from([word.encode() for word in wire.REQUESTS])
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
PAYLOADS = st.one_of(
    st.binary(max_size=200),
    PLAIN.map(msgspec.msgpack.encode),
    st.sampled_from(list(EXAMPLES.values())).map(wire.encode),
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid request with a field changed, added or taken away, or a few of its bytes changed."""
    operation = draw(st.sampled_from(list(EXAMPLES)))
    fields = as_fields(operation)
    name = draw(st.sampled_from([*fields, "surplus"]))
    if draw(st.booleans()):
        fields[name] = draw(PLAIN)
    else:
        fields.pop(name, None)
    data = bytearray(msgspec.msgpack.encode(fields))
    for _ in range(draw(st.integers(0, 2))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return operation, bytes(
        data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data
    )


@given(st.lists(st.one_of(WORDS, PAYLOADS), max_size=14))
def test_any_list_of_frames(frames: list[bytes]) -> None:
    """Frames are a request, or refused with one of the two documented errors."""
    envelope = wire.envelope_of(frames)
    assert envelope in ((), tuple(frames[:-2]))
    try:
        request = wire.split_request(frames)
        message = wire.decode_request(request.operation, request.payload)
    except (BadRequest, UnknownOperation) as error:
        assert error.sentence  # noqa: PT017
        return
    assert request.envelope == envelope
    assert type(message) is wire.REQUESTS[request.operation]


@given(mutated())
def test_nearly_a_request(request: tuple[str, bytes]) -> None:
    """A damaged request is refused, or it was still one: then it survives another round trip."""
    operation, payload = request
    try:
        message = wire.decode_request(operation, payload)
    except BadRequest:
        return
    assert wire.decode_request(operation, wire.encode(message)) == message


@given(PAYLOADS)
def test_any_session_packet(packet: bytes) -> None:
    """A packet is one of the direction's structs, or refused with BadRequest."""
    for decode, kinds in (
        (wire.decode_to_broker, typing.get_args(wire.ToBroker)),
        (wire.decode_to_engine, typing.get_args(wire.ToEngine)),
    ):
        try:
            message = decode(packet)
        except BadRequest:
            continue
        assert type(message) in kinds


@given(PAYLOADS, st.sampled_from([type(reply) for reply in REPLIES]))
def test_any_reply(payload: bytes, kind: type[msgspec.Struct]) -> None:
    """A broker that is none is found out with BadRequest, on the client's side too."""
    try:
        assert type(wire.decode_reply(kind, payload)) is kind
    except BadRequest as error:
        assert error.sentence.startswith(f"the reply is not a {kind.__name__}: ")  # noqa: PT017


# --- round trips ------------------------------------------------------------------------------


def test_every_operation_has_an_example() -> None:
    """The examples here cover each operation that takes a payload, and vary each field."""
    assert set(EXAMPLES) | wire.SESSIONLESS == set(wire.REQUESTS)
    for operation, message in EXAMPLES.items():
        assert type(message) is wire.REQUESTS[operation]


@pytest.mark.parametrize("operation", EXAMPLES)
def test_requests_travel_whole(operation: str) -> None:
    """What is encoded is what is decoded."""
    message = EXAMPLES[operation]
    assert wire.decode_request(operation, wire.encode(message)) == message


@pytest.mark.parametrize("operation", sorted(wire.SESSIONLESS))
def test_requests_without_payload(operation: str) -> None:
    """`ping` and `status` take an empty payload and nothing else."""
    assert wire.decode_request(operation, b"") == wire.REQUESTS[operation]()
    assert refusal(operation, b"\x80") == f"{operation} takes an empty payload"


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_replies_travel_whole(reply: msgspec.Struct) -> None:
    """What the broker encodes is what the client decodes, and it is plain enough for JSON."""
    assert wire.decode_reply(type(reply), wire.encode(reply)) == reply
    assert msgspec.json.encode(wire.as_plain(reply))


@pytest.mark.parametrize("right", [GRANTED, wire.Claimed("c")])
def test_a_claim_is_answered_with_either_right(right: wire.Granted | wire.Claimed) -> None:
    """The answer to `claim` says by itself which right it is."""
    assert wire.decode_right(wire.encode(right)) == right
    with pytest.raises(BadRequest, match=r"^the reply is neither a lease nor a claim: "):
        wire.decode_right(wire.encode(wire.Done()))


@pytest.mark.parametrize(
    "packet",
    [
        wire.Attach("w"),
        wire.Deliver(b"request", "source"),
        wire.Welcome(1, b"token", "epoch"),
        wire.Refused("w", "bad-request", "no such lease"),
        wire.Attached("w", 100, "epoch"),
    ],
    ids=lambda packet: type(packet).__name__,
)
def test_session_packets_travel_whole_one_way(packet: msgspec.Struct) -> None:
    """Each packet is understood by the side it is for, and refused by the other."""
    decoders = [wire.decode_to_broker, wire.decode_to_engine]
    if not isinstance(packet, typing.get_args(wire.ToBroker)):
        decoders.reverse()
    receiver, sender = decoders
    assert receiver(wire.encode(packet)) == packet
    with pytest.raises(BadRequest, match=r"^a session packet cannot be decoded: Invalid value"):
        sender(wire.encode(packet))


# --- strictness -------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", EXAMPLES)
def test_an_unknown_field_is_refused(operation: str) -> None:
    """A field that the protocol does not know is an error, not ignored."""
    assert "Object contains unknown field `surplus`" in refusal(
        operation, changed(operation, surplus=1)
    )


@pytest.mark.parametrize(
    ("operation", "fields", "said"),
    [
        ("reserve", {"nbytes": True}, "Expected `int`, got `bool`"),
        ("reserve", {"nbytes": 1.0}, "Expected `int`, got `float`"),
        ("reserve", {"nbytes": "1"}, "Expected `int`, got `str`"),
        ("reserve", {"nbytes": None}, "Expected `int`, got `null`"),
        ("release", {"lease": b"w"}, "Expected `str`, got `bytes`"),
        ("release", {"lease": ["w"]}, "Expected `str`, got `array`"),
        ("shutdown", {"force": 1}, "Expected `bool`, got `int`"),
        ("hello", {"token": "text"}, "Expected `bytes`, got `str`"),
        ("acquire", {"demand": []}, "Expected `object`, got `array`"),
        ("claim", {"key": {"device": "d", "layout": {"tp": True}}}, "Expected `int`, got `bool`"),
        ("resolve", {"files": [["a"] * 7]}, "Expected `int`, got `str`"),
        ("resolve", {"files": [["a", 1]]}, "Expected `array` of at least length 7, got 2"),
        ("resolve", {"files": [[*msgspec.to_builtins(STAMP), 1]]}, "of at most length 7"),
    ],
)
def test_a_wrong_type_is_refused(operation: str, fields: dict[str, Any], said: str) -> None:
    """Nothing is converted: a bool is no number, a number no text."""
    sentence = refusal(operation, changed(operation, **fields))
    assert sentence.startswith(f"the payload of {operation} cannot be decoded: ")
    assert said.replace("null", "None") in sentence.replace("null", "None")


def test_a_missing_field_is_refused() -> None:
    """A request without what it is about says which field is missing."""
    assert refusal("release", packed()) == (
        "the payload of release cannot be decoded: Object missing required field `lease`"
    )


@pytest.mark.parametrize("text", ["", "two\nlines", "half a pair \ud800", "\x00", "ä" * 129])
def test_what_is_no_name(text: str) -> None:
    """Empty, not printable, of no bytes, or of too many."""
    assert not wire.is_name(text)


DEEP = b"\x91" * 100_000
HOSTILE = {
    "nothing": b"",
    "nil": b"\xc0",
    "deep arrays": DEEP,
    "deep arrays in a field": b"\x81\xa5lease" + DEEP,
    "deep maps": b"\x81\xa1a" * 50_000,
    "a huge map": b"\xdf\xff\xff\xff\xff",
    "a huge text": b"\x81\xa5lease\xdb\xff\xff\xff\xff",
    "a huge array of files": b"\x81\xa5files\xdd\xff\xff\xff\xff",
    "a huge extension": b"\xc9\xff\xff\xff\xff\x01",
    "an extension for a text": b"\x81\xa5lease\xc7\x01\x05a",
    "a timestamp for a text": b"\x81\xa5lease\xd6\xff\x00\x00\x00\x00",
    "text that is no UTF-8": b"\x81\xa5lease\xa2\xff\xfe",
    "a surrogate": b"\x81\xa5lease\xa3\xed\xa0\x80",
    "a byte too many": b"\x81\xa5lease\xa1w\xc0",
    "a byte that is never used": b"\xc1",
    "a number for a name": b"\x81\x01\xa1w",
    "a pickle": b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94.",
}


@pytest.mark.parametrize("operation", EXAMPLES)
@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_msgpack(operation: str, payload: bytes) -> None:
    """Crafted payloads are refused like any other that cannot be decoded."""
    assert refusal(operation, payload).startswith(f"the payload of {operation} cannot be decoded: ")


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_packets_and_replies(payload: bytes) -> None:
    """So are packets on the session socket, and replies of a broker that is none."""
    for decode in (wire.decode_to_broker, wire.decode_to_engine, wire.decode_right):
        with pytest.raises(BadRequest):
            decode(payload)
    for kind in (wire.Event, wire.StatusReport):
        with pytest.raises(BadRequest):
            wire.decode_reply(kind, payload)
    with pytest.raises(BadRequest):
        wire.decode_reply(wire.Event, b"\x82\xa5event\xa1e\xa6detail\x81\xa1a" + DEEP)
