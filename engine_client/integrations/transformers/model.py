"""`from_pretrained`: the steps from a checkpoint's folder to a model on shared weights."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.model_config import config_of
from broker.checkpoints.plan import CheckpointPlan, plan_checkpoint
from broker.errors import BindError, UsageError
from broker.quantization import check_ipc_quant_support, quantization_config_in
from engine_client.arguments import said_of
from engine_client.checkpoint import Checkpoint
from engine_client.client import EngineClient
from engine_client.integrations.transformers.classes import Chosen, choose_class
from engine_client.integrations.transformers.computed import share_computed
from engine_client.integrations.transformers.options import checked
from engine_client.integrations.transformers.same_files import (
    refuse_adapter,
    require_same_files,
    require_text,
    with_stored_dtype,
)
from engine_client.integrations.transformers.skeleton import Skeleton, build_skeleton
from engine_client.weight_set import WeightSet

_NAMES_SHOWN = 20
"""Of each list in a sentence; the error's fields hold all of them."""

_NO_PATH = str(None)
"""What the library notes as a model's path when it gets tensors in place of one."""


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    client: EngineClient,
    model_class: Any = None,
    name: str | None = None,
    guard: bool = False,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """The model of a checkpoint, on shared weights. Blocks: for the load, where nobody has loaded.

    Weights of another dtype than is stored are converted once per node, by the loader, and are a
    set of their own. The lease lasts as long as any of the model's parameters.

    Args:
        path: the checkpoint's folder.
        client: whose device the weights are on.
        model_class: a model class of the library or derived from its `PreTrainedModel`, or one of
            its Auto classes; None: the class that config.json names.
        name: makes the weights a generation of the line of that name (`weights_of(model).swap`).
        guard: name in-place operations on shared parameters before they fault; slower.
        timeout: seconds for the weights; None: as long as it takes and the broker lives.
        **kwargs: as the library's own: `dtype`, `config`, `attn_implementation`, `key_mapping`,
            `generation_config`, and whatever changes the configuration.

    Raises:
        BadRequest: path or `config` is of a type that cannot be used.
        UsageError: an option that cannot be used with shared weights, no class for this model, a
            folder of which the library would read other files, or a client that is none.
        BindError: weights are missing, or of another shape; lists all. No model is left.
        UnsupportedQuantForIPCError: sharing them could give wrong numbers.
        NotFound, LoadFailed, OverBudget, RequestTimeout, BrokerLost: as `EngineClient.acquire`.
        What the library raises about configuration and options.
    """
    options = checked(kwargs)
    if not isinstance(client, EngineClient):
        raise UsageError(f"from_pretrained: client must be an EngineClient, not {said_of(client)}")
    refuse_adapter(Path(require_text(path)))
    with open_checkpoint(path) as opened:
        if opened.only is not None:
            raise UsageError(
                f"from_pretrained: {opened.path} is one file; give the folder it is in, which has "
                "the model's config.json too"
            )
        config_file = config_of(opened)
        check_ipc_quant_support(quantization_config_in(config_file or {}), where="engine")
        plan = plan_checkpoint(opened.folder, opened.only, opened.path)
    chosen = choose_class(path, model_class, options)
    require_same_files(plan, chosen.config, Path(path))
    chosen = with_stored_dtype(chosen, plan, Path(path))
    skeleton = build_skeleton(chosen, plan.tensors)
    _require_complete(skeleton, plan.path)
    if skeleton.computed:
        names = {place: place for place in skeleton.places}
        weights = share_computed(client, chosen, skeleton, path, name=name, timeout=timeout)
    else:
        names = skeleton.names
        weights = client.acquire(_as_wanted(skeleton, plan, path, name), timeout=timeout)
    try:
        if not skeleton.computed:
            _require_equal(skeleton, weights)
        weights.bind(skeleton.model, names=names, guard=guard)
    except BaseException:
        weights.let_go()
        raise
    model = skeleton.model
    _finish(model, path, chosen)
    _weights[model] = weights
    return model


def weights_of(model: Module) -> WeightSet:
    """The shared weights that `from_pretrained` gave a model: to swap, detach or sleep.

    After a swap it is what the swap has returned that counts.

    Raises:
        UsageError: it comes from elsewhere.
    """
    weights = _weights.get(model) if isinstance(model, Module) else None
    if weights is None:
        raise UsageError(f"this {type(model).__name__} was not given by from_pretrained of ours")
    return weights


_weights: weakref.WeakKeyDictionary[Module, WeightSet] = weakref.WeakKeyDictionary()


def _require_complete(skeleton: Skeleton, path: str) -> None:
    """Raise `BindError` with everything that the checkpoint lacks or has in another shape."""
    if not skeleton.missing and not skeleton.mismatched:
        return
    shapes = [
        f"{name} (model: {shape['module']}, stored: {shape['stored']})"
        for name, shape in skeleton.mismatched.items()
    ]
    parts = [
        _listed("missing", skeleton.missing),
        _listed("of another shape", shapes),
        _listed("without a place in the model", skeleton.unexpected),
    ]
    raise BindError(
        f"checkpoint {path!r} does not fit {type(skeleton.model).__name__}: "
        f"{'; '.join(part for part in parts if part)}. The library would fill these places with "
        "random numbers. Pass the class and the configuration that the weights were saved from, or "
        "key_mapping where only names differ",
        reason="missing_parameter" if skeleton.missing else "shape_mismatch",
        missing=skeleton.missing,
        unexpected=skeleton.unexpected,
        mismatched=skeleton.mismatched,
        on_meta=[],
        tie_conflicts=[],
        prefix="",
    )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{len(names)} {what}: {shown}"


def _as_wanted(
    skeleton: Skeleton, plan: CheckpointPlan, path: str | os.PathLike[str], name: str | None
) -> Checkpoint:
    """The weights in the dtypes that the library gives them: as stored, or converted."""
    stored = {tensor.name: tensor.dtype for tensor in plan.tensors}
    wanted = {
        tensor: str(dtype).removeprefix("torch.")
        for tensor, dtype in skeleton.dtypes.items()
        if dtype.is_floating_point
    }
    if all(stored[tensor] == dtype for tensor, dtype in wanted.items()):
        return Checkpoint(path, name)
    ((most, _count),) = Counter(sorted(wanted.values())).most_common(1)
    exceptions = {tensor: dtype for tensor, dtype in wanted.items() if dtype != most}
    return Checkpoint(path, name, most, exceptions)


def _require_equal(skeleton: Skeleton, weights: WeightSet) -> None:
    """What the library has tied on our word is equal, or the model would be another one."""
    differing = [
        [one, other] for one, other in skeleton.equalities if not _is_same(weights, one, other)
    ]
    if differing:
        pairs = [f"{one} and {other}" for one, other in differing]
        raise BindError(
            f"{type(skeleton.model).__name__} ties what is stored with different bytes, or with "
            f"NaN in it: {', '.join(pairs)}; set tie_word_embeddings to false in config.json if "
            "they are meant to differ, or remove one of the two",
            reason="tie_conflict",
            missing=[],
            unexpected=[],
            mismatched={},
            on_meta=[],
            tie_conflicts=differing,
            prefix="",
        )


def _is_same(weights: WeightSet, one: str, other: str) -> bool:
    """Whether the library would find them equal. NaN is not equal to itself, also where the bytes
    are, and where the broker keeps both in one place."""
    if bool(torch.isnan(weights[one]).any()):
        return False
    first, second = (weights[name].reshape(-1).view(torch.uint8) for name in (one, other))
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def _finish(model: Any, path: str | os.PathLike[str], chosen: Chosen) -> None:
    """What the library does once the weights are there: names the path, reads how to generate."""
    model.config.name_or_path = str(path)
    for part in model.modules():
        if getattr(part, "name_or_path", None) == _NO_PATH:
            part.name_or_path = str(path)
    if model.can_generate() and chosen.options.get("generation_config") is None:
        model.generation_config = _generation_config(path, chosen.for_generation)


def _generation_config(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path, **options)
    except OSError:  # there is no such file: older checkpoints keep it in config.json
        return GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True, **options
        )
