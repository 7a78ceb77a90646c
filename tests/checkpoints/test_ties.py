"""Head and embedding that a configuration ties and a file stores twice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from broker.checkpoints.identity import CHUNK_BYTES
from broker.errors import LoadFailed
from tests.checkpoints.loading import load, plan_of
from tests.support.safetensors_files import (
    SINGLE,
    Stored,
    stored,
    write_config,
    write_file,
    write_shards,
)

A, B = stored("a.weight"), stored("b.weight", "BF16", (6,))
EMBEDDING = stored("model.embed_tokens.weight", shape=(8, 4))
HEAD = EMBEDDING._replace(name="lm_head.weight")


def refusal(path: Path) -> LoadFailed:
    with pytest.raises(LoadFailed) as caught:
        plan_of(path)
    return caught.value


def tied(folder: Path, tensors: list[Stored], **config: Any) -> Path:
    write_file(folder / SINGLE, [A, *tensors, B])
    write_config(folder, **(config or {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
@pytest.mark.parametrize(
    ("head", "embedding"),
    [
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "transformer.wte.weight"),
        ("embed_out.weight", "gpt_neox.embed_in.weight"),
        ("model.language_model.lm_head.weight", "word_embeddings.weight"),
    ],
)
def test_equal_bytes_become_one_storage(
    head: str, embedding: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Head and embedding that are tied and stored twice share one slot under both names."""
    tensors = [EMBEDDING._replace(name=head), EMBEDDING._replace(name=embedding)]
    loaded = load(tied(tmp_path, tensors, **config))
    (alias,) = loaded.plan.manifest.aliases
    assert set(alias.names) == {head, embedding}
    assert alias.nbytes == len(EMBEDDING.data)
    found = loaded.tensors()
    assert found[head] == found[embedding] == ("float32", (8, 4), EMBEDDING.data)
    assert loaded.plan.total_bytes == len(A.data) + len(EMBEDDING.data) + len(B.data)


def test_ties_across_shards(tmp_path: Path) -> None:
    """The head may lie in another file than the embedding."""
    write_shards(tmp_path, [[EMBEDDING, A], [B, HEAD]])
    write_config(tmp_path, tie_word_embeddings=True)
    loaded = load(tmp_path)
    assert len(loaded.plan.manifest.aliases) == 1
    assert loaded.tensors()["lm_head.weight"][2] == EMBEDDING.data


def test_several_embeddings_of_one_head(tmp_path: Path) -> None:
    """An encoder-decoder that stores its one matrix under four names keeps one storage."""
    names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    tensors = [EMBEDDING._replace(name=name) for name in [*names, "lm_head.weight"]]
    manifest = plan_of(tied(tmp_path, tensors)).manifest
    (alias,) = manifest.aliases
    assert set(alias.names) == {*names, "lm_head.weight"}


def test_different_bytes_are_refused(tmp_path: Path) -> None:
    """Tied by the configuration, different in the file: refused by both names."""
    other = stored("lm_head.weight", shape=(8, 4), seed=9)
    error = refusal(tied(tmp_path, [EMBEDDING, other]))
    assert error.reason == "tie_conflict"
    assert error.tensor == "lm_head.weight"
    assert EMBEDDING.name in error.sentence
    assert "lm_head.weight" in error.sentence


def test_the_last_byte_of_a_large_matrix_counts(tmp_path: Path) -> None:
    """Comparison does not stop at the first megabytes."""
    matrix = stored("wte.weight", "U8", (2 * CHUNK_BYTES + 5,))
    other = matrix._replace(name="lm_head.weight", data=matrix.data[:-1] + b"\0")
    assert refusal(tied(tmp_path, [matrix, other])).reason == "tie_conflict"


def test_untied_by_the_configuration(tmp_path: Path) -> None:
    """Without the flag, equal bytes stay two storages."""
    plan = plan_of(tied(tmp_path, [EMBEDDING, HEAD], tie_word_embeddings=False))
    assert plan.manifest.aliases == []


@pytest.mark.parametrize(
    "head",
    [stored("lm_head.weight", shape=(9, 4)), stored("lm_head.weight", "BF16", (8, 4))],
)
def test_another_shape_or_dtype_cannot_be_tied(
    head: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that could not be the embedding is loaded as it is stored, with a warning."""
    with caplog.at_level(logging.WARNING):
        loaded = load(tied(tmp_path, [EMBEDDING, head]))
    assert loaded.plan.manifest.aliases == []
    assert loaded.tensors()["lm_head.weight"][2] == head.data
    assert "tie_word_embeddings" in caplog.text


def test_head_absent(tmp_path: Path) -> None:
    """The usual case: a tied head is not stored, and nothing is to be done."""
    plan = plan_of(tied(tmp_path, [EMBEDDING]))
    assert plan.manifest.aliases == []
