"""A model of the transformers library as it is before its weights are there.

The library itself builds it: its own `from_pretrained` gets stand-ins in place of a checkpoint's
tensors. A stand-in has name, shape and dtype and takes no memory. So class, names (renamed,
prefixed, tied), dtypes and buffers are decided by the library's own code, whatever its version, and
what comes out says for every place which stored tensor belongs there. Nothing is mapped meanwhile,
so nothing that the library does can write to shared weights.
"""
# ruff: noqa: SLF001 - modules' own dictionaries, as in engine_client.matching

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from broker.checkpoints.header import StoredTensor
from engine_client.integrations.transformers.classes import Chosen
from engine_client.matching import walk

_aten = torch.ops.aten
_SAME = frozenset({_aten.detach.default, _aten.alias.default})


@dataclass
class Origin:
    """Where what a stand-in stands for comes from.

    Attributes:
        stored: the tensor's name in the checkpoint; "" if it is made of several, or of parts.
        was_written: the library's code wrote to it, so it is not what is stored any more.
    """

    stored: str
    was_written: bool = False


class StandIn(torch.Tensor):
    """A tensor of a checkpoint before it is there. Says it is on the CPU, and has no memory.

    Casting and aliasing keep its origin; anything else gives a stand-in that is computed.
    """

    origin: Origin
    equalities: list[tuple[str, str]]
    """Stored names that the library has taken for equal, on our word: to be verified."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, origin: Origin, equalities: list[tuple[str, str]]) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.origin, made.equalities = origin, equalities
        return made

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device="meta")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        kwargs = kwargs or {}
        if func is _aten.equal.default:
            return _take_for_equal(*args)
        if func._schema.is_mutable and isinstance(first, StandIn):
            first.origin.was_written = True
            return first
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, _on_meta(kwargs)))
        given = [item for item in (first, *args[1:]) if isinstance(item, StandIn)]
        equalities = given[0].equalities if given else []
        kept = func in _SAME or func is _aten._to_copy.default
        origin = given[0].origin if given and kept else Origin("")
        return tree_map(
            lambda item: StandIn(item, origin, equalities) if isinstance(item, Tensor) else item,
            result,
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<StandIn {self.origin.stored or 'computed'} {self.dtype} {list(self.shape)}>"


def _take_for_equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if isinstance(one, StandIn) and isinstance(other, StandIn):
        one.equalities.append((one.origin.stored, other.origin.stored))
        return True
    return False


def _to_meta(item: Any) -> Any:
    if isinstance(item, StandIn):
        return item.on_meta()
    return item.to("meta") if isinstance(item, Tensor) else item


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever it makes, and wherever that was to be, has no memory."""
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") else dict(kwargs)


@dataclass
class Skeleton:
    """A built model whose weights are still to come, and what goes where.

    Attributes:
        model: its parameters and stored buffers are on meta; other buffers are real.
        names: the stored name for each place that gets a stored tensor, by the model's name of it.
        dtypes: for each stored tensor that is used, the dtype the library gives it.
        computed: places whose tensors the library computes from several stored ones, or from parts.
        places: every place that is named in `names` or `computed`, tied ones too.
        missing: places for which the checkpoint has nothing; the library would draw at random.
        mismatched: place → {"module": …, "stored": …} for another shape.
        unexpected: names for which the model has no place, as the library renamed them.
        equalities: pairs of stored names that are tied only if their bytes are equal.
    """

    model: Any
    names: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, dict[str, str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    equalities: list[tuple[str, str]] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        return [*self.names, *self.computed]


def build_skeleton(chosen: Chosen, stored: Iterable[StoredTensor]) -> Skeleton:
    """Have the library build the model of a checkpoint with these tensors.

    Blocks; takes the memory of the model's buffers, and, for the moment, of parameters that the
    checkpoint lacks.

    Raises:
        What the library raises about configuration and options.
    """
    tensors = list(stored)
    equalities: list[tuple[str, str]] = []
    model, info = _build(chosen, tensors, equalities)
    skeleton = Skeleton(model, unexpected=sorted(info["unexpected_keys"]), equalities=equalities)
    for name, stored_shape, shape in sorted(info["mismatched_keys"]):
        skeleton.mismatched[name] = {"module": str(list(shape)), "stored": str(list(stored_shape))}
    own = _examine(skeleton, set(info["missing_keys"]))
    if own:
        skeleton.missing += _random_among(own, chosen, tensors)
    return skeleton


def _build(
    chosen: Chosen, stored: Iterable[StoredTensor], equalities: list[tuple[str, str]]
) -> tuple[Any, dict[str, Any]]:
    with torch.device("cpu"), _no_progress_bar():
        built: tuple[Any, dict[str, Any]] = chosen.model_class.from_pretrained(
            None,
            config=chosen.config,
            state_dict={tensor.name: _stand_in(tensor, equalities) for tensor in stored},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told by us, together with everything else
            trust_remote_code=False,
            **chosen.options,
        )
    return built


def _random_among(
    own: Mapping[str, Tensor], chosen: Chosen, stored: Iterable[StoredTensor]
) -> list[str]:
    """Which of these parameters have other values when the model is built with another seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        again = dict(_build(chosen, stored, [])[0].named_parameters(remove_duplicate=False))
    return [name for name, held in own.items() if not torch.equal(held, again[name])]


def _stand_in(tensor: StoredTensor, equalities: list[tuple[str, str]]) -> StandIn:
    dtype = getattr(torch, tensor.dtype)
    like = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return StandIn(like, Origin(tensor.name), equalities)


def _examine(skeleton: Skeleton, lacking: set[str]) -> dict[str, Tensor]:
    """Note what every place holds, and put parameters on meta in place of stand-ins.

    Args:
        lacking: places that the library reports as missing.

    Returns:
        Parameters that have got no stored tensor and are not reported either: the library fills
        them by itself. That is right for what it computes (the positions of Marian and the like),
        and noise for what it draws at random.
    """
    own: dict[str, Tensor] = {}
    replaced: dict[int, Any] = {}
    places = list(_held(skeleton.model))
    told = {id(held) for name, held, _, _ in places if name in lacking | skeleton.mismatched.keys()}
    for name, held, entries, key in places:
        if isinstance(held, StandIn):
            _note(skeleton, name, held)
            if id(held) not in replaced:
                replaced[id(held)] = _without_memory(held)
            entries[key] = replaced[id(held)]
        elif name in lacking:
            skeleton.missing.append(name)
        elif isinstance(held, Parameter) and id(held) not in told:
            own[name] = held
    return own


def _held(model: Any) -> Iterator[tuple[str, Tensor, dict[str, Any], str]]:
    """Every place that holds a tensor: its name, the tensor, and where to put another one."""
    for path, at in walk(model):
        entries: dict[str, Any]
        for entries in (at.__dict__["_parameters"], at.__dict__["_buffers"]):
            for key, held in list(entries.items()):
                if held is not None:
                    yield path + key, held, entries, key


def _note(skeleton: Skeleton, name: str, held: StandIn) -> None:
    stored = held.origin.stored
    if not stored or held.origin.was_written:
        skeleton.computed.append(name)
        return
    skeleton.names[name] = stored
    skeleton.dtypes[stored] = held.dtype


def _without_memory(held: StandIn) -> Tensor:
    made = held.on_meta()
    if not isinstance(held, Parameter):
        return made
    made = Parameter(made, requires_grad=held.requires_grad)
    kept = {key: value for key, value in vars(held).items() if key not in _OWN}
    made.__dict__.update(kept)
    return made


_OWN = frozenset({"origin", "equalities", "_is_param"})


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The library's bar says that weights are loaded, and none are."""
    from transformers.utils import logging as library

    logging: Any = library
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
