"""Whose weights the files in a folder are, and that recognising them opens none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from broker.errors import LoadFailed
from engine_client.integrations.vllm.files import (
    Files,
    content_identity,
    look_at,
    require_unchanged,
)
from tests.support.opens import Opens
from tests.support.safetensors_files import SINGLE, stored, write_file, write_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "llama")


def checkpoint(folder: Path, seed: int = 0) -> Path:
    folder.mkdir()
    write_file(folder / SINGLE, [stored("a", seed=seed)])
    return folder


def files_of(folder: Path, *names: str) -> Files:
    return look_at(str(folder), names or (SINGLE,))


def identity(folder: Path, *names: str) -> str:
    return content_identity(files_of(folder, *names), 1, lambda _done, _total: None)


def test_files_are_recognised_without_being_opened(folder: Path) -> None:
    """By the kernel's word on them; reading them for their identity is seen."""
    with Opens(folder) as opens:
        assert files_of(folder) == files_of(folder)
    assert opens.weight_files == []
    with Opens(folder) as opens:
        (folder / SINGLE).read_bytes()
        (folder / SINGLE).read_bytes()
        identity(folder)
    assert len(opens.weight_files) > 2


def test_the_same_bytes_elsewhere_are_the_same_weights(folder: Path, tmp_path: Path) -> None:
    """Under another name of files, of one identity."""
    other = tmp_path / "copied"
    shutil.copytree(folder, other)
    assert files_of(other).name != files_of(folder).name
    assert identity(other) == identity(folder)


def test_equal_headers_are_not_the_same_weights(folder: Path, tmp_path: Path) -> None:
    """Other bytes: another name and another identity."""
    twin = checkpoint(tmp_path / "twin", seed=1)
    assert (twin / SINGLE).stat().st_size == (folder / SINGLE).stat().st_size
    assert files_of(twin).name != files_of(folder).name
    assert identity(twin) != identity(folder)


def test_a_file_rewritten_in_place_has_another_name(folder: Path) -> None:
    """Although size, inode and modification time are what they were."""
    before = files_of(folder)
    status = (folder / SINGLE).stat()
    with (folder / SINGLE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(folder / SINGLE, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files_of(folder).name != before.name
    with pytest.raises(LoadFailed, match="changed while they were being read"):
        require_unchanged(before)


def test_an_index_counts_as_a_file(tmp_path: Path) -> None:
    """It decides what is loaded, so a change of it is a change."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    write_shards(folder, [[stored("a")], [stored("b")]])
    shards = [path.name for path in folder.glob("*.safetensors")]
    before = files_of(folder, *shards)
    assert identity(folder, *shards).startswith("blake3:")
    index = next(folder.glob("*.index.json"))
    index.write_text(index.read_text() + " ")
    assert files_of(folder, *shards).name != before.name


def test_files_that_vllm_would_not_load_alike_are_refused(folder: Path) -> None:
    """Its choice must be the one that the identity is of."""
    write_file(folder / "consolidated.safetensors", [stored("b")])
    with pytest.raises(LoadFailed, match=r"other files .*\(consolidated.safetensors\)"):
        identity(folder, SINGLE, "consolidated.safetensors")


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    """As a sentence, not as an OSError."""
    with pytest.raises(LoadFailed, match="llama"):
        files_of(folder, "gone.safetensors")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("llama", "vllm:llama:"),
        ("models--org--llama/snapshots/" + "0123456789" * 4, "vllm:org/llama:"),
    ],
)
def test_a_name_begins_with_the_models_own(tmp_path: Path, path: str, label: str) -> None:
    """Also in a Hugging Face cache, whose folders are called by revisions."""
    folder = tmp_path / path
    folder.parent.mkdir(parents=True, exist_ok=True)
    assert files_of(checkpoint(folder)).name.startswith(label)
