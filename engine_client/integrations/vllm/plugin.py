"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

from engine_client.integrations.vllm.options import LOAD_FORMAT


def register() -> None:
    """Make the load format known. Connects to nothing."""
    from vllm.model_executor.model_loader import register_model_loader

    from engine_client.integrations.vllm.loader import WeightBrokerLoader

    register_model_loader(LOAD_FORMAT)(WeightBrokerLoader)
