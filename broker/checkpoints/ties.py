"""Tied weights that a checkpoint stores twice: the output head and the input embedding.

A configuration with `tie_word_embeddings` means one matrix under two names. Usually only one is
stored. Where both are, equal bytes become one storage. Different bytes are refused: the
configuration says one thing and the file another, libraries disagree about who is right, and
whoever is bound last must not decide. A head of another dtype or shape than every embedding cannot
be tied to one; it is loaded as it is stored, and a warning says so (binding compares shapes again).

Imports neither zmq nor torch.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

from broker.checkpoints.exact import read_exactly
from broker.checkpoints.faults import load_failed, quoted
from broker.checkpoints.files import open_regular
from broker.checkpoints.header import StoredTensor
from broker.checkpoints.identity import CHUNK_BYTES
from broker.checkpoints.stability import require_unchanged
from broker.errors import LoadFailed
from broker.wire import FileStamp

_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "proj_out.weight",
    "lm_head.decoder.weight",
    "predictions.decoder.weight",
    "vocab_projector.weight",
    "generator_lm_head.weight",
)
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "shared.weight",
    "tok_embeddings.weight",
)
"""The last components of the names that transformers' models use (`_tied_weights_keys`)."""

_log = logging.getLogger(__name__)


def find_ties(
    folder: int, stamps: list[FileStamp], files: list[list[StoredTensor]]
) -> dict[str, str]:
    """For each tensor that needs no storage of its own, the tensor whose storage it shares.

    `files[i]` are the tensors taken from the file of `stamps[i]`. Reads both tensors where head and
    embedding are stored with equal dtype and shape; for a configuration that ties only.

    Raises:
        LoadFailed: "tie_conflict": both stored, and different; or a file changed or ended early.
    """
    heads = _named(files, _HEADS)
    embeddings = _named(files, _EMBEDDINGS)
    shared: dict[str, str] = {}
    for number, head in heads:
        alike = [place for place in embeddings if _same_layout(place[1], head)]
        equal = [
            tensor.name
            for other, tensor in alike
            if _same_bytes(folder, (stamps[number], head), (stamps[other], tensor))
        ]
        if alike and not equal:
            raise _conflict(stamps[number].name, head, alike[0][1])
        if not equal:
            _warn(head, embeddings)
            continue
        storage = shared.get(equal[0], equal[0])
        shared.update({name: storage for name in [head.name, *equal] if name != storage})
    return shared


def _named(
    files: list[list[StoredTensor]], endings: tuple[str, ...]
) -> list[tuple[int, StoredTensor]]:
    dotted = tuple("." + ending for ending in endings)
    return [
        (number, tensor)
        for number, tensors in enumerate(files)
        for tensor in tensors
        if tensor.nbytes and (tensor.name in endings or tensor.name.endswith(dotted))
    ]


def _same_layout(one: StoredTensor, other: StoredTensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _same_bytes(
    folder: int, one: tuple[FileStamp, StoredTensor], other: tuple[FileStamp, StoredTensor]
) -> bool:
    with ExitStack() as opened:
        sources = []
        for planned, tensor in (one, other):
            descriptor = open_regular(folder, planned.name)
            opened.callback(os.close, descriptor)
            require_unchanged(descriptor, planned)
            sources.append((descriptor, planned.name, tensor))
        return all(
            _range(*sources[0], at) == _range(*sources[1], at)
            for at in range(0, one[1].nbytes, CHUNK_BYTES)
        )


def _range(descriptor: int, file: str, tensor: StoredTensor, at: int) -> bytearray:
    data = bytearray(min(CHUNK_BYTES, tensor.nbytes - at))
    read_exactly(descriptor, [memoryview(data)], tensor.offset + at, file=file, tensor=tensor.name)
    return data


def _conflict(file: str, head: StoredTensor, embedding: StoredTensor) -> LoadFailed:
    return load_failed(
        "tie_conflict",
        f"config.json says tie_word_embeddings, but {quoted(head.name)} in {quoted(file)} and "
        f"{quoted(embedding.name)} are stored with different bytes; set tie_word_embeddings to "
        "false if they are meant to differ, or remove the head",
        file=file,
        tensor=head.name,
        tensors=[head.name, embedding.name],
    )


def _warn(head: StoredTensor, embeddings: list[tuple[int, StoredTensor]]) -> None:
    if embeddings:
        _log.warning(
            "config.json says tie_word_embeddings, but %s has another dtype or shape than %s; "
            "both are loaded as they are stored",
            quoted(head.name),
            quoted(embeddings[0][1].name),
        )
