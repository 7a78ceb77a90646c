"""Did you mean …?"""

from __future__ import annotations

import pytest

from broker import wire
from broker.errors import NotFound, UnknownOperation
from broker.suggest import MOST_COMPARED, did_you_mean
from tests.custody.desk import Desk


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("prd", "did you mean prod?"),
        ("llama-3", "did you mean llama-2 or llama?"),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_near_names(name: str, said: str) -> None:
    """The nearest names, or nothing."""
    assert did_you_mean(name, ["prod", "llama", "llama-2", "qwen"]) == said


def test_a_great_many_names() -> None:
    """No more of them are looked at than the broker's loop has time for, nor longer ones."""
    names = iter([f"name-{number}" for number in range(10 * MOST_COMPARED)])
    did_you_mean("name-x", names)
    assert next(names) == f"name-{MOST_COMPARED}"
    assert did_you_mean("x" * 10_000, ["x" * 9_999]) == ""


def test_an_operation_that_is_none() -> None:
    """A misspelt operation is answered with the nearest, and with all there are."""
    with pytest.raises(UnknownOperation) as caught:
        wire.decode_request("acquier", b"")
    assert caught.value.sentence.startswith("there is no operation 'acquier'; did you mean acquire")
    assert "unwatch" in caught.value.sentence


@pytest.mark.parametrize("ask", ["evict", "acquire"])
def test_a_name_that_nothing_has(ask: str) -> None:
    """A misspelt name of a set is answered with the nearest, whoever asks."""
    desk = Desk()
    desk.load(1, name="production")
    with pytest.raises(NotFound, match=r"did you mean production\?"):
        desk.evict("prodution") if ask == "evict" else desk.acquire(desk.engine(), name="prodution")
