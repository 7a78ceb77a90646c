"""The ways to attach that attach.py compares: the engine's side of each, and who gives.

`python -m benchmarks.attach_methods worker METHOD CHECKPOINT ADDRESS` is an engine, `… once …` one
that attaches once and ends, `… giver KIND CHECKPOINT ADDRESS` holds the tensors that the baselines
are handed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.common import MIB
from benchmarks.processes import ROOT, work
from engine_client import Checkpoint, EngineClient

if TYPE_CHECKING:
    import torch

MODULE = "benchmarks.attach_methods"
LAZY_ACCESSES = 1000
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}
Times = dict[str, float]


# --- what methods share --------------------------------------------------------------------------


Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of a checkpoint: dtype and shape of each tensor."""


def stored_in(checkpoint: str) -> Stored:
    """What the headers of a checkpoint's files say."""
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        stored |= {name: (_DTYPES[t["dtype"]], tuple(t["shape"])) for name, t in header.items()}
    return stored


def module_of(stored: Stored) -> torch.nn.Module:
    """A module with these parameters, on meta."""
    import torch
    from torch.nn import Module, Parameter

    root = Module()
    for name, (dtype, shape) in stored.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            child = at._modules.get(part)  # noqa: SLF001 - get_submodule costs more
            if child is None:
                child = Module()
                at.add_module(part, child)
            at = child
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        at.register_parameter(last, Parameter(empty, requires_grad=False))
    return root


def bind_plainly(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """The least that makes a module use the tensors: no checks, no ties."""
    from torch.nn import Parameter

    for path, at in module.named_modules():
        held = at._parameters  # noqa: SLF001 - register_parameter costs twice as much
        for key in held:
            name = f"{path}.{key}" if path else key
            held[key] = Parameter(tensors[name], requires_grad=False)


def touch(memory: Any) -> int:
    """Read a byte of every page of a buffer."""
    import numpy

    return int(numpy.frombuffer(memory, dtype=numpy.uint8)[::4096].sum())


@contextmanager
def timed(times: Times, what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times[what] = time.perf_counter() - began


# --- methods: each `attach` gives seconds by part, of which all but "aside" count -----------------


class Method:
    """One way for an engine to get at weights that are there."""

    def __init__(self, checkpoint: str, address: str) -> None:
        self.checkpoint = checkpoint
        self.stored = stored_in(checkpoint)
        self.address = address

    def attach(self, *, bind: bool) -> Times:
        """Once, from nothing to nothing left."""
        module = module_of(self.stored) if bind else None
        gc.collect()
        times: Times = {}
        kept = self._attach(times, module)
        del module
        self._drop(times, kept)
        return times

    def _attach(self, times: Times, module: torch.nn.Module | None) -> Any:
        raise NotImplementedError

    def _drop(self, times: Times, kept: Any) -> None:
        """What was attached goes; its time does not count."""


class Ours(Method):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._client = EngineClient("simulated", directory=self.address)

    def _attach(self, times: Times, module: torch.nn.Module | None) -> Any:
        with timed(times, "map"):
            weights = self._client.acquire(Checkpoint(self.checkpoint))
        if module is not None:
            with timed(times, "bind"):
                weights.bind(module)
            return {"weights": weights, "module": module}
        first, *names = list(self.stored)[: LAZY_ACCESSES + 1]
        with timed(times, "aside: first tensor"):
            tensors = [weights[first]]
        with timed(times, "aside: first access"):
            tensors += [weights[name] for name in names]
        times["aside: first access"] /= len(names)
        return {"weights": weights, "tensors": tensors}

    def _drop(self, times: Times, kept: Any) -> None:
        weights = kept.pop("weights")
        with timed(times, "aside: touch"):
            touch(weights.slab_memory())
        kept.clear()
        gc.collect()
        with timed(times, "aside: unmap"):
            weights.release()


class Handles(Method):
    """torch.multiprocessing's handles (strategy file_system), pickled anew for each engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        import torch.multiprocessing as shared

        shared.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        self._giver: Connection = Client(self.address, "AF_UNIX")

    def _attach(self, times: Times, module: torch.nn.Module | None) -> Any:
        with timed(times, "map"):
            self._giver.send_bytes(b"give")
            tensors = pickle.loads(self._giver.recv_bytes())  # noqa: S301 - the baseline's own way
        if module is not None:
            with timed(times, "bind"):
                bind_plainly(module, tensors)
        return tensors, module


class File(Method):
    """The checkpoint again, from the page cache."""

    def _attach(self, times: Times, module: torch.nn.Module | None) -> Any:
        from safetensors.torch import load_file

        with timed(times, "map"):
            tensors: dict[str, torch.Tensor] = {}
            for path in sorted(Path(self.checkpoint).glob("*.safetensors")):
                tensors |= load_file(path)
        with timed(times, "touch"):
            self._touch(tensors)
        if module is not None:
            with timed(times, "bind"):
                bind_plainly(module, tensors)
        return tensors, module

    def _touch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As one range if they lie in one, which is the cheaper way."""
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        last = max(tensors.values(), key=lambda tensor: tensor.data_ptr())
        first, nbytes = min(addresses), sum(tensor.nbytes for tensor in tensors.values())
        span = last.data_ptr() + last.nbytes - first
        if span <= nbytes + MIB:
            touch((ctypes.c_ubyte * span).from_address(first))
            return
        for tensor in tensors.values():
            touch((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


class Vllm(Method):
    """vLLM's own functions on both sides: its framing, its entries, its registration."""

    def _attach(self, times: Times, module: torch.nn.Module | None) -> Any:
        from vllm.model_executor.model_loader.weight_cache import ipc_loader, protocol

        with timed(times, "map"), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            protocol.send_msg(connection, {"cmd": "get_state"})
            entries, aliases = protocol.recv_msg(connection)
        with timed(times, "bind"):
            state = SimpleNamespace(entries=entries, aliases=aliases)
            loader: Any = SimpleNamespace(mode="share")
            ipc_loader.IpcModelLoader._apply_entries(loader, module, state, 0)  # noqa: SLF001
        return state, module


METHODS: dict[str, type[Method]] = {"ours": Ours, "handles": Handles, "file": File, "vllm": Vllm}


def be_worker(kind: str, checkpoint: str, address: str) -> None:
    """Import what the method needs, then do what is asked."""
    import torch  # noqa: F401 - imported before anything is timed

    method = METHODS[kind](checkpoint, address)
    work({"attach": lambda bind: method.attach(bind=bind)})


def attach_once(kind: str, checkpoint: str, address: str) -> None:
    """A whole engine's life, as far as weights are concerned; says how long they took."""
    print(json.dumps(METHODS[kind](checkpoint, address).attach(bind=True)))


# --- givers --------------------------------------------------------------------------------------


def be_giver(kind: str, checkpoint: str, address: str) -> None:
    """Hold the checkpoint's tensors in shared memory and hand them out at `address`."""
    stored = stored_in(checkpoint)
    if kind == "vllm":
        give_as_vllm(stored, address)
    import torch.multiprocessing as shared

    shared.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    tensors = shared_tensors(stored, one_storage=kind == "views")
    with Listener(address, "AF_UNIX") as listener:
        print("ready", flush=True)
        with listener.accept() as connection:
            while True:
                try:
                    connection.recv_bytes()
                except EOFError:
                    return
                connection.send_bytes(ForkingPickler.dumps(tensors))


def shared_tensors(stored: Stored, *, one_storage: bool) -> dict[str, torch.Tensor]:
    """Ones, with a storage each or as views of one; all of one dtype and shape then."""
    import torch

    if not one_storage:
        made = ones(stored)
        for tensor in made.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return made
    (dtype, shape), *_ = stored.values()
    whole = torch.ones((len(stored), *shape), dtype=getattr(torch, dtype))
    whole.share_memory_()  # type: ignore[no-untyped-call]
    return dict(zip(stored, whole.unbind(), strict=True))


def ones(stored: Stored) -> dict[str, torch.Tensor]:
    import torch

    return {
        name: torch.ones(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in stored.items()
    }


def give_as_vllm(stored: Stored, address: str) -> None:
    from vllm.model_executor.model_loader.weight_cache import daemon, protocol

    module = module_of(stored)
    bind_plainly(module, ones(stored))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                protocol.recv_msg(connection)
                protocol.send_msg(connection, daemon.export_entries(module))


@contextmanager
def giver(kind: str, checkpoint: Path, address: Path, python: str) -> Iterator[str]:
    """A giver process: the address to ask it at."""
    process = _started(kind, checkpoint, address, python)
    try:
        yield str(address)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _started(kind: str, checkpoint: Path, address: Path, python: str) -> Any:
    process = subprocess.Popen(
        [python, "-m", MODULE, "giver", kind, str(checkpoint), str(address)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None  # noqa: S101 - it was asked for
    while (line := process.stdout.readline().strip()) != b"ready":
        if not line:
            raise RuntimeError(f"the giver of {kind} did not start")
    return process


if __name__ == "__main__":
    {"worker": be_worker, "once": attach_once, "giver": be_giver}[sys.argv[1]](*sys.argv[2:])
