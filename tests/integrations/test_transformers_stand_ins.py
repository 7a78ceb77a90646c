"""Stand-ins for a checkpoint's tensors: what the library may do with them, and what stays known."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from broker.errors import UsageError
from engine_client.integrations.transformers.stand_in import Origin, StandIn

HUGE = (1 << 20, 1 << 20)
"""A tensor of four terabytes: what takes memory of its own cannot stay unseen."""


def stand_in(
    name: str = "w",
    shape: tuple[int, ...] = HUGE,
    dtype: torch.dtype = torch.float32,
    equalities: list[tuple[str, str]] | None = None,
) -> StandIn:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return StandIn(like, Origin(name), [] if equalities is None else equalities)


def stored_name(tensor: Tensor) -> str:
    assert type(tensor) is StandIn
    return tensor.origin.stored


def test_what_the_library_does_to_every_tensor() -> None:
    """Taken whole, moved, cast and made a Parameter, it still says which stored tensor it is."""
    tensor = stand_in()
    moved = tensor[...].to(device="cpu", dtype=torch.bfloat16)
    parameter = nn.Parameter(moved)
    assert stored_name(parameter) == "w"
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert (parameter.dtype, parameter.shape) == (torch.bfloat16, HUGE)
    assert parameter.device.type == "cpu"
    assert repr(parameter) == "<StandIn w torch.bfloat16 [1048576, 1048576]>"


def test_what_is_computed_is_no_stored_tensor() -> None:
    """Parts, turned and merged ones have the right shape, no memory and no name."""
    one, other = stand_in("a"), stand_in("b")
    made = [one.t(), one[:5], one.view(-1), torch.cat([one, other]), torch.stack([one, other])]
    assert [stored_name(tensor) for tensor in made] == [""] * 5
    assert made[3].shape == (1 << 21, 1 << 20)
    assert stored_name(torch.empty_like(one, device="cpu")) == ""
    assert stored_name(one + torch.ones(1 << 20)) == ""
    assert (one.origin.stored, one.origin.was_written) == ("a", False)


def test_what_is_written_to_is_not_what_is_stored() -> None:
    """Also through an alias: the library's code may scale a weight after it was loaded."""
    tensor = stand_in()
    tensor.detach().mul_(2)
    assert tensor.origin.was_written
    parameter = nn.Parameter(stand_in())
    nn.init.zeros_(parameter)
    assert cast(StandIn, parameter).origin.was_written


@pytest.mark.parametrize("kind", ["list", "row", "slice", "split", "out"])
def test_what_is_written_to_by_other_ways(kind: str) -> None:
    """Operations on lists, parts and shapes of it, and results that are put into it."""
    tensor = stand_in()
    if kind == "list":
        torch._foreach_mul_([stand_in("v"), tensor], 2.0)
    elif kind == "row":
        tensor[0].zero_()
    elif kind == "slice":
        tensor.data[:3] = 7
    elif kind == "split":
        torch.chunk(tensor.t().unsqueeze(0), 4, dim=1)[3].add_(1)
    else:
        torch.add(stand_in("v"), 1, out=tensor)
    assert tensor.origin.was_written


def test_what_is_written_to_a_copy() -> None:
    """The stored tensor that a part was copied from is as it was."""
    tensor = stand_in()
    tensor[:3].clone().zero_()
    assert not tensor.origin.was_written


def test_real_tensors_are_not_written_to() -> None:
    """What is stored cannot be copied before it is there, and is not passed over either."""
    with pytest.raises(UsageError, match="into a tensor that is not stored"):
        torch.zeros(2).copy_(stand_in("w", (2,)))
    with pytest.raises(UsageError, match="into a tensor that is not stored"):
        torch._foreach_add_([torch.zeros(2)], [stand_in("w", (2,))])


def test_equality_is_taken_and_noted() -> None:
    """Two stored tensors that could be equal are, until their bytes have been seen."""
    noted: list[tuple[str, str]] = []
    one = stand_in("a", equalities=noted)
    assert torch.equal(one, stand_in("b", equalities=noted))
    assert noted == [("a", "b")]
    assert not torch.equal(one, stand_in("c", (2, 2), equalities=noted))
    assert not torch.equal(stand_in("a", (2,), equalities=noted), torch.ones(2))
    assert noted == [("a", "b")]


def test_there_are_no_values() -> None:
    """Code that asks for one is told by torch: it cannot go on with anything made up."""
    with pytest.raises(RuntimeError):
        stand_in("w", (1,)).item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        stand_in("w", (3,)).tolist()
