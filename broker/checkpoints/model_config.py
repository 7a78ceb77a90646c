"""What a checkpoint's config.json says that matters before a byte is loaded.

Imports neither zmq nor torch.
"""

from __future__ import annotations

import json
import os
from typing import Any

from broker.checkpoints.faults import load_failed, quoted, told_of
from broker.checkpoints.files import OpenCheckpoint, open_regular
from broker.checkpoints.index import read_small_file

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 << 20
"""Far above any seen; the label maps of large classifiers have some hundred kB."""

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def config_of(checkpoint: OpenCheckpoint) -> dict[str, Any] | None:
    """As `read_config`, of a checkpoint that errors name."""
    with told_of(checkpoint.path):
        return read_config(checkpoint.folder)


def read_config(folder: int) -> dict[str, Any] | None:
    """The checkpoint's config.json, or None if there is none. Blocks on the file.

    Raises:
        LoadFailed: "bad_config": it is there but is no JSON object; a guess about ties or
            quantisation could mean wrong weights.
    """
    if not _is_there(folder):
        return None
    descriptor = open_regular(folder, CONFIG_FILE)
    try:
        data = read_small_file(descriptor, CONFIG_FILE, MAX_CONFIG_BYTES, "bad_config")
    finally:
        os.close(descriptor)
    try:
        # Infinity and NaN are let through: Python's own writer puts them into configurations.
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _bad(f"is not JSON ({quoted(str(error))[1:-1]})") from error
    if not isinstance(config, dict):
        raise _bad("is JSON but not an object")
    return config


def _is_there(folder: int) -> bool:
    try:
        os.lstat(CONFIG_FILE, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _bad(what: str) -> Exception:
    return load_failed(
        "bad_config", f"{quoted(CONFIG_FILE)} {what}; download it again", file=CONFIG_FILE
    )


def quantization_of(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The quantisation settings wherever configurations have them, or None for plain weights.

    Anything but an object is handed on as {"quant_method": text}, so that it is refused by name
    rather than overlooked.
    """
    for part in _parts(config):
        for key in _QUANTIZATION_KEYS:
            value = part.get(key)
            if isinstance(value, dict):
                return value
            if value is not None:
                return {"quant_method": str(value)}
    return None


def says_tied(config: dict[str, Any] | None) -> bool:
    """Whether the configuration asks for the output head to be the input embedding."""
    return any(part.get("tie_word_embeddings") is True for part in _parts(config))


def _parts(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The configuration, and its text model's where it is of several models."""
    if config is None:
        return []
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]
