"""Modules built without memory for their parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

_FILLS = frozenset(
    {
        *("normal_", "uniform_", "fill_", "zero_", "random_", "bernoulli_", "exponential_"),
        *(
            "trunc_normal_",
            "constant_",
            "ones_",
            "zeros_",
            "eye_",
            "dirac_",
            "orthogonal_",
            "sparse_",
        ),
        *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
    }
)
"""What gives a tensor its first values: methods of Tensor and functions of torch.nn.init."""

_Register = Callable[[Module, str, "Parameter | None"], None]


class _ThisThread(threading.local):
    depth = 0
    same_objects = False

    def __init__(self) -> None:
        self.made: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


_here = _ThisThread()
_lock = threading.Lock()
_entered = 0
_original: _Register = Module.register_parameter


class _SkippingFills(TorchFunctionMode):
    """Spares parameters on meta the values that they cannot have.

    torch's own `normal_` on meta imports 800 modules the first time (1.4 s) and takes as long as a
    real one afterwards.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta(*, same_objects: bool = False) -> Iterator[None]:
    """Build modules whose parameters are on the meta device and whose buffers are real.

    Unlike `torch.device("meta")`, under which buffers that no checkpoint holds (rotary frequencies,
    position ids) would stay without values. Each parameter goes to meta when its module registers
    it, so one real one exists at a time, and for most layers its pages are never touched; its
    initialisation is skipped. A parameter registered in several modules stays one object.

    Concerns only modules built by the calling thread; other threads may build ordinary ones, or
    enter it themselves, at the same time. May be nested.

    Args:
        same_objects: for code that goes on with a Parameter after it has registered it (vLLM sets
            attributes on it then): the very object goes to meta, also for whoever held it before;
            one with views or weak references is replaced all the same. By default every module
            gets a new one, and a parameter that already existed stays as it is for others.
    """
    _install()
    _here.depth += 1
    outer, _here.same_objects = _here.same_objects, same_objects
    try:
        with _SkippingFills():
            yield
    finally:
        _here.depth -= 1
        _here.same_objects = outer
        if not _here.depth:
            _here.made.clear()
        _uninstall()


def _install() -> None:
    global _entered, _original
    with _lock:
        if not _entered:
            _original = Module.register_parameter
            Module.register_parameter = _register  # type: ignore[method-assign]
        _entered += 1


def _uninstall() -> None:
    global _entered
    with _lock:
        _entered -= 1
        # Somebody who patched it after us and has not let go goes on calling ours: harmless.
        if not _entered and Module.register_parameter is _register:
            Module.register_parameter = _original  # type: ignore[method-assign,assignment]


def _register(self: Module, name: str, param: Parameter | None) -> None:
    if _here.depth and param is not None and not param.is_meta:
        param = _on_meta(param)
    _original(self, name, param)


def _on_meta(parameter: Parameter) -> Any:
    known = _here.made.get(id(parameter))
    if known is not None and known[0]() is parameter:
        return known[1]
    data = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta"
    )
    made = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)  # noqa: SLF001
    made.__dict__.update(parameter.__dict__)
    if _here.same_objects and _swap(parameter, made):
        return parameter
    _here.made[id(parameter)] = (weakref.ref(parameter), made)
    return made


def _swap(parameter: Parameter, made: Any) -> bool:
    """Make the very object the one on meta. False if views of it or weak references forbid that."""
    try:
        torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True
