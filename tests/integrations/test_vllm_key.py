"""Keys: everything that weights depend on is in them, and nothing that they do not depend on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from broker.errors import Mismatch, UsageError
from broker.weights import MAX_METADATA_BYTES, WeightKey
from engine_client.integrations.vllm.key import METADATA, require_same, summary, weight_key
from engine_client.integrations.vllm.options import Stage
from engine_client.integrations.vllm.plain import as_text
from engine_client.integrations.vllm.settings import Surroundings, role_of, settings_of
from tests.integrations.vllm_toys import config

AROUND: dict[str, Any] = {
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "layout": {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1},
    "device": {"platform": "cuda", "capability": [9, 0]},
    "environment": {"VLLM_USE_DEEP_GEMM": True, "VLLM_DP_RANK": 0},
}


def settings(stage: Stage = "processed", around: Any = None, **changes: Any) -> dict[str, Any]:
    whole = config(**changes)
    return settings_of(
        whole, whole.model_config, Surroundings(**{**AROUND, **(around or {})}), stage
    )


def key(stage: Stage = "processed", around: Any = None, **changes: Any) -> WeightKey:
    return weight_key(settings(stage, around, **changes), "", "blake3:00")


def test_two_engines_with_equal_settings_have_one_key() -> None:
    """Made twice from configurations of their own."""
    assert key() == key()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__dtype": torch.float16},
        {"model_config__quantization": "fp8"},
        {"model_config__revision": "main"},
        {"model_config__trust_remote_code": True},
        {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 16})},
        {"model_config__multimodal_config": SimpleNamespace(mm_encoder_only=True)},
        {"parallel_config__enable_expert_parallel": True},
        {"lora_config": object()},
        {"additional_config": {"of": "a plugin"}},
        {"kernel_config": SimpleNamespace(to_dict=lambda: {"linear_backend": "cutlass"})},
        {"cache_config__cache_dtype": "fp8"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_setting_of_vllm_is_another_key(changes: dict[str, Any]) -> None:
    """Whatever processing may depend on."""
    assert key(**changes).format != key().format


@pytest.mark.parametrize(
    "around",
    [
        {"vllm": "0.32.1"},
        {"torch": "2.13.1"},
        {"layout": {"tp_rank": 1, "tp_size": 2}},
        {"layout": {"tp_rank": 0, "tp_size": 4}},
        {"device": {"platform": "cuda", "capability": [10, 0]}},
        {"environment": {"VLLM_USE_DEEP_GEMM": False, "VLLM_DP_RANK": 0}},
    ],
    ids=lambda around: next(iter(around)),
)
def test_other_surroundings_are_another_key(around: dict[str, Any]) -> None:
    """Versions, ranks, the device, and variables that choose kernels."""
    assert key(around=around).format != key().format


def test_stage_and_role_are_another_key() -> None:
    """Tensors as loaded are not tensors as processed, a draft is not its target."""
    whole = config()
    whole.speculative_config = SimpleNamespace(draft_model_config=whole.model_config)
    assert role_of(whole, whole.model_config) == "draft"
    assert role_of(whole, config().model_config) == "target"
    draft = settings_of(whole, whole.model_config, Surroundings(**AROUND), "processed")
    formats = {key().format, key("loaded").format, weight_key(draft, "").format}
    assert len(formats) == 3


def test_kernels_do_not_matter_to_weights_as_loaded() -> None:
    """In that stage nothing has been processed, so engines that differ there share."""
    kernels = SimpleNamespace(to_dict=lambda: {"linear_backend": "cutlass"})
    environment = {"environment": {"VLLM_USE_DEEP_GEMM": False}}
    assert key("loaded", environment, kernel_config=kernels) == key("loaded")


def test_what_belongs_to_one_engine_is_in_no_key() -> None:
    """Where the model was found, and variables that say where an engine runs."""
    moved = SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": "/elsewhere"})
    environment = {"VLLM_USE_DEEP_GEMM": True, "VLLM_DP_RANK": 3, "VLLM_CPU_OMP_THREADS_BIND": "1"}
    assert key(around={"environment": environment}, model_config__hf_config=moved) == key()


def test_a_key_says_the_main_things_in_words() -> None:
    """For whoever reads `weight-broker status`."""
    made = weight_key(settings(), "fp8", "blake3:00")
    assert made.format.startswith("vllm-0.32.0-processed-target-")
    assert made.layout == {"tp_rank": 0, "tp_size": 2}
    assert (made.quantization, made.checkpoint) == ("fp8", "blake3:00")


def test_a_setting_that_no_key_can_hold_is_refused() -> None:
    """Rather than left out: weights may depend on it."""
    with pytest.raises(UsageError, match=r"vLLM's setting kernels holds a builtins\.object"):
        settings(kernel_config=object())


def test_the_summary_stays_small() -> None:
    """Long settings become digests, which still differ when they do."""
    long = SimpleNamespace(to_dict=lambda: {"ignore": [f"layer {n}" for n in range(20_000)]})
    other = SimpleNamespace(to_dict=lambda: {"ignore": [f"layer {n}" for n in range(20_001)]})
    one, two = (summary(settings(model_config__hf_config=found)) for found in (long, other))
    assert len(as_text(one)) < MAX_METADATA_BYTES / 2
    assert one["config"] != two["config"]


def test_a_set_of_other_settings_is_refused_by_name() -> None:
    """Should a key ever lie, its metadata tells."""
    ours = summary(settings())
    require_same(ours, {METADATA: summary(settings())})
    theirs = {METADATA: summary(settings(around={"torch": "2.14.0"}))}
    with pytest.raises(Mismatch, match="torch differ") as refusal:
        require_same(ours, theirs)
    assert refusal.value.differing["torch"] == {"wanted": "2.13.0", "resident": "2.14.0"}
    with pytest.raises(Mismatch, match="differ; evict them"):
        require_same(ours, {})
