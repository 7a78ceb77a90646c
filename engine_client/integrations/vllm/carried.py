"""What is published beside a model's tensors, and how another engine's model gets it.

It travels as buffers of a module that is put into the model for as long as it is published or
bound: one of bytes (JSON), and one for each tensor that vLLM keeps as a plain attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from broker.errors import Mismatch, UnsupportedQuantForIPCError
from engine_client.integrations.vllm.observed import Changes, attributes_of
from engine_client.integrations.vllm.options import Stage
from engine_client.integrations.vllm.plain import decode

NAME = "weight_broker_carried"
"""Of the module; no model of vLLM has a submodule of this name."""

_STATE = "state"
_NAMES_SHOWN = 5


class _Layout(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass
class Carried:
    """What one engine tells the others of its model.

    Attributes:
        plain, removed: as `Changes` has them.
        tensors: [owner, name, whether it is kept in host memory], in the order of the buffers.
        classes: of parameters that are not plain ones, by name.
        empty: names under which a module has None for a parameter.
    """

    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)
    tensors: list[tuple[str, str, bool]] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)


def carry(
    model: Module, changes: Changes, rebuilt: Mapping[str, tuple[str, ...]], stage: Stage
) -> tuple[Carried, list[Tensor]]:
    """Sort changes into what is carried and what cannot be.

    Args:
        rebuilt: by module path the attributes that need not be carried.

    Raises:
        UnsupportedQuantForIPCError: names what is neither plain data nor a tensor.
    """
    refused = [
        f"{_shown(path)}.{name} ({what})"
        for (path, name), what in changes.opaque.items()
        if not _is_rebuilt(path, name, rebuilt)
    ]
    if refused:
        raise _refusal(refused, stage)
    told = [key for key in changes.tensors if not _is_rebuilt(*key, rebuilt)]
    carried = Carried(changes.plain, changes.removed)
    carried.tensors = [(*key, changes.tensors[key].device.type == "cpu") for key in told]
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001 - with those that are None
            full = f"{path}.{name}".lstrip(".")
            if parameter is None:
                carried.empty.append(full)
            elif type(parameter) is not Parameter:
                carried.classes[full] = class_name(parameter)
    return carried, [changes.tensors[key] for key in told]


def class_name(parameter: Tensor) -> str:
    kind = type(parameter)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_rebuilt(path: str, name: str, rebuilt: Mapping[str, tuple[str, ...]]) -> bool:
    return name in rebuilt.get(path.partition(":")[0], ())


def _refusal(refused: list[str], stage: Stage) -> UnsupportedQuantForIPCError:
    more = f" and {len(refused) - _NAMES_SHOWN} more" if len(refused) > _NAMES_SHOWN else ""
    instead = "use stage loaded, or " if stage == "processed" else ""
    return UnsupportedQuantForIPCError(
        "[weight-broker:engine] vLLM left on its modules what cannot be carried to another engine: "
        f"{', '.join(refused[:_NAMES_SHOWN])}{more}; only plain data and tensors can; "
        f"{instead}load this model the ordinary way (--load-format auto)",
        where="engine",
        method="attributes",
        attributes=refused,
    )


# --- with the model's tensors ------------------------------------------------------------------


@contextmanager
def published_with(model: Module, carried: Carried, tensors: list[Tensor]) -> Iterator[None]:
    """The model has what is carried as buffers, for as long as it is being published."""
    state = msgspec.json.encode(carried)
    with _child(model) as child:
        child.register_buffer(_STATE, torch.frombuffer(bytearray(state), dtype=torch.uint8))
        for number, tensor in enumerate(tensors):
            child.register_buffer(f"tensor{number}", tensor.detach())
        yield


@contextmanager
def bound_with(model: Module, layouts: Mapping[str, _Layout]) -> Iterator[Module]:
    """The model has places for what is carried, for as long as it is being bound."""
    with _child(model) as child:
        for name, layout in layouts.items():
            if name.startswith(f"{NAME}."):
                empty = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
                child.register_buffer(name.removeprefix(f"{NAME}."), empty)
        yield child


@contextmanager
def _child(model: Module) -> Iterator[Module]:
    child = Module()
    model.add_module(NAME, child)
    try:
        yield child
    finally:
        del model._modules[NAME]  # noqa: SLF001 - delattr does no more


def state_of(memory: bytes) -> Carried:
    """Read what `published_with` wrote.

    Raises:
        Mismatch: it did not.
    """
    try:
        carried = msgspec.json.decode(memory, type=Carried)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Mismatch(f"this set has not what vLLM's plugin publishes: {error}") from error
    odd = sorted(name for name in _names_in(carried) if name.startswith("__"))
    if odd:
        raise Mismatch(f"this set has attributes that no vLLM publishes: {', '.join(odd)}")
    return carried


def _names_in(carried: Carried) -> set[str]:
    """Every attribute's name, and every name on the way to one."""
    owned = [*carried.plain.items(), *carried.removed.items()]
    told = {(owner, name) for owner, names in owned for name in names}
    told |= {(owner, name) for owner, name, _ in carried.tensors}
    return {part for owner, name in told for part in (*re.split("[.:]", owner), name)}


# --- on another model --------------------------------------------------------------------------


def apply(model: Module, carried: Carried, tensors: list[Tensor]) -> None:
    """Give a model the attributes that the publisher's had. Again if its processing ran since.

    Args:
        tensors: private ones, in the order of `carried.tensors`.

    Raises:
        Mismatch: this model has no such owner.
    """
    for path, values in carried.plain.items():
        owner = _owner(model, path)
        for name, value in values.items():
            setattr(owner, name, decode(value))
    for (path, name, in_host_memory), tensor in zip(carried.tensors, tensors, strict=True):
        setattr(_owner(model, path), name, tensor.cpu() if in_host_memory else tensor)
    for path, names in carried.removed.items():
        owner = _owner(model, path)
        for name in set(names) & set(attributes_of(owner)):
            delattr(owner, name)


def _owner(model: Module, path: str) -> Any:
    """The owner of a path of `observed.owners`."""
    module, colon, inner = path.partition(":")
    try:
        owner: Any = model.get_submodule(module)
        for name in inner.split(".") if colon else ():
            owner = getattr(owner, name)
    except AttributeError as error:
        raise Mismatch(
            f"the engine that published had {_shown(path)}, this one has not: both must run the "
            "same model code"
        ) from error
    return owner


def _shown(path: str) -> str:
    """As a person would write it."""
    return path.replace(":", ".").strip(".") or "the model"
