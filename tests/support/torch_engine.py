"""Engines that know torch: as engine.py, but born by fork from one process that has imported it.

`python -m tests.support.torch_engine FD`: importing torch takes seconds, and a test may need nine
engines. FD is a socket; each packet on it holds a broker's directory and two descriptors, the
standard input and output of the engine to be born, and is answered with its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential

from broker.weights import storage_extent
from engine_client import publishing
from engine_client.swapping import PrivateWeights
from tests.support.engine import ToldEngine, obey

WIDTH = 64
LAYERS = 2


def model_of(number: float) -> Module:
    """A model all of whose weights say which generation they are of."""
    model = Sequential(*(Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(number / 64)
    return model


def output_of(model: Module) -> float:
    """One forward pass. Exact, whatever the order of its sums, for numbers up to 50."""
    with torch.inference_mode():
        return float(model(torch.ones(1, WIDTH, dtype=torch.float32)).double().sum())


def extent_bytes(tensor: Tensor) -> bytes:
    extent = storage_extent(list(tensor.shape), list(tensor.stride()), tensor.element_size())
    return ctypes.string_at(tensor.data_ptr(), extent) if extent else b""


def described(tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """All there is to know of tensors, as JSON can hold it: also who shares a storage, and where.

    `shares`: the names over the same storage, and `at`: bytes behind the first of them.
    """
    places: dict[int, dict[str, int]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            start = int(tensor.storage_offset()) * tensor.element_size()
            places.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = start
    groups = {name: group for group in places.values() for name in group}
    return {
        name: {
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "bytes": extent_bytes(tensor).hex(),
            "shares": sorted(groups.get(name, [name])),
            "at": groups[name][name] - min(groups[name].values()) if name in groups else 0,
        }
        for name, tensor in tensors.items()
    }


class TorchEngine(ToldEngine):
    """One method a command."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        torch.set_num_threads(1)
        self.models: dict[str, Module] = {}

    # --- what is mapped -------------------------------------------------------------------

    def describe(self, keep: str = "w") -> dict[str, Any]:
        """Names, dtypes, shapes, strides, kinds, bytes, and who shares a storage with whom."""
        weights = self.weights[keep]
        found = described(weights.tensors())
        for group in weights.manifest.groups:
            for name in group.names:
                found[name]["kind"] = group.kind
        return {"tensors": found, "metadata": weights.metadata}

    def values(self, keep: str = "w") -> list[float]:
        """Every value that is in the set, once."""
        tensors = self.weights[keep].values()
        return sorted({value for tensor in tensors for value in tensor.flatten().tolist()})

    def copy_of(self, name: str) -> dict[str, Any]:
        """What a private copy holds, and whether it can be written to."""
        copy = self.client.acquire(name, copy=True)
        assert isinstance(copy, PrivateWeights)
        found = described(dict(copy))
        for tensor in copy.values():
            tensor.zero_()
        return {"tensors": found, "generation": copy.generation, "metadata": copy.metadata}

    # --- publishing -----------------------------------------------------------------------

    def publish(self, name: str, number: float, keep: str = "w", **options: Any) -> dict[str, Any]:
        """A model of this number; as a mapping, so that nothing of it stays here."""
        weights = self.client.publish(name, dict(model_of(number).state_dict()), **options)
        return self._keep(keep, weights)

    def publish_many(self, name: str, first: int, last: int) -> list[str]:
        """One generation after the other; each lease is given back at once."""
        labels = []
        for number in range(first, last + 1):
            weights = self.client.publish(name, dict(model_of(number).state_dict()))
            labels.append(str(weights.generation))
            weights.release()
        return labels

    def get_or_publish(
        self,
        name: str,
        number: float,
        keep: str = "w",
        *,
        wait_for: str | None = None,
        error: str | None = None,
        signal_number: int | None = None,
        at: str = "build",
        **options: Any,
    ) -> dict[str, Any]:
        """Build a model of this number, if nobody has.

        Args:
            wait_for: a file whose appearing ends the build.
            error: what the build raises.
            signal_number, at: a signal to itself during the "build" or in the middle of the "copy".
        """
        built: list[int] = []

        def build() -> dict[str, Tensor]:
            built.append(os.getpid())
            if wait_for is not None:
                while not Path(wait_for).exists():
                    time.sleep(0.005)
            if error is not None:
                raise ValueError(error)
            if signal_number is not None and at == "build":
                signal.raise_signal(signal_number)
            return dict(model_of(number).state_dict())

        with _signal_while_copying(signal_number if at == "copy" else None):
            weights = self.client.get_or_publish(name, build, **options)
        return {**self._keep(keep, weights), "built": bool(built)}

    # --- modules --------------------------------------------------------------------------

    def bind(self, name: str, keep: str = "w") -> float:
        """A model bound to the newest generation; its output."""
        weights = self.client.acquire(name)
        self._keep(keep, weights)
        self.models[keep] = model_of(0)
        weights.bind(self.models[keep])
        return output_of(self.models[keep])

    def from_pretrained(self, path: str, keep: str = "w") -> dict[str, Any]:
        """A model of the transformers library; every page of its weights has been read."""
        from engine_client.integrations.transformers import from_pretrained, weights_of

        model = self.models[keep] = from_pretrained(path, client=self.client)
        checksum = sum(float(parameter.double().sum()) for parameter in model.parameters())
        return {**self._keep(keep, weights_of(model)), "checksum": checksum}

    def follow(self, name: str, last: str, keep: str = "w") -> list[tuple[str, float]]:
        """Forward passes in a loop, moving to the newest generation between two of them, until the
        last is there: generation and output of every pass."""
        weights, model = self.weights[keep], self.models[keep]
        passes = [(str(weights.generation), output_of(model))]
        while weights.generation != last:
            weights = weights.swap(model)
            passes.append((str(weights.generation), output_of(model)))
        self.weights[keep] = weights
        return passes

    def unbind(self, keep: str = "w") -> None:
        """The model is gone, and with it everything that holds its weights."""
        del self.models[keep]
        self.release(keep)


@contextmanager
def _signal_while_copying(number: int | None) -> Iterator[None]:
    """A signal to this very process when half of the storages are in the slab."""
    original = publishing.copy_parts

    def copy(publication: Any, slab: Tensor, report: Any = None) -> None:
        for source, offset in publication.parts[: len(publication.parts) // 2]:
            slab[offset : offset + source.numel()].copy_(source)
        signal.raise_signal(number or 0)
        original(publication, slab, report)

    if number is not None:
        publishing.copy_parts = copy
    try:
        yield
    finally:
        publishing.copy_parts = original


def _orders(link: socket.socket) -> Iterator[tuple[Path, int, int]]:
    """Directory, input and output of each engine to be born, until the other end closes."""
    while True:
        packet, descriptors, _flags, _address = socket.recv_fds(link, 4096, 2)
        if not packet:
            return
        yield Path(packet.decode()), descriptors[0], descriptors[1]


def _be_an_engine(directory: Path, given: int, answers: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate((given, answers)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
    obey(TorchEngine(directory))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the engines here
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    link = socket.socket(fileno=int(sys.argv[1]))
    link.sendall(b"ready")
    for directory, given, answers in _orders(link):
        pid = os.fork()
        if pid == 0:
            link.close()
            try:
                _be_an_engine(directory, given, answers)
            except BaseException:  # noqa: BLE001 - the child must never go on as the nursery
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(given)
        os.close(answers)
        link.sendall(str(pid).encode())


if __name__ == "__main__":
    main()
