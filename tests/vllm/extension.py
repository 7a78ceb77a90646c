"""Imported by vLLM into every worker (`worker_extension_cls`): times loading; may unpack the CPU.

With `UNPACKED` in the environment the CPU build computes with plain weights, as vLLM does on a GPU,
so that stage "processed" can run from end to end on a machine without one.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.model_executor import model_loader
from vllm.model_executor.layers import utils as layers

from engine_client.integrations.vllm.allowlist import Rule, register_vllm_class
from tests.vllm.extension_names import TIMES, UNPACKED


class Extension:
    """Adds nothing to the worker."""


def _time_loading() -> None:
    original = model_loader.get_model_loader

    def get_model_loader(load_config: Any) -> Any:
        loader = original(load_config)
        load = loader.load_model

        def load_model(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            model = load(*given, **named)
            took = {"seconds": time.perf_counter() - began}
            Path(os.environ[TIMES], f"{os.getpid()}.json").write_text(json.dumps(took))
            return model

        loader.load_model = load_model
        return loader

    model_loader.get_model_loader = get_model_loader


def _unpack() -> None:
    def nothing(layer: Any, remove_weight: bool) -> None:
        """Leave the weight as it is."""

    layers.dispatch_cpu_unquantized_gemm = nothing
    layers.cpu_unquantized_gemm = layers.default_unquantized_gemm
    for name in (
        "linear.UnquantizedLinearMethod",
        "vocab_parallel_embedding.UnquantizedEmbeddingMethod",
    ):
        register_vllm_class(f"vllm.model_executor.layers.{name}", Rule())


_time_loading()
if os.environ.get(UNPACKED):
    _unpack()
