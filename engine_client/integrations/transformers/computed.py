"""Weights that the library computes from what is stored: merged experts, fused or turned matrices.

No loader of the broker runs the library's code, so the first engine loads them as the library does
and publishes the result; the others wait for it and map it. Equal keys mean equal bytes, so the key
carries everything the result depends on: the files as the kernel describes them, class,
configuration, options, conversions and code that is not the library's, the layout of the result,
and the versions of library and torch.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.errors import LoadFailed
from broker.weights import WeightKey
from broker.wire import FileStamp
from engine_client.client import EngineClient
from engine_client.integrations.transformers.classes import Chosen
from engine_client.integrations.transformers.code import digest_of_code
from engine_client.integrations.transformers.skeleton import Skeleton, building
from engine_client.weight_set import WeightSet


def share_computed(
    client: EngineClient,
    chosen: Chosen,
    skeleton: Skeleton,
    path: str | os.PathLike[str],
    *,
    name: str | None,
    timeout: float | None,
) -> WeightSet:
    """The model's weights under the model's own names. Blocks: somebody may have to compute them.

    A copy of the checkpoint in another folder is another key: contents are not compared.

    Raises:
        LoadFailed: the files changed while they were read; or the engine that computes them failed.
        OverBudget, RequestTimeout, BrokerLost.
        What the library raises, in the engine that computes.
    """
    stamps = _stamps(path)

    def compute() -> dict[str, Tensor]:
        with building, torch.device("cpu"):
            model = chosen.model_class.from_pretrained(
                path, config=chosen.config, trust_remote_code=False, **chosen.options
            )
        if _stamps(path) != stamps:
            raise LoadFailed(
                f"{path} was changed while it was loaded; ask again",
                reason="changed",
                file=str(path),
            )
        state: dict[str, Tensor] = model.state_dict()
        return {place: state[place] for place in skeleton.places}

    key = _key(chosen, skeleton, stamps, name)
    return client.get_or_publish(key, compute, timeout=timeout)


def _stamps(path: str | os.PathLike[str]) -> list[FileStamp]:
    with open_checkpoint(path) as opened:
        return describe_source(opened).files


def _key(
    chosen: Chosen, skeleton: Skeleton, stamps: list[FileStamp], name: str | None
) -> WeightKey:
    import transformers

    recipe: list[Any] = [
        stamps,
        f"{chosen.model_class.__module__}.{chosen.model_class.__qualname__}",
        chosen.config.to_json_string(use_diff=False),
        sorted((option, repr(value)) for option, value in chosen.options.items()),
        digest_of_code(skeleton.model, chosen.options.get("key_mapping")),
        _layout(skeleton),
        [transformers.__version__, str(torch.__version__)],
    ]
    digest = blake3(msgspec.msgpack.encode(recipe)).hexdigest()
    return WeightKey(
        device="",
        name=name or "",
        checkpoint=f"computed:{digest}",
        format=f"transformers-{transformers.__version__}",
    )


def _layout(skeleton: Skeleton) -> list[tuple[str, str, list[int]]]:
    state = skeleton.model.state_dict()
    return [(name, str(state[name].dtype), list(state[name].shape)) for name in skeleton.places]
