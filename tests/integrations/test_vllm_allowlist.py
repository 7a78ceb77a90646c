"""For which classes of vLLM sharing is right, and how the others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from broker.errors import UnsupportedQuantForIPCError, UsageError
from engine_client.integrations.vllm import allowlist
from engine_client.integrations.vllm.allowlist import (
    Rule,
    check_classes,
    rebuilt_attributes,
    register_vllm_class,
    writing_modules,
)
from engine_client.integrations.vllm.options import Stage
from tests.integrations.vllm_toys import (
    ExpertsMethod,
    PlainMethod,
    ScaleMethod,
    UnknownMethod,
    vllm_class,
)

ATTENTION = "attention.attention.Attention"
LATENT = "attention.mla_attention.MLAAttention"


@pytest.fixture(autouse=True)
def _own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowlist, "_RULES", dict(allowlist._RULES))


def model_of(**methods: Any) -> nn.Module:
    """A module for each name, with that quant_method."""
    model = nn.Module()
    for name, method in methods.items():
        child = nn.Module()
        child.quant_method = method
        model.add_module(name, child)
    return model


def with_hook(name: str) -> nn.Module:
    """A module of a class of vLLM's that has a hook itself."""
    module, _, qualified = f"vllm.model_executor.layers.{name}".rpartition(".")
    hook = {"process_weights_after_loading": lambda self, dtype: None}
    made = type(qualified, (nn.Module,), {"__module__": module, **hook})()
    model = nn.Module()
    model.add_module("attn", made)
    return model


@pytest.mark.parametrize("stage", ["loaded", "processed"])
def test_plain_layers_are_shared_on_a_gpu(stage: Stage) -> None:
    """Linear layers, scales of the KV cache, experts, and modules without weights of vLLM's."""
    model = model_of(linear=PlainMethod(), cache=ScaleMethod(), experts=ExpertsMethod(), none=None)
    check_classes(model, stage, "cuda")
    check_classes(with_hook(ATTENTION), stage, "cuda")


@pytest.mark.parametrize("stage", ["loaded", "processed"])
def test_a_method_that_is_not_on_the_list_is_refused_by_name(stage: Stage) -> None:
    """With the modules, their class, why, and what to do instead."""
    model = model_of(good=PlainMethod(), one=UnknownMethod(), two=UnknownMethod())
    with pytest.raises(UnsupportedQuantForIPCError) as refusal:
        check_classes(model, stage, "cuda")
    assert refusal.value.modules == ["one", "two"]
    assert refusal.value.method.endswith("gptq.GPTQLinearMethod")
    assert "one, two (vllm.model_executor.layers.quantization.gptq" in refusal.value.sentence
    assert "the ordinary way (--load-format auto)" in refusal.value.sentence


def test_of_many_modules_some_are_named() -> None:
    """The sentence stays readable; the error has them all."""
    model = model_of(**{f"layer{number}": UnknownMethod() for number in range(9)})
    with pytest.raises(UnsupportedQuantForIPCError, match=r"layer3 and 5 more") as refusal:
        check_classes(model, "loaded", "cuda")
    assert len(refusal.value.modules) == 9


def test_the_cpu_build_shares_what_was_loaded_only() -> None:
    """There processing replaces weights by closures."""
    model = model_of(linear=PlainMethod())
    check_classes(model, "loaded", "cpu")
    with pytest.raises(UnsupportedQuantForIPCError, match=r"closure.*use stage loaded"):
        check_classes(model, "processed", "cpu")


def test_a_vllm_that_cannot_build_on_processed_weights_is_refused() -> None:
    """If it does not say so, or says that it cannot."""
    for declared, said in ((None, "this version of vLLM"), (False, "vLLM says")):
        method = PlainMethod()
        method.supports_pre_processed_weights = declared
        with pytest.raises(UnsupportedQuantForIPCError, match=said):
            check_classes(model_of(linear=method), "processed", "cuda")
        check_classes(model_of(linear=method), "loaded", "cuda")


def test_latent_attention_is_shared_as_loaded_only() -> None:
    """Its hook writes to what it finds when it runs again."""
    check_classes(with_hook(LATENT), "loaded", "cuda")
    with pytest.raises(UnsupportedQuantForIPCError, match="hook runs again"):
        check_classes(with_hook(LATENT), "processed", "cuda")


def test_an_unknown_hook_is_refused_on_modules_and_on_the_model() -> None:
    """Whoever has one may do anything to weights."""
    with pytest.raises(UnsupportedQuantForIPCError, match="attn"):
        check_classes(with_hook("mamba.Mixer"), "loaded", "cuda")
    whole = with_hook("mamba.Mixer").get_submodule("attn")
    with pytest.raises(UnsupportedQuantForIPCError, match="the model itself"):
        check_classes(whole, "loaded", "cuda")


def test_a_class_of_ones_own_can_be_registered() -> None:
    """From then on its rule counts."""
    Mine = vllm_class("mine.Method")  # noqa: N806 - a class
    name = "vllm.model_executor.layers.mine.Method"
    register_vllm_class(name, Rule(writes=True, rebuilt=("kernel",)))
    model = model_of(mine=Mine(), plain=PlainMethod())
    check_classes(model, "processed", "cuda")
    assert writing_modules(model) == [model.get_submodule("mine")]
    assert rebuilt_attributes(model) == {"mine": ("kernel",)}
    with pytest.raises(UsageError, match="has no module"):
        register_vllm_class("Method", Rule())


def test_what_writes_while_it_processes_is_known() -> None:
    """Such modules get private copies before, plain ones do not need any."""
    model = model_of(plain=PlainMethod(), cache=ScaleMethod(), experts=ExpertsMethod())
    names = [name for name, module in model.named_modules() if module in writing_modules(model)]
    assert names == ["cache", "experts"]
