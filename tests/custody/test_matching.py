"""What is demanded and what is there: refused with both sides of each field, as early as known."""

from __future__ import annotations

from typing import Any

import pytest

from broker.custody.actions import CreateSlab
from broker.custody.states import State
from broker.errors import BadRequest, Mismatch
from tests.custody.desk import DEVICE, Desk, Refused, source


def test_a_wrong_dtype_is_refused_at_once() -> None:
    """A resident set that is not what is demanded: Mismatch with both sides of each field."""
    desk = Desk()
    desk.load(1, name="m")
    for how in ({"from_": source(1)}, {"name": "m"}, {"checkpoint": "blake3:a"}):
        with pytest.raises(
            Mismatch,
            match=r"^the resident weights of set 1 \(m\) are not what was asked for: "
            r"dtype wanted 'float16', resident 'bfloat16'; for another dtype ask for "
            r"Checkpoint\(path, dtype=…\)$",
        ) as error:
            desk.acquire(desk.engine(), dtype="float16", **how)
        assert error.value.differing == {"dtype": {"wanted": "float16", "resident": "bfloat16"}}


def test_advice_that_would_not_help_is_not_given() -> None:
    """What an engine published no load converts; a label stays with the content it was given to."""
    desk = Desk()
    desk.publish(desk.engine(), name="m", format="published")
    with pytest.raises(Mismatch, match=r"dtype wanted 'float16', resident 'bfloat16'$"):
        desk.acquire(desk.engine(), name="m", dtype="float16")
    desk.load(1, "blake3:b", name="n")
    with pytest.raises(
        Mismatch,
        match=r"generation wanted '7', resident '1'; leave the label out, or ask for the one it "
        r"has$",
    ):
        desk.acquire(desk.engine(), from_=source(1), name="n", generation="7")


def test_a_wrong_dtype_is_refused_when_the_load_learns_its_own() -> None:
    """Those who demand another dtype are told at `reserve`; the others go on waiting."""
    desk = Desk()
    loader = desk.start(source(1))
    desk.acquire(desk.engine(), from_=source(1), dtype="float16")
    sentence = (
        "the resident weights of set 1 are not what was asked for: "
        "dtype wanted 'float16', resident 'bfloat16'; for another dtype ask for "
        "Checkpoint(path, dtype=…)"
    )
    assert desk.reserve(loader.session) == [
        CreateSlab(1, DEVICE, 100),
        Refused(2, Mismatch, sentence),
    ]
    assert list(desk.set(1).waiters) == [1]


def test_a_wrong_quantisation_is_refused_once_it_is_known() -> None:
    """After `reserve` a load is known to be unquantised: whoever wants more is told at once."""
    desk = Desk()
    loader = desk.start(source(1))
    assert desk.acquire(desk.engine(), from_=source(1), quantization="fp8") == []
    refusal = desk.reserve(loader.session)[-1]
    assert isinstance(refusal, Refused)
    with pytest.raises(Mismatch, match=r"quantization wanted 'fp8', resident ''$"):
        desk.acquire(desk.engine(), from_=source(1), quantization="fp8")


def test_a_load_that_nobody_can_use_reserves_nothing() -> None:
    """If all who wait demand another dtype the loader is refused, evicts nothing, and gives up."""
    desk = Desk()
    desk.load(5, "blake3:e", fingerprint="shape-e", nbytes=1000)
    desk.release(1)
    loader = desk.start(source(1), dtype="float16")
    ticket = desk.ticket
    with pytest.raises(Mismatch) as error:
        desk.reserve(loader.session)
    assert desk.set(loader.set).state is State.CLAIMED
    assert desk.abandon(loader.session, error.value)[0] == Refused(
        ticket, Mismatch, error.value.sentence
    )
    assert list(desk.books.sets) == [1]


def test_what_no_load_can_give_is_refused_before_it() -> None:
    """A layout or format of an engine's own cannot be loaded from a checkpoint."""
    desk = Desk()
    with pytest.raises(
        Mismatch,
        match="^the broker loads a checkpoint whole and as it is stored: layout wanted "
        r"{'tp_size': 2}, loaded {}; format wanted 'vllm', loaded 'hf'; leave this open, or "
        "publish the weights from an engine$",
    ) as error:
        desk.acquire(desk.engine(), from_=source(1), layout={"tp_size": 2}, format="vllm")
    assert set(error.value.differing) == {"layout", "format"}


def test_an_identity_that_the_load_does_not_have() -> None:
    """A demand for a checkpoint's identity is checked when the loader knows it."""
    desk = Desk()
    loader = desk.start(source(1), checkpoint="blake3:b")
    (_, refusal) = desk.finish(loader, "blake3:a")
    assert isinstance(refusal, Refused)
    assert refusal.kind is Mismatch
    assert "checkpoint wanted 'blake3:b', resident 'blake3:a'" in refusal.sentence


def test_a_set_without_identity_is_not_a_checkpoint() -> None:
    """A published set that has no identity does not satisfy a demand for one."""
    desk = Desk()
    desk.publish(desk.engine(), name="m")
    with pytest.raises(Mismatch, match="checkpoint wanted 'blake3:a', resident ''"):
        desk.acquire(desk.engine(), name="m", checkpoint="blake3:a")


@pytest.mark.parametrize(
    ("demand", "sentence"),
    [
        ({}, "acquire needs a checkpoint's source, its identity or a set's name"),
        ({"name": ""}, "acquire needs a checkpoint's source, its identity or a set's name"),
        (
            {"device": "GPU-9", "name": "m"},
            "this broker does not serve device 'GPU-9'; it serves GPU-0, GPU-1",
        ),
        (
            {"checkpoint": "blake3:a", "generation": "1"},
            "generation '1' of what? A generation needs the name it is of",
        ),
    ],
)
def test_requests_that_cannot_be_understood(demand: dict[str, Any], sentence: str) -> None:
    """Nothing named, an empty name, an unknown device, a generation of nothing: one sentence."""
    desk = Desk()
    desk.start(source(1))
    with pytest.raises(BadRequest) as error:
        desk.acquire(desk.engine(), **demand)
    assert error.value.sentence == sentence
