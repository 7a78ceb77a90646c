"""Which tensors of which shard make up a checkpoint.

Where an index names a tensor's shard, the index decides: the same name in another shard is left
out. A tensor that no line of the index mentions is loaded too, as transformers and vLLM do, with a
warning. If a tensor that no index settles lies in two shards, it is not clear which is meant and
the checkpoint is refused, equal bytes or not. The index's total size is advisory.

Imports neither zmq nor torch.
"""

from __future__ import annotations

import logging

from broker.checkpoints.faults import load_failed, quoted
from broker.checkpoints.files import WeightFiles
from broker.checkpoints.header import StoredTensor
from broker.errors import LoadFailed

_NAMES_SHOWN = 5

_log = logging.getLogger(__name__)


def choose_tensors(
    files: WeightFiles, stored: list[list[StoredTensor]], path: str
) -> list[list[StoredTensor]]:
    """The tensors to take from each shard; `stored[i]` is all that `files.shards[i]` has.

    Raises:
        LoadFailed: "missing_tensor": a shard lacks what the index says it has; "ambiguous_tensor".
    """
    chosen = stored
    if files.weight_map is not None:
        _require_mapped(files.weight_map, files.shards, stored)
        chosen = [
            [tensor for tensor in tensors if files.weight_map.get(tensor.name, shard) == shard]
            for shard, tensors in zip(files.shards, stored, strict=True)
        ]
    _require_unique(files.shards, chosen)
    _warn(files, stored, chosen, path)
    return chosen


def _require_mapped(
    weight_map: dict[str, str], shards: list[str], stored: list[list[StoredTensor]]
) -> None:
    present = {
        shard: {tensor.name for tensor in tensors}
        for shard, tensors in zip(shards, stored, strict=True)
    }
    missing = [name for name, shard in weight_map.items() if name not in present[shard]]
    if missing:
        raise load_failed(
            "missing_tensor",
            f"{quoted(weight_map[missing[0]])} has not got {_some(missing)}, which the index says "
            "it has; download index and shards again",
            file=weight_map[missing[0]],
            tensor=missing[0],
        )


def _require_unique(shards: list[str], chosen: list[list[StoredTensor]]) -> None:
    if len(shards) == 1:
        return
    seen: dict[str, str] = {}
    for shard, tensors in zip(shards, chosen, strict=True):
        for tensor in tensors:
            first = seen.setdefault(tensor.name, shard)
            if first is not shard:
                raise _ambiguous(tensor.name, first, shard)


def _ambiguous(tensor: str, first: str, second: str) -> LoadFailed:
    return load_failed(
        "ambiguous_tensor",
        f"tensor {quoted(tensor)} is in {quoted(first)} and in {quoted(second)}, and no index says "
        "which is meant; add the index or remove the shard that is left over",
        file=second,
        tensor=tensor,
    )


def _warn(
    files: WeightFiles,
    stored: list[list[StoredTensor]],
    chosen: list[list[StoredTensor]],
    path: str,
) -> None:
    """Say what is odd about an index but settles nothing."""
    weight_map = files.weight_map
    if weight_map is None:
        return
    if sum(map(len, chosen)) > len(weight_map):
        unlisted = [t.name for tensors in chosen for t in tensors if t.name not in weight_map]
        _log.warning("the index of %s does not list %s; loaded too", path, _some(unlisted))
    nbytes = sum(tensor.nbytes for tensors in stored for tensor in tensors)
    if files.total_size is not None and files.total_size != nbytes:
        _log.warning(
            "the index of %s announces %s bytes, its shards have %d; the shards decide",
            path,
            files.total_size,
            nbytes,
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(quoted, names[:_NAMES_SHOWN]))
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
