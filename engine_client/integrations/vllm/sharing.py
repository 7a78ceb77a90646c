"""Between a model and the broker: find, publish, bind. Knows nothing of vLLM's loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Module

from broker import wire
from broker.errors import Mismatch, NotFound
from broker.weights import WeightKey
from engine_client.client import EngineClient
from engine_client.integrations.vllm.carried import NAME, Carried, bound_with, state_of
from engine_client.integrations.vllm.structure import Layouts
from engine_client.weight_set import WeightSet

_STATE = f"{NAME}.state"


def find_published(client: EngineClient, key: WeightKey, files: str) -> WeightSet | None:
    """The resident set that was published from these very files, if there is one.

    Args:
        key: without a checkpoint's identity.
        files: the name of the files.
    """
    try:
        return client.acquire(msgspec.structs.replace(key, name=files))
    except NotFound:
        return None
    except Mismatch:
        return None  # of these files, but another rank's, or made with other settings


def resident_nbytes(
    client: EngineClient, key: WeightKey, files: str, identity: Callable[[], str]
) -> int:
    """Bytes that the broker holds for this key on the client's device, 0 if it is not resident.

    Maps nothing.

    Args:
        key, files: as for `find_published`.
        identity: says whose content the files are; only asked if that matters.
    """
    same = [entry for entry in client.status()["sets"] if _is_of(entry, key, client.device_uuid)]
    meant = [entry for entry in same if files in entry["names"]]
    if same and not meant:
        checkpoint = identity()
        meant = [entry for entry in same if entry["key"]["checkpoint"] == checkpoint]
    return sum(int(entry["nbytes"]) for entry in meant[:1])


def _is_of(entry: Mapping[str, Any], key: WeightKey, device: str) -> bool:
    """Whether a set as `status` lists it is resident and differs from a key in content at most."""
    has = entry["key"]
    return (
        entry["state"] in ("sealed", "draining")
        and has["device"] == device
        and (has["layout"], has["format"], has["quantization"])
        == (key.layout, key.format, key.quantization)
    )


def publish_or_wait(
    client: EngineClient,
    key: WeightKey,
    files: str,
    build: Callable[[], Module],
    metadata: Mapping[str, Any],
    timeout: float | None,
    progress: Callable[[wire.Progress], None],
) -> WeightSet:
    """The set of this key: somebody's, or what `build` makes here.

    Whoever published it: from now on it has the name of these files, too.

    Args:
        key: with the checkpoint's identity.

    Raises:
        What `get_or_publish` and `build` raise.
    """
    return client.get_or_publish(
        msgspec.structs.replace(key, name=files),
        build,
        metadata=metadata,
        timeout=timeout,
        progress=progress,
    )


def carried_by(weights: WeightSet) -> Carried:
    """What the publisher told the others of its model.

    Raises:
        Mismatch: this set is not one of this plugin's.
    """
    try:
        state = weights[_STATE]
    except KeyError:
        raise Mismatch(
            f"set {weights.set_id} was not published by vLLM's plugin: evict it"
        ) from None
    return state_of(bytes(state.tolist()))


def bind(model: Module, weights: WeightSet, layouts: Layouts, carried: Carried) -> list[Tensor]:
    """Make a model's parameters views of the shared ones, and its buffers private copies.

    Returns:
        Private copies of the tensors that are carried beside them.

    Raises:
        BindError: they do not fit; the model is as it was.
    """
    with buffers_stay(model), bound_with(model, layouts) as child:
        weights.bind(model)
        return [child.get_buffer(f"tensor{number}") for number in range(len(carried.tensors))]


@contextmanager
def buffers_stay(model: Module) -> Iterator[None]:
    """Buffers that vLLM keeps on another device than the weights are there afterwards, too."""
    elsewhere = [
        (module._buffers, name, buffer.device)  # noqa: SLF001 - setattr would do more
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001
        if buffer is not None
    ]
    yield
    for entries, name, device in elsewhere:
        buffer = entries.get(name)
        if buffer is not None and buffer.device != device:
            entries[name] = buffer.to(device)


def make_private(modules: list[Module]) -> None:
    """Give the modules' own parameters private, writable copies; each stays the same object."""
    for module in modules:
        for parameter in module._parameters.values():  # noqa: SLF001 - without its submodules'
            if parameter is not None:
                parameter.data = torch.clone(parameter.data)
