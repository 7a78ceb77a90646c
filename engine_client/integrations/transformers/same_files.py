"""That broker and library read the same files of a checkpoint, and find the same dtype in them.

Both choose the files by themselves. Where they would choose differently the weights would be other
ones than the library's, without a word; so that is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from broker.checkpoints.files import INDEX_FILE, SINGLE_FILE
from broker.checkpoints.plan import CheckpointPlan
from broker.errors import BadRequest, UsageError
from engine_client.integrations.transformers.classes import Chosen


def require_text(path: str | os.PathLike[str]) -> str:
    """The path as text; the library takes no other.

    Raises:
        BadRequest: it is of bytes, or no path at all.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise BadRequest(
            f"from_pretrained: path has to be a str or a pathlib.Path, not {type(given).__name__}; "
            "os.fsdecode makes text of bytes"
        )
    return given


def refuse_adapter(folder: Path) -> None:
    """The library would load a base model from elsewhere and put the adapter into it.

    Raises:
        UsageError: the folder holds an adapter.
    """
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"from_pretrained: {folder} holds an adapter; load its base model from here and then "
            "the adapter beside it, with model.load_adapter"
        )


def require_same_files(plan: CheckpointPlan, config: Any, path: Path) -> None:
    """Refuse a folder of which the library would read other files than the broker's loader.

    The library reads what the configuration's `transformers_weights` names, otherwise
    model.safetensors, otherwise what model.safetensors.index.json lists; and the files that the
    configuration's class names as `extra_files`.

    Raises:
        UsageError: names the file.
    """
    if not path.is_dir():
        return  # one file, named by the caller
    chosen = plan.index.name if plan.index is not None else ", ".join(f.name for f in plan.shards)
    named = getattr(config, "transformers_weights", None)
    if named is not None and named != chosen:
        raise UsageError(
            f"from_pretrained: transformers_weights of the configuration names {named!r}, and the "
            f"broker would load {chosen!r} of {str(path)!r}; put what is meant into a folder "
            f"of its own, as {SINGLE_FILE} or with {INDEX_FILE}, without transformers_weights"
        )
    if named is None and chosen not in (SINGLE_FILE, INDEX_FILE):
        raise UsageError(
            f"from_pretrained: {str(path)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}, and the "
            f"library reads no others; name {chosen!r} as transformers_weights in config.json, if "
            "it is one file that is meant, or rename it"
        )
    for extra in getattr(type(config), "extra_files", ()):
        if (path / extra).exists():
            raise UsageError(
                f"from_pretrained: the library would also read {extra!r} of {str(path)!r}, which "
                "the broker does not load; load this model privately and share it with "
                "client.get_or_publish"
            )


def with_stored_dtype(chosen: Chosen, plan: CheckpointPlan, path: Path) -> Chosen:
    """The same choice, with the dtype that the library takes from the files if nothing else says.

    That is what the index names, otherwise the dtype of the first floating tensor of the first
    file, in the library's own order. Reads a header.
    """
    options = chosen.options
    asked = [options.get(name) for name in ("dtype", "torch_dtype")]
    said = next((dtype for dtype in asked if dtype is not None), "auto")
    if said != "auto" or getattr(chosen.config, "dtype", None) is not None:
        return chosen
    folder = path if path.is_dir() else path.parent
    dtype = _dtype_in_index(plan, folder) or _dtype_in_file(folder / plan.shards[0].name)
    return chosen._replace(options={**options, "dtype": dtype})


def _dtype_in_index(plan: CheckpointPlan, folder: Path) -> Any:
    if plan.index is None:
        return None
    return (json.loads((folder / plan.index.name).read_bytes()).get("metadata") or {}).get("dtype")


def _dtype_in_file(file: Path) -> Any:
    from transformers import modeling_utils

    library: Any = modeling_utils
    return library.get_state_dict_dtype(library.load_state_dict(str(file), map_location="meta"))
