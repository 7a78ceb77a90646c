"""From settings to a key, and from a set that was mapped back to the settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from broker.errors import Mismatch
from broker.weights import WeightKey
from engine_client.integrations.vllm.plain import as_text

METADATA = "vllm_settings"
"""Where in a set's metadata the settings are."""

_DIGITS = 32
_LONGEST = 1024
"""Bytes of one setting in the metadata: that is limited, and every engine reads it."""


def weight_key(settings: Mapping[str, Any], quantization: str, checkpoint: str = "") -> WeightKey:
    """The key of one rank's weights.

    The format has a digest of all settings; layout and quantisation are in it too and stand beside
    it for people. The dtype is left to the tensors.

    Args:
        checkpoint: the content identity, or "" to find a set by the name of its files.
    """
    digest = blake3(as_text(settings)).hexdigest()[:_DIGITS]
    layout = {name: size for name, size in settings["layout"].items() if _is_told(name, settings)}
    return WeightKey(
        device="",
        checkpoint=checkpoint,
        layout=layout,
        format=f"vllm-{settings['vllm']}-{settings['stage']}-{settings['role']}-{digest}",
        quantization=quantization,
    )


def _is_told(name: str, settings: Mapping[str, Any]) -> bool:
    """Groups of one rank would only make the key longer."""
    group = name.rpartition("_")[0]
    return bool(settings["layout"].get(f"{group}_size", 1) != 1)


def summary(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a set's metadata; of long ones (model configurations) a digest."""
    told = {}
    for name, value in settings.items():
        text = as_text(value)
        told[name] = value if len(text) <= _LONGEST else f"blake3:{blake3(text).hexdigest()}"
    return told


def require_same(ours: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Make sure that a set was published with exactly the settings of this summary.

    The key has said so already; this is for the day when it does not.

    Raises:
        Mismatch: names what differs.
    """
    theirs = metadata.get(METADATA)
    theirs = theirs if isinstance(theirs, dict) else {}
    names = sorted({*ours, *theirs})
    differing = {
        name: {"wanted": ours.get(name), "resident": theirs.get(name)}
        for name in names
        if ours.get(name) != theirs.get(name)
    }
    if differing:
        raise Mismatch(
            f"the resident weights were made with other settings of vLLM: {', '.join(differing)} "
            "differ; evict them",
            differing=differing,
        )
