"""One load of one model on one rank: share if possible, step by step.

What happens when, for the two stages and the two roles:

              builder (nobody has published)        everybody else
    loaded    create, load, publish, process        create on meta, bind, process
    processed create, load, process, publish        create on meta, bind, process again

After publishing a builder runs on the shared copy as everybody else does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.nn import Module

from broker import wire
from broker.errors import Mismatch, UsageError
from engine_client.binding import binding_of
from engine_client.client import EngineClient
from engine_client.construction import parameters_on_meta
from engine_client.integrations.vllm import runtime, sharing
from engine_client.integrations.vllm.allowlist import (
    check_classes,
    rebuilt_attributes,
    writing_modules,
)
from engine_client.integrations.vllm.carried import Carried, apply, carry, published_with
from engine_client.integrations.vllm.files import Files, content_identity, require_unchanged
from engine_client.integrations.vllm.key import METADATA, require_same, summary, weight_key
from engine_client.integrations.vllm.observed import Observation, meta_tensors
from engine_client.integrations.vllm.options import Options
from engine_client.integrations.vllm.settings import quantization_of, settings_of
from engine_client.integrations.vllm.structure import (
    adopt_structure,
    layouts_of,
    require_structure,
)
from engine_client.publishing import rebind
from engine_client.weight_set import WeightSet

_MOST_THREADS = 8
"""That one rank takes to read a checkpoint for its identity; other ranks want cores too."""

_identities: dict[Files, str] = {}
"""Of files that this process has read."""


class Load:
    """One model's way into this process. Used once, by one thread; every step blocks."""

    def __init__(
        self,
        options: Options,
        vllm_config: Any,
        model_config: Any,
        load_config: Any,
        logger: logging.Logger,
        prefix: str = "",
    ) -> None:
        self._options = options
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._load_config = load_config
        self._prefix = prefix
        self._logger = logger
        self._known = runtime.known_layers(vllm_config)
        self._settings = settings_of(
            vllm_config, model_config, runtime.surroundings(), options.stage
        )
        self._built: Module | None = None
        self._is_loaded = self._is_processed = False

    # --- with the broker ------------------------------------------------------------------------

    def share(self, client: EngineClient) -> Module:
        """The model on the broker's weights, published by this engine if by nobody else.

        Raises:
            BrokerError: it cannot be shared, or the broker failed.
        """
        began = time.perf_counter()
        runtime.require_suitable(self._vllm_config, self._options)
        with runtime.default_dtype(self._model_config):
            weights = self._weights(client)
            model = self._built
            if model is None:
                model = self._build_on(weights)
            else:
                self._go_on(model, weights)
        runtime.tidy()
        self._logger.info(
            "weight broker: %s as set %d (%s, %.1f MB, mode %s, stage %s) in %.2f s",
            "published" if self._built is not None else "mapped",
            weights.set_id,
            weights.how,
            weights.nbytes / 1e6,
            self._options.mode,
            self._options.stage,
            time.perf_counter() - began,
        )
        return model.eval()

    def held_nbytes(self, client: EngineClient) -> int:
        """Bytes of this model that the broker holds on this device now."""
        files = self._files()
        return sharing.resident_nbytes(
            client, self._key(), files.name, lambda: self._identity(files)
        )

    def _weights(self, client: EngineClient) -> WeightSet:
        files = self._files()
        found = sharing.find_published(client, self._key(), files.name)
        if found is not None:
            return found
        metadata = {METADATA: summary(self._settings), "model": self._model_config.model}
        with ExitStack() as published:
            weights = sharing.publish_or_wait(
                client,
                self._key(self._identity(files)),
                files.name,
                lambda: self._build(files, published),
                metadata,
                self._options.timeout,
                self._progress(),
            )
            if self._built is not None and binding_of(self._built) is None:
                rebind(self._built, weights)  # built here, and another engine was first to publish
        return weights

    def _files(self) -> Files:
        if self._model_config.model_weights:
            raise UsageError("weights in an object store cannot be shared: no file says whose")
        return runtime.find_files(self._model_config, self._load_config)

    def _key(self, checkpoint: str = "") -> Any:
        return weight_key(self._settings, quantization_of(self._model_config), checkpoint)

    def _identity(self, files: Files) -> str:
        """Reads every byte the first time."""
        if files not in _identities:
            began = time.perf_counter()
            self._logger.info("weight broker: reading %s once for its identity", files.path)
            ranks = runtime.local_ranks(self._vllm_config)
            threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
            _identities[files] = content_identity(files, threads, lambda _done, _total: None)
            self._logger.info(
                "weight broker: that took %.2f s, it is %s",
                time.perf_counter() - began,
                _identities[files],
            )
        return _identities[files]

    # --- as builder -----------------------------------------------------------------------------

    def _build(self, files: Files, published: ExitStack) -> Module:
        """Load as vLLM does, up to the stage that is shared.

        Args:
            published: what has to be undone once the model is published, or was not.
        """
        stage = self._options.stage
        model = self._built = runtime.create(self._vllm_config, self._model_config, self._prefix)
        self._check(model)
        before = Observation(model)
        self._load(model)
        require_unchanged(files)
        if stage == "processed":
            self._process(model)
        rebuilt = rebuilt_attributes(model) if stage == "processed" else {}
        carried, tensors = carry(model, before.changes(model), rebuilt, stage)
        published.enter_context(sharing.buffers_stay(model))
        published.enter_context(published_with(model, carried, tensors))
        return model

    def _check(self, model: Module) -> None:
        runtime.require_one_source(model)
        check_classes(model, self._options.stage, runtime.platform())

    def _load(self, model: Module) -> None:
        runtime.ordinary_loader(self._load_config).load_weights(model, self._model_config)
        runtime.tidy()
        self._is_loaded = True

    def _process(self, model: Module) -> None:
        runtime.process(model, self._model_config, self._vllm_config)
        self._is_processed = True

    def _go_on(self, model: Module, weights: WeightSet) -> None:
        """From the published model to one that runs."""
        self._keep(model, weights)
        if not self._is_processed:
            self._process(model)

    # --- on another engine's weights ------------------------------------------------------------

    def _build_on(self, weights: WeightSet) -> Module:
        layouts = layouts_of(weights.manifest)
        carried = sharing.carried_by(weights)
        require_same(summary(self._settings), weights.metadata)
        with parameters_on_meta(same_objects=True):
            model = runtime.create(self._vllm_config, self._model_config, self._prefix)
        self._check(model)
        is_processed = self._options.stage == "processed"
        if is_processed:
            adopt_structure(model, layouts, carried, runtime.torch_device(self._vllm_config))
        tensors = sharing.bind(model, weights, layouts, carried)
        self._keep(model, weights)
        apply(model, carried, tensors)
        if is_processed:
            runtime.process_again(model, self._model_config, self._vllm_config)
            self._finish(model, weights, carried, tensors)
        else:
            runtime.process(model, self._model_config, self._vllm_config)
        _require_values(model)
        return model

    def _finish(
        self, model: Module, weights: WeightSet, carried: Carried, tensors: list[Tensor]
    ) -> None:
        """What vLLM made around processed weights must be what the publisher has."""
        apply(model, carried, tensors)
        require_structure(model, layouts_of(weights.manifest))

    def _keep(self, model: Module, weights: WeightSet) -> None:
        """Make private what has to be, and hold the lease as long as the model lives."""
        if self._options.mode == "copy":
            weights.detach(model)
            weights.let_go()
            return
        if self._options.stage == "loaded":
            sharing.make_private(writing_modules(model))
        model.__dict__["_weight_broker_lease"] = weights

    # --- without the broker ---------------------------------------------------------------------

    def alone(self) -> Module:
        """The same model, private: what was begun here is brought to its end."""
        model = self._built
        if model is None:
            runtime.forget_layers(self._vllm_config, self._known)
            return runtime.load_ordinarily(
                self._vllm_config, self._model_config, self._load_config, self._prefix
            )
        binding = binding_of(model)
        if binding is not None:
            binding.detach()
        with runtime.default_dtype(self._model_config):
            if not self._is_loaded:
                self._load(model)
            if not self._is_processed:
                self._process(model)
        return model.eval()

    def _progress(self) -> Callable[[wire.Progress], None]:
        """Tells the log what the engine that builds reports, when that is something new."""
        told = ""

        def show(progress: wire.Progress) -> None:
            nonlocal told
            if progress.stage != told:
                told = progress.stage
                self._logger.info("weight broker: waiting for another engine: %s", told)

        return show


def _require_values(model: Module) -> None:
    left = meta_tensors(model)
    if left:
        raise Mismatch(
            f"these tensors have no values, the publishing engine had none for them: {left[:5]}"
        )
