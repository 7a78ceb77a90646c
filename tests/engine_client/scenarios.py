"""What test_views.py runs in processes of their own: `python -m tests.engine_client.scenarios`.

Arguments: the scenario, and the descriptor of a slab that holds "weight", four floats.
"""

from __future__ import annotations

import gc
import os
import sys

from torch import Tensor

from broker.devices.simulated import SimulatedDevice
from broker.errors import UsageError
from broker.weights import Manifest, TensorGroup
from engine_client.views import SlabTensors

released: list[bool] = []
kept: list[Tensor] = []  # until the interpreter is gone


def open_slab(descriptor: int) -> SlabTensors:
    nbytes = os.fstat(descriptor).st_size
    group = TensorGroup("float32", [4], [1], "tensor", ["weight"], [0])
    mapping = SimulatedDevice().map(descriptor, nbytes, writable=False)
    return SlabTensors(
        mapping,
        Manifest(nbytes=nbytes, groups=[group]),
        "simulated",
        on_last_release=lambda: released.append(True),
    )


def write(tensors: SlabTensors) -> None:
    print("about to write", flush=True)
    tensors.tensor("weight").add_(1)
    print("survived", flush=True)


def fork(tensors: SlabTensors) -> None:
    kept.append(tensors.tensor("weight"))
    child = os.fork()
    if not child:
        _in_child(tensors)
    os.waitpid(child, 0)
    print("parent reads", kept[0].tolist(), flush=True)


def _in_child(tensors: SlabTensors) -> None:
    try:
        tensors.take(["weight"])
    except UsageError as error:
        print("child:", error, flush=True)
    tensors.close()
    kept.clear()
    del tensors
    gc.collect()
    print("child released:", released, flush=True)
    os._exit(0)


if __name__ == "__main__":
    {"write": write, "fork": fork}[sys.argv[1]](open_slab(int(sys.argv[2])))
