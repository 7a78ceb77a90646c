"""A model with the habits of vLLM's, without vLLM: what loading and processing do to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = "vllm.model_executor.layers"


def vllm_class(name: str, **contents: Any) -> type:
    """A class that says it is vLLM's, with the hook that makes it process weights."""
    module, _, qualified = f"{LAYERS}.{name}".rpartition(".")
    hook = {"process_weights_after_loading": lambda self, layer: None}
    declared = {"supports_pre_processed_weights": True}
    return type(qualified, (), {"__module__": module, **hook, **declared, **contents})


PlainMethod = vllm_class("linear.UnquantizedLinearMethod")
ScaleMethod = vllm_class("quantization.kv_cache.BaseKVCacheMethod")
ExpertsMethod = vllm_class("fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod")
UnknownMethod = vllm_class("quantization.gptq.GPTQLinearMethod")
Kernel = vllm_class("kernels.Kernel")


class LoadedParameter(nn.Parameter):
    """As vLLM has them: it knows how it is loaded."""

    weight_loader: Any


def parameter_of(values: Tensor) -> LoadedParameter:
    made = LoadedParameter(values, requires_grad=False)
    made.weight_loader = lambda: None
    return made


class Layer(nn.Module):
    """Registers its weight and goes on with it, as vLLM does; scales wait to be consumed."""

    steps: Tensor
    weight: nn.Parameter
    table: Tensor
    quant_method: Any
    tag: Any

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = parameter_of(torch.zeros(width, width + 1))
        self.register_parameter("weight", weight)
        weight.output_dim = 0  # type: ignore[attr-defined]
        self.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("steps", torch.arange(3.0), persistent=False)
        self.quant_method = PlainMethod()
        self.quant_method.kernel = Kernel()
        self.tag = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs @ self.weight * float(self.tag["factor"]) + self.steps.sum()
        return outputs


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = Layer(width)
        self.second = Layer(width)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.first(inputs) + self.second(inputs)
        return outputs


def load(model: Model, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in (model.first, model.second):
        layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator))
        layer.k_scale.data.fill_(2.0)


def process(model: Model) -> None:
    """What vLLM may do: replace parameters, drop them, and leave attributes of all kinds."""
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
        layer.tag = {"factor": float(layer.k_scale), "shape": (1, 2), "dtype": torch.bfloat16}
        layer.steps = layer.steps + 1
        layer.table = torch.arange(4.0)
        layer.quant_method.kernel.tuned = 7
        del layer.k_scale


def process_again(model: Model) -> None:
    """What it does when it is told that the weights are processed: next to nothing."""
    for layer in (model.first, model.second):
        layer.tag = None


def config(**changes: Any) -> SimpleNamespace:
    """Settings of vLLM as far as a key is made of them; `changes` by dotted names with `__`."""
    hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": "/somewhere"})
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        quantization=None,
        revision=None,
        trust_remote_code=False,
        hf_config=hf_config,
        multimodal_config=None,
    )
    whole = SimpleNamespace(
        model_config=model,
        speculative_config=None,
        parallel_config=SimpleNamespace(enable_expert_parallel=False),
        lora_config=None,
        additional_config={},
        kernel_config=SimpleNamespace(to_dict=lambda: {"linear_backend": "auto"}),
        attention_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        at = whole
        for step in path:
            at = getattr(at, step)
        setattr(at, last, value)
    return whole
