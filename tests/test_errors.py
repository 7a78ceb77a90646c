"""The errors' tree, and what of an error survives the way over the wire, a pickle or a copy."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import errors
from broker.errors import (
    ERROR_STATUSES,
    MAX_SENTENCE_BYTES,
    BadRequest,
    BindError,
    BrokerError,
    BrokerLost,
    BrokerNotFound,
    InternalError,
    LoadFailed,
    Mismatch,
    NotFound,
    OverBudget,
    RequestTimeout,
    ShuttingDown,
    UnsupportedPlatformForIPCError,
    UsageError,
    from_payload,
)

CLASSES = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, BrokerError) and each is not BrokerError
}
WIRE = [errors._BY_STATUS[status] for status in sorted(ERROR_STATUSES)]

STATUSES_OF_THE_CONTRACT = {
    "bad-request",
    "unknown-operation",
    "protocol-mismatch",
    "no-session",
    "not-found",
    "mismatch",
    "busy",
    "over-budget",
    "load-failed",
    "unsupported-platform",
    "unsupported-quantization",
    "stale-epoch",
    "timeout",
    "cancelled",
    "shutting-down",
    "internal",
}


def test_tree() -> None:
    """The tree in the module's docstring names every class below its own base, and no other."""
    assert errors.__doc__ is not None
    path = ["BrokerError"]
    drawn = {}
    for branches, name in re.findall(r"^ {4}((?:[│ ] {3})*)[├└]── (\w+)", errors.__doc__, re.M):
        depth = len(branches) // 4 + 1
        path = [*path[:depth], name]
        drawn[name] = path[-2]
    assert drawn == {name: each.__bases__[0].__name__ for name, each in CLASSES.items()}
    assert list(drawn) == list(CLASSES)


def test_statuses() -> None:
    """There is one status word for each error that travels, as the contract lists them."""
    assert ERROR_STATUSES == STATUSES_OF_THE_CONTRACT
    assert sorted(each.status for each in WIRE) == sorted(STATUSES_OF_THE_CONTRACT)
    assert {each.status for each in CLASSES.values()} == ERROR_STATUSES


def test_exit_codes() -> None:
    """Every error ends the command line with a code that says failure and fits a process."""
    codes = {each.__name__: each.exit_code for each in CLASSES.values()}
    assert codes == {
        "BadRequest": 2,
        "UnknownOperation": 2,
        "ProtocolMismatch": 4,
        "NoSession": 4,
        "NotFound": 5,
        "Mismatch": 6,
        "BindError": 6,
        "Busy": 7,
        "OverBudget": 8,
        "LoadFailed": 9,
        "UnsupportedPlatformForIPCError": 3,
        "UnsupportedQuantForIPCError": 10,
        "StaleEpoch": 4,
        "RequestTimeout": 11,
        "Cancelled": 11,
        "ShuttingDown": 12,
        "InternalError": 1,
        "BrokerNotFound": 13,
        "BrokerLost": 13,
        "UsageError": 2,
    }


def test_timeout_is_a_timeout() -> None:
    """A caller that catches the built-in TimeoutError catches ours, fields and all."""
    with pytest.raises(TimeoutError) as caught:
        raise RequestTimeout("no answer within 5 s while waiting for hello", stage="hello")
    assert str(caught.value) == "no answer within 5 s while waiting for hello"
    assert isinstance(caught.value, RequestTimeout)
    assert caught.value.stage == "hello"


def test_fields_are_attributes() -> None:
    """Fields can be read as attributes; what is no field is an AttributeError that says so."""
    error = OverBudget("no room", requested=10, free=4, limit=8, device="SIM-0")
    assert (error.requested, error.free, error.limit, error.device) == (10, 4, 8, "SIM-0")
    assert str(error) == error.sentence == "no room"
    with pytest.raises(AttributeError) as caught:
        error.budget  # noqa: B018
    assert str(caught.value) == "OverBudget has no attribute or field 'budget'"


@pytest.mark.parametrize("each", WIRE)
def test_each_status_makes_the_round_trip(each: type[BrokerError]) -> None:
    """An error made from a payload has the type, sentence and fields of the one sent."""
    sent = each("the sentence", file="a.safetensors", needed=3, nested={"a": [1, None]})
    received = from_payload(sent.status, sent.to_payload())
    assert type(received) is each
    assert received.sentence == sent.sentence
    assert received.fields == sent.fields


@pytest.mark.parametrize(
    ("each", "becomes"),
    [
        (BrokerNotFound, NotFound),
        (BrokerLost, ShuttingDown),
        (UsageError, BadRequest),
        (BindError, Mismatch),
    ],
)
def test_client_errors_share_their_words(
    each: type[BrokerError], becomes: type[BrokerError]
) -> None:
    """A client-only error that travels all the same arrives as the nearest that may."""
    assert type(from_payload(each.status, each("x").to_payload())) is becomes


def test_payload() -> None:
    """The payload is the sentence and, if there are fields, one line of JSON."""
    assert LoadFailed("cut short").to_payload() == b"cut short"
    assert LoadFailed("kürzer", reason="truncated").to_payload() == (
        'kürzer\n{"reason": "truncated"}'.encode()
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from(WIRE),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=200),
    st.dictionaries(st.text(), json_values, max_size=4),
)
def test_any_error_makes_the_round_trip(
    each: type[BrokerError], sentence: str, fields: dict[str, object]
) -> None:
    """Sentence and fields arrive unchanged, whatever they are, also fields named like arguments."""
    sent = each(sentence, **fields)
    received = from_payload(each.status, sent.to_payload())
    assert (type(received), received.sentence, received.fields) == (each, sentence, fields)


def test_sentence_stays_one_line() -> None:
    """Newlines become blanks: the first line is the whole sentence."""
    error = from_payload("internal", InternalError("two\nlines", line=2).to_payload())
    assert error.sentence == "two lines"
    assert error.fields == {"line": 2}


def test_long_sentence() -> None:
    """A sentence is cut at the limit without splitting a character, and keeps its fields."""
    payload = InternalError("é" * MAX_SENTENCE_BYTES + "x", line=2).to_payload()
    error = from_payload("internal", payload)
    assert error.sentence == "é" * (MAX_SENTENCE_BYTES // 2)
    assert error.line == 2
    odd = InternalError("x" + "é" * MAX_SENTENCE_BYTES).to_payload()
    assert odd.decode() == "x" + "é" * (MAX_SENTENCE_BYTES // 2 - 1)


def test_lone_surrogate() -> None:
    """A name that is no valid text, as a file's may be, is shown escaped."""
    error = from_payload("internal", InternalError("bad name \udcff", name="\udcff").to_payload())
    assert error.sentence == "bad name \\udcff"
    assert error.name == "\udcff"


class Cycle(dict[str, object]):
    """A field that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self["me"] = self


@pytest.mark.parametrize(
    "value", [float("nan"), {("a", "b"): 1}, Cycle(), "x" * (4 * MAX_SENTENCE_BYTES)]
)
def test_fields_that_cannot_travel(value: object) -> None:
    """Fields that JSON cannot hold, or too many of them, stay behind; the sentence travels."""
    assert Mismatch("differs", differing=value).to_payload() == b"differs"


def test_other_values_travel_as_text() -> None:
    """A value that JSON does not know travels as its text."""
    error = from_payload("busy", errors.Busy("held", path=sys.path.__class__).to_payload())
    assert error.path == "<class 'list'>"


@pytest.mark.parametrize("status", ["", "ok", "progress", "no-such-word", "internal\n"])
def test_unknown_status(status: str) -> None:
    """A status nobody knows is an internal error that names it and keeps the text."""
    error = from_payload(status, b"what happened\n{}")
    assert type(error) is InternalError
    assert str(error) == f"the broker answered with the unknown status {status!r}: what happened"


@pytest.mark.parametrize(
    ("payload", "sentence", "fields"),
    [
        (b"", "", {}),
        (b"\n", "", {}),
        (b"x\n", "x", {}),
        (b"x\n[1]", "x", {}),
        (b"x\nnull", "x", {}),
        (b'x\n{"a": 1', "x", {}),
        (b"x\n" + b"[" * 100_000, "x", {}),
        (b'x\n{"a": ' + b"9" * 5_000 + b"}", "x", {}),
        (b'x\n{"a": 1}\nand more', "x", {"a": 1}),
        (b"\xff\xfe\n\xff", "\ufffd\ufffd", {}),
        (b'x\n{"self": 1, "sentence": 2, "cls": 3}', "x", {"self": 1, "sentence": 2, "cls": 3}),
        (b'x\n{"": 0, "a b": 1}', "x", {"": 0, "a b": 1}),
    ],
)
def test_hostile_payloads(payload: bytes, sentence: str, fields: dict[str, object]) -> None:
    """Whatever a peer sends becomes an error of the status's class, never another exception."""
    error = from_payload("bad-request", payload)
    assert type(error) is BadRequest
    assert error.sentence == sentence
    assert error.fields == fields


@given(st.text(max_size=12), st.binary(max_size=60))
def test_any_payload(status: str, payload: bytes) -> None:
    """No status and no bytes make reading a reply fail."""
    assert isinstance(from_payload(status, payload), BrokerError)


def test_fields_cannot_replace_what_python_asks_for() -> None:
    """A peer's fields named like Python's own hooks get in the way of nothing."""
    payload = b'x\n{"__deepcopy__": 1, "__notes__": 2, "args": [3], "status": "ok", "fields": 4}'
    error = from_payload("busy", payload)
    assert copy.deepcopy(error).fields == error.fields
    assert not hasattr(error, "__notes__")
    assert (error.args, error.status) == (("x",), "busy")
    assert error.fields["status"] == "ok"


@pytest.mark.parametrize("each", CLASSES.values())
def test_pickle_and_copy(each: type[BrokerError]) -> None:
    """An error crosses process pools and copies whole, fields named like arguments included."""
    error = each("the sentence", sentence="another", cls=1, tried=["a"])
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is each
        assert str(other) == other.sentence == "the sentence"
        assert other.fields == {"sentence": "another", "cls": 1, "tried": ["a"]}
    assert copy.deepcopy(error).tried is not error.tried


def test_platform_error_fields() -> None:
    """The fields an engine decides by are there under the names the contract gives."""
    error = UnsupportedPlatformForIPCError("no", where="engine", platform="mps", reason="not-linux")
    assert (error.where, error.platform, error.reason) == ("engine", "mps", "not-linux")


def test_light() -> None:
    """Importing the errors pulls in neither torch nor zmq nor msgspec."""
    program = (
        "import json, sys, broker.errors\n"
        "print(json.dumps([name in sys.modules for name in ('torch', 'zmq', 'msgspec')]))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert json.loads(result.stdout) == [False, False, False]
