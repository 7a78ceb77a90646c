"""Plain data: what keys are made of, and what attributes may be to be carried."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Mismatch, UsageError
from engine_client.integrations.vllm.carried import state_of
from engine_client.integrations.vllm.plain import (
    NotPlainError,
    as_text,
    canonical,
    decode,
    encode,
)

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([torch.float16, torch.int8, torch.Size([2, 3])])
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def _same(one: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(_same(a, c) and _same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@given(_VALUES)
def test_an_attribute_arrives_as_what_it_was(value: Any) -> None:
    """Through JSON and back: the same value, and the same types inside."""
    text = msgspec.json.encode(encode(value))
    assert _same(decode(msgspec.json.decode(text)), value)


@pytest.mark.parametrize("value", [math.inf, -0.0, {3, 1}, set(), "\ud800", 1 << 70])
def test_values_that_json_has_not_arrive_too(value: Any) -> None:
    """Infinity, minus zero, sets, half a pair of surrogates and numbers of more than 64 bits."""
    assert repr(decode(msgspec.json.decode(msgspec.json.encode(encode(value))))) == repr(value)


class _Colour(enum.IntEnum):
    RED = 1


class _Access(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.mark.parametrize(
    "value",
    [
        *(object(), len, lambda: None, torch.ones(1), torch.nn.Module(), _Colour.RED),
        *([1, object()], {"a": (len,)}, frozenset({1}), torch.device("cpu")),
    ],
    ids=lambda value: type(value).__name__,  # not its address: each worker has its own
)
def test_what_is_more_than_data_is_not_encoded(value: Any) -> None:
    """Objects, code, tensors and subclasses of plain types, also inside of containers."""
    with pytest.raises(NotPlainError):
        encode(value)


_DEEP: Any = 1
for _ in range(5000):
    _DEEP = ["list", [_DEEP]]


@pytest.mark.parametrize(
    "text",
    [
        *(["code", "x"], ["dtype", "nn"], ["dtype", "Tensor"], ["list"], {"a": 1}, 1.5),
        *(["float", "0x1p99999"], ["size", [1 << 70]], _DEEP),
    ],
    ids=lambda text: str(text)[:20] if text is not _DEEP else "deep",
)
def test_what_nobody_encoded_is_refused(text: Any) -> None:
    """Nothing but dtypes is looked up by name, and only in torch."""
    with pytest.raises(UsageError, match="no encoded attribute"):
        decode(text)


@dataclass
class _Settings:
    name: str
    path: Path


def test_equal_settings_are_equal_text() -> None:
    """Whatever the order of their keys, and of any type that can be written down."""
    one = {"b": [torch.int8, _Colour.RED], "a": _Settings("x", Path("/y")), "c": {2, 1}}
    other = {"c": {1, 2}, "a": _Settings("x", Path("/y")), "b": (torch.int8, _Colour.RED)}
    assert as_text(canonical(one, "it")) == as_text(canonical(other, "it"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        ("1", 1),
        (None, "None"),
        (_Colour.RED, 1),
        (_Settings("x", Path("/y")), {"name": "x", "path": "/y"}),
        (torch.float16, torch.bfloat16),
        ([1, [2]], [[1], 2]),
        ({1: "a"}, {"1": "a"}),
        ({None: 1}, {"None": 1}),
        ({1: "a", "1": "b"}, {"1": "b"}),
        ({1}, [1]),
        ([], {}),
        (["list", [1]], [1]),
        (["set", [1]], {1}),
        (math.inf, "inf"),
        (0.0, -0.0),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (int, "builtins.int"),
        (Path("a"), "a"),
        (b"ab", "ab"),
        ("\ud800", "\ud801"),
        (1 << 70, float(1 << 70)),
        (torch.__version__, str(torch.__version__)),
        (_Access.READ | _Access.WRITE, _Access.READ),
    ],
    ids=ascii,
)
def test_different_settings_are_different_text(one: Any, other: Any) -> None:
    """A key must tell them apart."""
    assert as_text(canonical(one, "it")) != as_text(canonical(other, "it"))


def test_a_setting_that_cannot_be_written_down_is_refused() -> None:
    """By name and class: an address would differ in each process, a class name is too little."""
    with pytest.raises(UsageError, match=r"vLLM's setting kernels holds a builtins\.object"):
        canonical({"deep": [object()]}, "vLLM's setting kernels")


def test_a_setting_that_contains_itself_is_refused() -> None:
    """Instead of a stack that overflows."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        canonical(loop, "it")
    with pytest.raises(NotPlainError, match="contains itself"):
        encode(loop)


@pytest.mark.parametrize(
    "state",
    [b'{"plain":' + b'{"a":' * 3000, b'{"plain":{"a":{"b":' + b"[" * 5000 + b"]" * 5000 + b"}}}"],
    ids=["objects", "lists"],
)
def test_a_state_that_is_nested_deeply_is_refused(state: bytes) -> None:
    """As no state of ours: a stack that overflows says nothing."""
    with pytest.raises(Mismatch, match="has not what vLLM's plugin publishes"):
        state_of(state)
