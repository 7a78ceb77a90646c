"""vLLM's model loader for `--load-format weight_broker`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.nn import Module
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from broker.errors import BrokerError, UsageError
from engine_client.client import EngineClient
from engine_client.integrations.vllm import runtime
from engine_client.integrations.vllm.connection import client_for
from engine_client.integrations.vllm.fallback import count_fallback
from engine_client.integrations.vllm.loading import Load
from engine_client.integrations.vllm.options import parse_options

# Under vLLM's own name, so that its configuration of logging applies.
logger = init_logger("vllm.weight_broker")

T = TypeVar("T")


class WeightBrokerLoader(BaseModelLoader):  # type: ignore[misc] # vLLM has no types here
    """Maps weights from the node's broker; the first engine publishes them.

    Raises:
        UsageError: an option in `--model-loader-extra-config` is of no use.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._options = parse_options(load_config.model_loader_extra_config or {})

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Module:
        """The model, ready to run. Blocks: for another engine's weights, or its own loading.

        Raises:
            BrokerError: it cannot be shared; only without `fallback`.
        """
        begun: list[Load] = []

        def share(client: EngineClient) -> Module:
            begun.append(self._load(vllm_config, model_config, prefix))
            return begun[0].share(client)

        def alone() -> Module:
            if begun:
                return begun[0].alone()
            return runtime.load_ordinarily(vllm_config, model_config, self.load_config, prefix)

        return self._with_broker(share, alone, "loading without the broker")

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes of this rank's weights that the broker holds, for the size of the KV cache.

        0 for what this engine is going to hold itself: private copies, and weights that nobody has
        published yet, whose memory vLLM sees appear while it loads.

        Raises:
            BrokerError: as `load_model`, which comes next.
        """
        if self._options.mode == "copy":
            return 0
        configs = [vllm_config.model_config, runtime.draft_config(vllm_config)]

        def held(client: EngineClient) -> int:
            loads = [self._load(vllm_config, config) for config in configs if config is not None]
            return sum(load.held_nbytes(client) for load in loads)

        return self._with_broker(held, lambda: 0, "sizing the KV cache without its weights")

    def _load(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Load:
        given = (vllm_config, model_config, self.load_config)
        return Load(self._options, *given, logger, prefix)

    def _with_broker(
        self, shared: Callable[[EngineClient], T], alone: Callable[[], T], instead: str
    ) -> T:
        try:
            device = runtime.broker_device(self._options)
            return shared(client_for(self._options, device, logger))
        except BrokerError as error:
            if not self._options.fallback:
                raise
            count_fallback(logger, error, instead)
        return alone()

    def download_model(self, model_config: Any) -> None:
        """Have the weight files here, as vLLM's own loader."""
        runtime.ordinary_loader(self.load_config).download_model(model_config)

    def load_weights(self, model: Module, model_config: Any) -> None:  # noqa: ARG002 - vLLM's
        """Refused: weights that others map are not overwritten.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "load format weight_broker cannot load weights into a model that runs: they are shared "
            "and read-only; start the engine again, or use --load-format auto for an engine whose "
            "weights are to change"
        )
