"""An inference engine in a page, on the broker's weights: a causal language model, greedy decoding.

    python examples/tiny_engine.py                            # a small Llama made on the spot
    python examples/tiny_engine.py --model PATH --prompt "…"  # any checkpoint of the Llama family

What an engine has to do is in `serve`; docs/integrate.md goes through it. The rest shows it: a
broker and three engines. Two start at once; one of them is killed and started again, and says the
same. Compared with the same engine on weights of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from _demo import (
    Process,
    check_model,
    choose_device,
    run_main,
    running_broker,
    say,
    steps,
    torch_name,
)

from engine_client import Checkpoint, EngineClient

PROMPT = "The capital of France is"
SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Of the model that is made on the spot: its tokens are bytes."""


# --- the engine: everything that has to do with the broker is in this function -------------------


def serve(name: str, options: argparse.Namespace) -> None:
    """Get the weights, say so, and answer one request after the other."""
    from _llama import Llama, Shape, generate

    from engine_client import parameters_on_meta

    prompt = to_tokens(options.model, options.prompt)
    torch_name(options.device)
    began = time.perf_counter()
    with parameters_on_meta():
        model = Llama(Shape.of(options.model)).eval()
    with EngineClient(options.device, directory=options.directory, label=name) as client:
        weights = client.acquire(Checkpoint(options.model))
        weights.bind(model)
        seconds = time.perf_counter() - began
        say(seconds=seconds, how=weights.how, tokens=generate(model, prompt, options.tokens))
        for _request in steps():
            say(tokens=generate(model, prompt, options.tokens))


# --- the demonstration ---------------------------------------------------------------------------


def serve_alone(options: argparse.Namespace) -> None:
    """The same engine as it is without a broker: the weights are read into memory of its own."""
    from _llama import Llama, Shape, generate
    from safetensors.torch import load_file

    where = torch_name(options.device)
    if not Path(options.model).exists():
        make_checkpoint(Path(options.model))
    model = Llama(Shape.of(options.model)).eval()
    files = sorted(Path(options.model).glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    left = model.load_state_dict(stored, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"these weights do not fit: {left}")
    prompt = to_tokens(options.model, options.prompt)
    say(tokens=generate(model.to(where), prompt, options.tokens))


def make_checkpoint(folder: Path) -> None:
    """A checkpoint of random weights, the same each time."""
    import torch
    from _llama import Llama, Shape
    from safetensors.torch import save_file

    folder.mkdir()
    said = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, **SHAPE}
    said |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(said))
    torch.manual_seed(0)
    save_file(Llama(Shape.of(folder)).state_dict(), folder / "model.safetensors")


def to_tokens(model: str, text: str) -> list[int]:
    """By the checkpoint's own tokenizer; bytes where it has none."""
    if not (Path(model) / "tokenizer.json").exists():
        return list(text.encode())
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(text).ids
    return ids


def to_text(model: str, tokens: list[int]) -> str:
    """What an answer says; of random weights, the tokens themselves."""
    if not (Path(model) / "tokenizer.json").exists():
        return " ".join(map(str, tokens))
    from tokenizers import Tokenizer

    text: str = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).decode(tokens)
    return repr(text)


def start(options: argparse.Namespace, *names: str) -> list[Process]:
    """Engines that start at the same moment; each has answered when this returns."""
    engines = [Process(name, serve, name, options) for name in names]
    for engine in engines:
        engine.facts = engine.hear()
    return engines


def demonstrate(options: argparse.Namespace) -> None:
    options.device = choose_device()
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        options.directory = name
        options.model = os.path.abspath(options.model or os.path.join(name, "llama"))
        with running_broker(options.device, Path(name)):
            run(options)


def run(options: argparse.Namespace) -> None:
    alone = Process("alone", serve_alone, options)
    alone.facts = alone.hear()
    first, second = start(options, "engine-1", "engine-2")
    second.kill()
    [again] = start(options, "engine-2 again")
    print(f"\n{'engine':<16}{'ready after':>12}  weights")
    for engine in (first, second, again):
        seconds = f"{engine.facts['seconds'] * 1000:.0f} ms"
        print(f"{engine.name:<16}{seconds:>12}  {engine.facts['how']}")
    with EngineClient(options.device, directory=options.directory, label="onlooker") as client:
        loads = client.status()["counters"]["loads_started"]
    answers = [engine.facts["tokens"] for engine in (alone, first, second, again)]
    print(f"\n{options.prompt} -> {to_text(options.model, answers[0])}")
    print(f"loads: {loads}, different answers: {len(set(map(tuple, answers)))}")
    for engine in (first, again):
        engine.end()
    if loads != 1 or any(answer != answers[0] for answer in answers):
        raise SystemExit("that is not as it should be: one load and one answer were expected")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="checkpoint folder (default: one is made)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=8, help="how many to generate")
    options = parser.parse_args()
    if options.model:
        check_model(options.model)
    demonstrate(options)


if __name__ == "__main__":
    run_main(main)
