"""Small modules for the binding tests, and what is asked of them again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TiedModel(nn.Module):
    """Embedding and head of one Parameter, a norm, a persistent and a non-persistent buffer."""

    steps: Tensor
    angles: Tensor

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.embed(ids)) + self.angles
        logits: Tensor = self.head(hidden)
        return logits


class LoadedParameter(nn.Parameter):
    """As engines have them: a Parameter that knows how it is loaded."""

    weight_loader: Any


class StubbornModule(nn.Module):
    """Refuses to have its weight replaced once it has one that is not on meta."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(2, 2)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(getattr(self, "first", None), nn.Module):
            held = self.__dict__["_parameters"]["weight"]
            if held.untyped_storage().data_ptr() != self.__dict__.get("accepted"):
                raise RuntimeError("this weight is mine")
        super().__setattr__(name, value)


def stored(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of this module holds; tied names share a storage."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def snapshot(module: nn.Module) -> dict[str, tuple[int, Any]]:
    """Which objects a module holds under which names, and their values where they have any."""
    held: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    held += module.named_buffers(remove_duplicate=False)
    return {name: (id(t), None if t.is_meta else t.tolist()) for name, t in held}
