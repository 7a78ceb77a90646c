"""An engine with torch on a GPU that takes commands as JSON lines (tests/support/engine.py).

`python -m tests.gpu.engine DIRECTORY DEVICE`; with DEVICE "simulated" it runs on the CPU.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import GELU, Linear, Module, Sequential

from engine_client import WeightSet, parameters_on_meta
from tests.support.engine import ToldEngine, obey

WIDTH = 2048
LAYERS = 4


def model() -> Module:
    """Four layers, 64 MiB of float32; its parameters lie where the caller says."""
    layers: list[Module] = []
    for _ in range(LAYERS):
        layers += [Linear(WIDTH, WIDTH, bias=False), GELU()]
    return Sequential(*layers).eval()


def digest(output: Tensor) -> str:
    """Equal for outputs of equal bits."""
    return hashlib.sha256(output.cpu().contiguous().numpy().tobytes()).hexdigest()


class GpuEngine(ToldEngine):
    """One method a command; a model bound to the weights that were acquired last."""

    def __init__(self, directory: Path, device: str) -> None:
        self.where = torch.device("cpu" if device == "simulated" else device)
        self.input = torch.linspace(-1, 1, 4 * WIDTH, device=self.where).reshape(4, WIDTH)
        self.model: Module | None = None
        self.graph: Any = None
        self.replayed = torch.empty(0)
        super().__init__(directory, device)

    def bind(self, path: str, keep: str = "w") -> dict[str, Any]:
        granted = self.acquire(path, keep=keep)
        self._bind(self.weights[keep])
        return granted

    def bind_name(self, name: str, keep: str = "w") -> dict[str, Any]:
        granted = self.acquire_name(name, keep=keep)
        self._bind(self.weights[keep])
        return granted

    def _bind(self, weights: WeightSet) -> None:
        with parameters_on_meta():
            self.model = model()
        weights.bind(self.model)

    def load_ordinarily(self, path: str) -> str:
        """The output's digest of a model that has read the checkpoint into memory of its own."""
        from safetensors.torch import load_file

        own = model().to(self.where)
        own.load_state_dict(load_file(Path(path) / "model.safetensors", device=str(self.where)))
        with torch.inference_mode():
            return digest(own(self.input))

    def run(self) -> str:
        """The output's digest of the bound model."""
        assert self.model is not None
        with torch.inference_mode():
            return digest(self.model(self.input))

    def publish(self, name: str, seed: int) -> str:
        """Publish a model of one's own; the digest of its output afterwards."""
        torch.manual_seed(seed)
        self.model = model().to(self.where)
        self.weights["published"] = self.client.publish(name, self.model)
        return self.run()

    def write(self) -> str:
        """Write to a bound parameter: nothing comes back but the driver's refusal."""
        assert self.model is not None
        parameter = next(self.model.parameters())
        parameter.data.add_(1)
        if self.where.type == "cuda":
            try:
                torch.cuda.synchronize(self.where)
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        return "written"

    def drop(self, keep: str = "w") -> None:
        """Let go of model and weights."""
        self.model = None
        self.graph = None
        self.weights.pop(keep).release()

    # --- graphs -----------------------------------------------------------------------------

    def capture(self) -> str:
        """Capture the forward pass in a CUDA graph; the digest of its first replay."""
        assert self.model is not None
        side = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.where))
        with torch.inference_mode(), torch.cuda.stream(side):
            self.model(self.input)  # cuBLAS takes its workspace outside the capture
        torch.cuda.current_stream(self.where).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            self.replayed = self.model(self.input)
        return self.replay(1)

    def replay(self, times: int) -> str:
        """The digest of the output after so many replays, which must all be equal."""
        digests = set()
        for _ in range(times):
            self.graph.replay()
            torch.cuda.synchronize(self.where)
            digests.add(digest(self.replayed))
        assert len(digests) == 1
        return digests.pop()

    def sleep(self, keep: str = "w") -> None:
        self.weights[keep].sleep()

    def wake(self, keep: str = "w") -> None:
        self.weights[keep].wake()

    def free_bytes(self) -> int:
        return self.client._device.free_bytes()


if __name__ == "__main__":
    obey(GpuEngine(Path(sys.argv[1]), sys.argv[2]))
