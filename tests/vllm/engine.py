"""One vLLM engine in a process of its own: starts, decodes greedily, reports, waits to be ended.

python -m tests.vllm.engine '{"model": …, "report": …}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MAX_LENGTH = 64


def start(given: dict[str, Any]) -> None:
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    engine = LLM(**arguments_of(given))
    ready = time.perf_counter()
    sampling = SamplingParams(
        temperature=0, max_tokens=given["tokens"], ignore_eos=True, detokenize=False
    )
    (answer,) = engine.generate([{"prompt_token_ids": given["prompt"]}], sampling, use_tqdm=False)
    report = {
        "import": imported - began,
        "start": ready - imported,
        "tokens": list(answer.outputs[0].token_ids),
        "external": _external(engine) if given["external"] else None,
    }
    partial = Path(given["report"] + ".part")
    partial.write_text(json.dumps(report))
    partial.rename(given["report"])
    sys.stdin.readline()
    os._exit(0)  # vLLM's own end takes seconds, and the broker must not need it


def arguments_of(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": given["model"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": 2,
        "disable_log_stats": True,
        "worker_extension_cls": "tests.vllm.extension.Extension",
        **given["arguments"],
    }


def configure(given: dict[str, Any]) -> None:
    """What vLLM does before any loader exists: it reads headers of some checkpoints for it."""
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(**arguments_of(given)).create_engine_config()


def _external(engine: Any) -> int:
    """What the loader says the broker holds for this engine; asked again, as by a second start."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    config = engine.llm_engine.vllm_config
    with set_current_vllm_config(config):
        return int(get_model_loader(config.load_config).get_external_weight_memory(config))


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    if given["configure"]:
        configure(given)
    else:
        start(given)


if __name__ == "__main__":
    main()
