"""A model of the transformers library as it is before its weights are there.

The library itself builds it: its own `from_pretrained` gets stand-ins in place of a checkpoint's
tensors. A stand-in has name, shape and dtype and takes no memory. So class, names (renamed,
prefixed, tied), dtypes and buffers are decided by the library's own code, whatever its version, and
what comes out says for every place which stored tensor belongs there. Nothing is mapped meanwhile,
so nothing that the library does can write to shared weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from broker.checkpoints.header import StoredTensor
from engine_client.integrations.transformers.classes import Chosen
from engine_client.integrations.transformers.stand_in import Origin, StandIn
from engine_client.matching import walk


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


building = threading.RLock()
"""Held while the library builds a model: it changes the default dtype of the whole process."""


def build_skeleton(chosen: Chosen, stored: Iterable[StoredTensor]) -> Skeleton:
    """Have the library build the model of a checkpoint with these tensors.

    Blocks, also while another thread's model is built; takes the memory of the model's buffers,
    and, for the moment, of parameters that the checkpoint lacks.

    Raises:
        What the library raises about configuration and options.
    """
    tensors = list(stored)
    equalities: list[tuple[str, str]] = []
    with building:
        return _skeleton(chosen, tensors, equalities)


def _skeleton(
    chosen: Chosen, tensors: list[StoredTensor], equalities: list[tuple[str, str]]
) -> Skeleton:
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
    """Which of these places have other values when the model is built with another seed, and with
    other values in memory that nobody has written to."""
    with torch.random.fork_rng(devices=[]), _other_fresh_memory():
        torch.manual_seed(torch.initial_seed() + 1)
        model = _build(chosen, stored, [])[0]
    again = {name: held for name, held, _, _ in _held(model)}
    return [name for name, held in own.items() if not _same_bytes(held, again[name])]


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    first, second = (held.detach().contiguous().reshape(-1) for held in (one, other))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@contextmanager
def _other_fresh_memory() -> Iterator[None]:
    """Fresh memory is filled with NaN where torch has to be deterministic, and left otherwise."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(not enabled, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _stand_in(tensor: StoredTensor, equalities: list[tuple[str, str]]) -> StandIn:
    dtype = getattr(torch, tensor.dtype)
    like = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return StandIn(like, Origin(tensor.name), equalities)


def _examine(skeleton: Skeleton, lacking: set[str]) -> dict[str, Tensor]:
    """Note what every place holds, and put parameters on meta in place of stand-ins.

    Args:
        lacking: places that the library reports as missing.

    Returns:
        Parameters and persistent buffers without a stored tensor that are not reported either: the
        library fills them by itself. That is right for what it computes (the positions of Marian
        and the like), and noise for what it draws at random or leaves as the memory is.
    """
    own: dict[str, Tensor] = {}
    replaced: dict[int, Any] = {}
    places = list(_held(skeleton.model))
    persistent = set(skeleton.model.state_dict())
    told = {id(held) for name, held, _, _ in places if name in lacking | skeleton.mismatched.keys()}
    for name, held, entries, key in places:
        if isinstance(held, StandIn):
            _note(skeleton, name, held)
            if id(held) not in replaced:
                replaced[id(held)] = _without_memory(held)
            entries[key] = replaced[id(held)]
        elif name in lacking:
            skeleton.missing.append(name)
        elif (isinstance(held, Parameter) or name in persistent) and id(held) not in told:
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
