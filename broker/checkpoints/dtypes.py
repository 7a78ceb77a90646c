"""Which tensors of a checkpoint are converted as they are loaded, and to what.

Pure: imports neither zmq nor torch nor numpy; `conversion` does the arithmetic.
"""

from __future__ import annotations

from typing import Any

import msgspec

from broker.checkpoints.faults import load_failed, quoted
from broker.checkpoints.header import StoredTensor
from broker.weights import CONVERTIBLE, tensor_nbytes
from broker.wire import Conversion, FileStamp

_FLOATING = ("float", "bfloat")


def plan_conversion(
    shards: list[FileStamp],
    files: list[list[StoredTensor]],
    ties: dict[str, str],
    conversion: Conversion,
    quantization: dict[str, Any] | None,
) -> tuple[list[list[StoredTensor]], dict[str, str]]:
    """The tensors as they will lie in the slab, and which of them still share a slot.

    Floating-point tensors get the conversion's dtype, those it names another one; whole numbers,
    booleans and complex numbers stay as they are, as `torch.nn.Module.to(dtype)` has it.

    Raises:
        LoadFailed: "conversion": the weights are quantised, or a tensor is of a dtype that is not
            converted, or an exception names a tensor that is not there.
    """
    if quantization is not None:
        raise load_failed(
            "conversion",
            f"the weights are quantised, so converting them to {conversion.dtype} would change "
            "what their numbers mean; ask for them as they are stored",
            file=shards[0].name if shards else "",
        )
    exceptions = dict(conversion.exceptions)
    present = {tensor.name for tensors in files for tensor in tensors}
    unknown = sorted(exceptions.keys() - present)
    if unknown:
        raise load_failed(
            "conversion",
            f"{quoted(unknown[0])} was to get a dtype of its own, but there is no such tensor",
            file=shards[0].name if shards else "",
            tensor=unknown[0],
        )
    converted = [
        [
            _converted(shard.name, tensor, exceptions.get(tensor.name, conversion.dtype))
            for tensor in tensors
        ]
        for shard, tensors in zip(shards, files, strict=True)
    ]
    dtypes = {tensor.name: tensor.dtype for tensors in converted for tensor in tensors}
    return converted, {one: twin for one, twin in ties.items() if dtypes[one] == dtypes[twin]}


def _converted(file: str, tensor: StoredTensor, dtype: str) -> StoredTensor:
    if tensor.dtype == dtype or not tensor.dtype.startswith(_FLOATING):
        return tensor
    if tensor.dtype not in CONVERTIBLE:
        raise load_failed(
            "conversion",
            f"tensor {quoted(tensor.name)} in {quoted(file)} is {tensor.dtype}, which is not "
            f"converted to {dtype} (possible: {', '.join(CONVERTIBLE)}); ask for the weights as "
            "they are stored",
            file=file,
            tensor=tensor.name,
        )
    nbytes = tensor_nbytes(dtype, list(tensor.shape))
    return msgspec.structs.replace(tensor, dtype=dtype, nbytes=nbytes, stored=tensor.dtype)
