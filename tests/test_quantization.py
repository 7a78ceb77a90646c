"""Which quantised checkpoints may be shared, and what the others are told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import quantization
from broker.errors import UnsupportedQuantForIPCError, UsageError
from broker.quantization import (
    Where,
    check_ipc_quant_support,
    quantization_config_in,
    register_ipc_quantization,
)

INSTEAD = (
    "; sharing the stored tensors could give wrong numbers; load this checkpoint the ordinary way "
    "in each engine, or use one that is unquantised or fp8 with weight_block_size"
)
DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def refusal(config: object, where: Where = "broker") -> UnsupportedQuantForIPCError:
    with pytest.raises(UnsupportedQuantForIPCError) as caught:
        check_ipc_quant_support(config, where=where)
    return caught.value


@pytest.mark.parametrize("config", [None, {}])
def test_unquantised(config: object) -> None:
    """A checkpoint without quantisation may be shared."""
    assert check_ipc_quant_support(config, where="engine") == ""


@pytest.mark.parametrize(
    "config",
    [
        DEEPSEEK_V3,
        {"quant_method": "fp8", "weight_block_size": (1, 32)},
        {
            **DEEPSEEK_V3,
            "quant_method": "FP8 ",
            "scale_fmt": "ue8m0",
            "ignored_layers": ["lm_head"],
        },
        {**DEEPSEEK_V3, "dequantize": False, "expert_dtype": "fp8", "activation_scheme": None},
    ],
)
def test_fp8_by_blocks(config: Mapping[str, Any]) -> None:
    """fp8 with a stored scale for each block may be shared."""
    assert check_ipc_quant_support(config, where="broker") == "fp8"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"weight_block_size": None},
            "without weight_block_size its scales are fused and its weights requantised on load",
        ),
        (
            {"weight_block_size": [128]},
            "weight_block_size must be two positive integers, not [128]",
        ),
        (
            {"weight_block_size": [True, 128]},
            "weight_block_size must be two positive integers, not [True, 128]",
        ),
        (
            {"weight_block_size": [0, 128]},
            "weight_block_size must be two positive integers, not [0, 128]",
        ),
        (
            {"weight_block_size": "128" * 40},
            (
                "weight_block_size must be two positive integers, not "
                "'128128128128128128128128128128128128128…"
            ),
        ),
        (
            {"activation_scheme": "static"},
            (
                "activation_scheme is 'static': the activation scales become numbers outside any "
                "tensor"
            ),
        ),
        (
            {"fmt": "e5m2"},
            "fmt is 'e5m2': only e4m3 weights are known to be used as they are stored",
        ),
        (
            {"dequantize": True},
            "dequantize is True: the tensors an engine uses are then not the stored ones",
        ),
        (
            {"expert_dtype": "fp4"},
            "expert_dtype is 'fp4': packed experts are reordered for their kernel on load",
        ),
    ],
)
def test_other_fp8(change: dict[str, Any], reason: str) -> None:
    """Every other kind of fp8 is refused with the setting that is in the way."""
    error = refusal({**DEEPSEEK_V3, **change})
    assert str(error) == f"[weight-broker:broker] found quantisation fp8: {reason}{INSTEAD}"
    assert error.fields == {"where": "broker", "method": "fp8"}


REPACKED = "its tensors are repacked for a kernel after loading"
STATEFUL = "part of its state lives in Python objects made while loading, not in tensors"
SEVERAL = "it stands for several formats, of which some are converted while loading"


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("gptq", REPACKED),
        ("awq", REPACKED),
        ("mxfp4", REPACKED),
        ("bitsandbytes", STATEFUL),
        ("torchao", STATEFUL),
        ("compressed-tensors", SEVERAL),
        ("quark", SEVERAL),
        ("mxfp8", "it is not known to need nothing but the stored tensors as they are"),
        ("nvfp4", "it is not known to need nothing but the stored tensors as they are"),
        ("my-own", "it is not known to need nothing but the stored tensors as they are"),
    ],
)
@pytest.mark.parametrize("where", ["broker", "engine"])
def test_other_methods(method: str, reason: str, where: Where) -> None:
    """Other methods are refused by name, with the reason where one is known."""
    error = refusal({"quant_method": method, "bits": 4}, where)
    assert str(error) == f"[weight-broker:{where}] found quantisation {method}: {reason}{INSTEAD}"
    assert error.fields == {"where": where, "method": method}


@pytest.mark.parametrize("key", ["load_in_8bit", "load_in_4bit"])
def test_bitsandbytes_without_a_name(key: str) -> None:
    """The oldest bitsandbytes configurations are known by their keys, whatever they name."""
    assert refusal({key: True}).method == "bitsandbytes"
    assert refusal({**DEEPSEEK_V3, key: True}).method == "bitsandbytes"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("fp8", "its configuration is a str, not a mapping"),
        ([], "its configuration is a list, not a mapping"),
        (0, "its configuration is a int, not a mapping"),
        (False, "its configuration is a bool, not a mapping"),
        ({"bits": 4}, "its configuration names no quant_method"),
        ({"quant_method": ["fp8"]}, "its configuration names no quant_method"),
        ({"quant_method": " "}, "its configuration names no quant_method"),
        ({"quant_method": None}, "its configuration names no quant_method"),
    ],
)
def test_malformed(config: object, reason: str) -> None:
    """A configuration of the wrong form is refused in a sentence, never with a TypeError."""
    error = refusal(config)
    assert str(error) == f"[weight-broker:broker] found quantisation unknown: {reason}{INSTEAD}"


def test_hostile_name() -> None:
    """A method's name is cut and escaped: the sentence stays one readable line."""
    error = refusal({"quant_method": "x\n\x1b[31m" + "y" * 10_000})
    assert "\n" not in str(error)
    assert len(str(error)) < 500
    assert len(error.method) == 64


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)


@given(
    json_values
    | st.dictionaries(st.sampled_from([*DEEPSEEK_V3, "dequantize", "expert_dtype"]), json_values)
    | st.fixed_dictionaries({"quant_method": st.just("fp8"), "weight_block_size": json_values})
)
def test_any_json(config: object) -> None:
    """Whatever JSON holds is either accepted or refused in one line, and nothing else is raised."""
    try:
        method = check_ipc_quant_support(config, where="broker")
    except UnsupportedQuantForIPCError as error:
        assert str(error).startswith("[weight-broker:broker] found quantisation ")  # noqa: PT017
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    else:
        assert method in ("", "fp8")


@pytest.fixture
def own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_PREDICATES", dict(quantization._PREDICATES))


@pytest.mark.usefixtures("own_list")
def test_registered_method() -> None:
    """A registered method is shared if its predicate agrees, else refused with its reason."""
    register_ipc_quantization(" My-Own", lambda config: "" if config.get("plain") else "not plain")
    assert (
        check_ipc_quant_support({"quant_method": "my-own", "plain": 1}, where="engine") == "my-own"
    )
    assert ": not plain;" in str(refusal({"quant_method": "my-own"}))


@pytest.mark.usefixtures("own_list")
def test_predicate_that_stumbles() -> None:
    """A predicate that raises over a strange configuration refuses it."""
    register_ipc_quantization("strict", lambda config: str(config["missing"]))
    assert ": its configuration could not be judged (KeyError: 'missing');" in str(
        refusal({"quant_method": "strict"})
    )


@pytest.mark.usefixtures("own_list")
def test_registering_wrongly() -> None:
    """A method is registered once, under a name; the built-in predicates cannot be replaced."""
    with pytest.raises(UsageError) as caught:
        register_ipc_quantization("FP8", lambda config: "")
    assert str(caught.value) == "the quantisation method 'fp8' is registered already"
    with pytest.raises(UsageError) as caught:
        register_ipc_quantization(" ", lambda config: "")
    assert str(caught.value) == (
        "a quantisation method is registered under a name, and none was given"
    )


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, None),
        ({"quantization_config": None, "text_config": None}, None),
        ({"quantization_config": {}, "compression_config": {}}, None),
        ({"quantization_config": DEEPSEEK_V3}, DEEPSEEK_V3),
        ({"compression_config": {"quant_method": "x"}}, {"quant_method": "x"}),
        ({"text_config": {"quantization_config": DEEPSEEK_V3}}, DEEPSEEK_V3),
        ({"quantization_config": {}, "llm_config": {"quantization_config": [1]}}, [1]),
        ({"quantization_config": 0, "text_config": "text"}, 0),
    ],
)
def test_where_config_json_keeps_it(config: Mapping[str, Any], found: object) -> None:
    """The quantisation is found at the top, in its old place, and in any part's own."""
    assert quantization_config_in(config) == found


def test_light() -> None:
    """Checking pulls in neither torch nor zmq nor msgspec."""
    program = (
        "import json, sys, broker.quantization\n"
        "print(json.dumps([name in sys.modules for name in ('torch', 'zmq', 'msgspec')]))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert json.loads(result.stdout) == [False, False, False]
