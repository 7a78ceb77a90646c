"""Modules and mappings as Hypothesis draws them: ties, views, odd strides, every dtype."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Module, Parameter

from broker.weights import ITEM_BYTES
from tests.engine_client.slabs import random_tensor

TRAINABLE = ("bfloat16", "float32")
_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
_KINDS = ("parameter", "buffer", "private buffer", "module", "second path", "tie", "none")


@st.composite
def tensors(draw: st.DrawFn, pool: list[Any]) -> Tensor:
    """A tensor with storage of its own, or over the storage of one in the pool, which it joins."""
    is_view: bool = draw(st.booleans())
    if pool and is_view:
        tensor: Tensor = draw(st.sampled_from(pool))
    else:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        tensor = random_tensor(dtype, *shape, seed=draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 2)) if tensor.dim() else 0):
        how = draw(st.sampled_from(["transpose", "slice", "expand", "narrow"]))
        if how == "transpose":
            tensor = tensor.transpose(0, -1)
        elif how == "slice":
            tensor = tensor[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
        elif how == "expand":
            tensor = tensor.unsqueeze(1).expand(-1, 3, *[-1] * (tensor.dim() - 1))
        elif tensor.shape[-1]:
            tensor = tensor.narrow(-1, tensor.shape[-1] - 1, 1)
    pool.append(tensor)
    return tensor


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Tensor]:
    """Up to eight names, dots and all."""
    pool: list[Tensor] = []
    names = draw(st.lists(_NAMES, max_size=8, unique=True))
    return {name: draw(tensors(pool)) for name in names}


@st.composite
def modules(draw: st.DrawFn) -> Module:
    """A tree of modules; some are there twice, some parameters are tied or over one storage."""
    root = Module()
    parts, pool = [root], [random_tensor("float32", 3, 4)]
    parameters: list[Parameter] = []
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(parts) - 1))
        at, key = parts[number], draw(_NAMES)
        if "." in key or hasattr(at, key):
            continue
        kind = draw(st.sampled_from(_KINDS))
        if kind == "module":
            parts.append(Module())
            at.add_module(key, parts[-1])
        elif kind == "second path" and number + 1 < len(parts):
            at.add_module(key, parts[draw(st.integers(number + 1, len(parts) - 1))])
        elif kind == "tie" and parameters:
            at.register_parameter(key, draw(st.sampled_from(parameters)))
        elif kind == "none":
            at.register_parameter(key, None)
        elif kind in ("buffer", "private buffer"):
            at.register_buffer(key, draw(tensors(pool)), persistent=kind == "buffer")
        else:
            tensor = draw(tensors(pool))
            trainable = str(tensor.dtype).removeprefix("torch.") in TRAINABLE
            parameters.append(Parameter(tensor, requires_grad=trainable and draw(st.booleans())))
            at.register_parameter(key, parameters[-1])
    return root


def named_tensors(module: Module) -> dict[str, Tensor]:
    """Everything that is to be published, under every name it has."""
    found = dict(module.named_parameters(remove_duplicate=False))
    return {**found, **dict(module.named_buffers(remove_duplicate=False))}


def kinds(module: Module) -> dict[str, str]:
    """For each name what it is, by what torch's own state dict has and has not."""
    found = dict.fromkeys(dict(module.named_parameters(remove_duplicate=False)), "parameter")
    state = module.state_dict()
    for name, _buffer in module.named_buffers(remove_duplicate=False):
        found[name] = "buffer" if name in state else "non-persistent-buffer"
    return found
