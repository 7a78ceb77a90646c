"""Which files a checkpoint consists of, and what is said where that cannot be known."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.checkpoints.files import WeightFiles, open_checkpoint, weight_files
from broker.errors import BrokerError, LoadFailed, NotFound
from tests.support.safetensors_files import (
    INDEX,
    SINGLE,
    shard_name,
    stored,
    write_file,
    write_index,
    write_shards,
)

NOBODY = 65534
DESCRIPTORS = Path("/proc/self/fd")
A = [stored("a.weight")]
B = [stored("b.weight")]


def found(path: Path | str) -> WeightFiles:
    with open_checkpoint(path) as checkpoint:
        files = weight_files(checkpoint.folder, checkpoint.only, checkpoint.path)
        assert files == checkpoint.files
        return files


def refusal(path: Path | str, kind: type[BrokerError] = LoadFailed) -> BrokerError:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    return caught.value


def test_one_file(tmp_path: Path) -> None:
    """`model.safetensors` is the checkpoint, whatever lies beside it or below."""
    write_file(tmp_path / SINGLE, A)
    write_file(tmp_path / "model.fp16.safetensors", B)
    write_file(tmp_path / "._model.safetensors", B)
    write_file(tmp_path / "original" / SINGLE, B)
    for name in (SINGLE + ".lock", SINGLE + ".tmp", "readme.safetensors.json", "weights.bin"):
        (tmp_path / name).write_text("not weights")
    assert found(tmp_path) == WeightFiles(None, [SINGLE])


def test_one_file_before_an_index(tmp_path: Path) -> None:
    """Where both lie there, the single file counts, as it does for transformers."""
    write_shards(tmp_path, [A, B])
    write_file(tmp_path / SINGLE, A)
    assert found(tmp_path).shards == [SINGLE]


def test_index(tmp_path: Path) -> None:
    """The index names the shards; other files do not matter."""
    write_shards(tmp_path, [A, B])
    write_file(tmp_path / "other.safetensors", A)
    files = found(tmp_path)
    assert files.index == INDEX
    assert files.shards == [shard_name(1, 2), shard_name(2, 2)]
    assert files.weight_map == {"a.weight": shard_name(1, 2), "b.weight": shard_name(2, 2)}
    assert files.names == [INDEX, *files.shards]


def test_shards_without_an_index(tmp_path: Path) -> None:
    """Numbered shards are a checkpoint without an index too, if all are there."""
    write_shards(tmp_path, [A, B], index=False)
    assert found(tmp_path) == WeightFiles(None, [shard_name(1, 2), shard_name(2, 2)])


def test_shards_without_an_index_must_be_complete(tmp_path: Path) -> None:
    """All missing ones are named."""
    write_shards(tmp_path, [A, B, A, B], index=False)
    for number in (2, 4):
        (tmp_path / shard_name(number, 4)).unlink()
    error = refusal(tmp_path)
    assert error.reason == "missing_shard"
    assert error.missing == [shard_name(2, 4), shard_name(4, 4)]
    assert all(name in error.sentence for name in error.missing)


def test_shards_of_two_checkpoints(tmp_path: Path) -> None:
    """Shards of two totals without an index are not guessed at."""
    write_shards(tmp_path, [A, B], index=False)
    write_shards(tmp_path, [A, B, A], index=False)
    error = refusal(tmp_path)
    assert error.reason == "ambiguous_files"
    assert "index" in error.sentence


def test_the_only_other_file(tmp_path: Path) -> None:
    """One safetensors file of another name is the checkpoint."""
    write_file(tmp_path / "adapter_model.safetensors", A)
    assert found(tmp_path).shards == ["adapter_model.safetensors"]


def test_several_other_files(tmp_path: Path) -> None:
    """Of several, none is chosen; they are named."""
    write_file(tmp_path / "one.safetensors", A)
    write_file(tmp_path / "two.safetensors", A)
    error = refusal(tmp_path)
    assert error.reason == "ambiguous_files"
    assert "one.safetensors" in error.sentence
    assert "two.safetensors" in error.sentence


def test_a_variant_is_never_taken_unasked(tmp_path: Path) -> None:
    """A variant alone is no checkpoint, but can be asked for by its path."""
    path = write_file(tmp_path / "model.fp16.safetensors", A)
    error = refusal(tmp_path, NotFound)
    assert error.reason == "no_weights"
    assert path.name in error.sentence
    assert found(path).shards == [path.name]


def test_path_of_one_file(tmp_path: Path) -> None:
    """A file asked for by its path is the checkpoint, whatever lies beside it."""
    write_file(tmp_path / SINGLE, A)
    path = write_file(tmp_path / "other.safetensors", B)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.only == "other.safetensors"
        assert checkpoint.path == str(path)
        assert checkpoint.files == WeightFiles(None, ["other.safetensors"])
        assert not os.get_inheritable(checkpoint.folder)


def test_path_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare file name is looked for where the process is."""
    write_file(tmp_path / SINGLE, A)
    monkeypatch.chdir(tmp_path)
    assert found(SINGLE).shards == [SINGLE]


def test_path_of_an_index(tmp_path: Path) -> None:
    """An index asked for by its path counts as the files it names."""
    write_shards(tmp_path, [A, B])
    (tmp_path / INDEX).rename(tmp_path / "model.other.safetensors.index.json")
    files = found(tmp_path / "model.other.safetensors.index.json")
    assert files.shards == [shard_name(1, 2), shard_name(2, 2)]


def test_links_are_followed(tmp_path: Path) -> None:
    """A Hugging Face cache is a folder of links to files named by their hash."""
    blob = write_file(tmp_path / "blobs" / "0123abc", A)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE).symlink_to(blob)
    assert found(snapshot).shards == [SINGLE]
    assert found(snapshot / SINGLE).shards == [SINGLE]


def test_a_link_to_nothing(tmp_path: Path) -> None:
    """An interrupted download leaves links to files that are not there yet."""
    (tmp_path / SINGLE).symlink_to(tmp_path / "absent")
    error = refusal(tmp_path)
    assert error.reason == "missing_shard"
    assert SINGLE in error.sentence


@pytest.mark.parametrize(
    "name", ["absent", "absent/deeper", "file/below", "", "nul\0byte", "n" * 300, "loop"]
)
def test_a_path_where_nothing_is(name: str, tmp_path: Path) -> None:
    """A path without a file is not found, and the sentence names it."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    path = f"{tmp_path}/{name}" if name else ""
    with pytest.raises(NotFound, match=r"no checkpoint.*; check the path$") as caught:
        open_checkpoint(path)
    assert caught.value.path == path


@pytest.mark.parametrize("path", ["~/models", "~nobody/models"])
def test_a_path_from_a_home(path: str) -> None:
    """Only a shell expands it."""
    assert refusal(path, NotFound).sentence.endswith(
        "; `~` is not expanded here: give the whole path"
    )


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("./m", False),
        ("../m", False),
        ("/m/n", False),
        ("a/b/c", False),
        ("m", False),
        ("m/config.json", False),
        ("m/model.safetensors", False),
    ],
)
def test_an_id_of_a_hub(path: str, is_id: bool) -> None:
    """Nothing is downloaded, which only somebody who gave an id has to be told."""
    said = refusal(path, NotFound).sentence
    assert said.endswith("download it first: only local folders are read") == is_id


def test_a_path_that_is_not_text(tmp_path: Path) -> None:
    """Bytes in a path that are not UTF-8 are shown in a form any message can carry."""
    folder = tmp_path / os.fsdecode(b"m\xff")
    write_file(folder / SINGLE, A)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.path.endswith("m\\xff")
        checkpoint.path.encode()


@pytest.mark.parametrize("name", ["m\udcff.safetensors", "a/b.safetensors", "..", "", "n\0l"])
def test_a_name_that_is_no_plain_name(name: str, tmp_path: Path) -> None:
    """What a client sends as the one file is checked again by the loader."""
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(LoadFailed, match="not a plain file name"):
            weight_files(folder, name, str(tmp_path))
    finally:
        os.close(folder)


def test_an_empty_folder(tmp_path: Path) -> None:
    """A folder without weights is refused with what it has."""
    assert refusal(tmp_path, NotFound).reason == "no_weights"
    (tmp_path / "config.json").write_text("{}")
    error = refusal(tmp_path, NotFound)
    assert error.reason == "no_weights"
    assert "config.json" in error.sentence
    assert str(tmp_path) in error.sentence


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "w.pkl"]
)
def test_only_pickles(name: str, tmp_path: Path) -> None:
    """Weights that are only there as pickles are refused and not opened."""
    os.mkfifo(tmp_path / name)  # opening it would block for ever
    error = refusal(tmp_path)
    assert error.reason == "unsafe_pickle"
    assert name in error.sentence
    assert (
        "convert it to safetensors: for a class of transformers, from_pretrained" in error.sentence
    )


def test_a_pickle_by_its_path(tmp_path: Path) -> None:
    """A pickle asked for by its path is refused for what it is."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"")
    assert refusal(path).reason == "unsafe_pickle"


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    """By a short path: the test's own may be longer than a socket's may be."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{DESCRIPTORS}/{folder}/{path.name}")
    finally:
        os.close(folder)


@pytest.mark.parametrize("make", [make_fifo, make_folder, make_device, make_socket])
@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_weights_that_are_no_regular_file(name: str, make: Any, tmp_path: Path) -> None:
    """A FIFO, folder, device or socket in a file's place is refused at once."""
    make(tmp_path / name)
    error = refusal(tmp_path)
    assert error.reason in ("not_a_file", "unreadable")
    assert name in error.sentence


@pytest.mark.parametrize("make", [make_fifo, make_device])
def test_a_path_of_no_regular_file(make: Any, tmp_path: Path) -> None:
    """A FIFO or device asked for by its path is refused without being opened."""
    make(tmp_path / "odd")
    assert refusal(tmp_path / "odd").reason == "not_a_file"


@contextmanager
def without_root() -> Iterator[None]:
    """Root may open everything, so what follows runs as nobody if the tests run as root."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def anybodys_folder() -> Iterator[Path]:
    """A folder whose owner is not root: pytest's own lie below one that only root may enter."""
    with tempfile.TemporaryDirectory() as name:
        if os.getuid() == 0:
            os.chown(name, NOBODY, -1)
        yield Path(name)


@pytest.mark.parametrize("what", [".", SINGLE, INDEX])
def test_what_may_not_be_read(what: str, anybodys_folder: Path) -> None:
    """A folder or file without permission is refused, and the permission is named."""
    if what == ".":
        write_file(anybodys_folder / SINGLE, A)
    else:
        (anybodys_folder / what).touch()
    (anybodys_folder / what).chmod(0)
    with without_root():
        error = refusal(anybodys_folder)
    (anybodys_folder / what).chmod(0o700)
    assert error.reason == "unreadable"
    assert "Permission denied" in error.sentence


BAD_INDICES: dict[str, tuple[str, str]] = {
    "LFS pointer": ("bad_index", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "not JSON": ("bad_index", "weights!"),
    "not UTF-8": ("bad_index", "\udcff"),
    "a list": ("bad_index", "[]"),
    "nested deeply": ("bad_index", "[" * 100_000),
    "no weight_map": ("bad_index", '{"metadata":{"total_size":1}}'),
    "weight_map is a list": ("bad_index", '{"weight_map":["a"]}'),
    "weight_map is empty": ("bad_index", '{"weight_map":{}}'),
    "numbers for files": ("bad_index", '{"weight_map":{"a":7,"b":null}}'),
    "tensor twice": ("bad_index", '{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}'),
    "half a pair": ("bad_index", '{"weight_map":{"a\\ud800":"x.safetensors"}}'),
    "file above": ("bad_index", '{"weight_map":{"a":"../x.safetensors"}}'),
    "file below": ("bad_index", '{"weight_map":{"a":"sub/x.safetensors"}}'),
    "file elsewhere": ("bad_index", '{"weight_map":{"a":"/etc/x.safetensors"}}'),
    "no file": ("bad_index", '{"weight_map":{"a":""}}'),
    "name with NUL": ("bad_index", '{"weight_map":{"a":"x\\u0000.safetensors"}}'),
    "another kind of file": ("bad_index", '{"weight_map":{"a":"config.json"}}'),
    "pickles": ("unsafe_pickle", '{"weight_map":{"a":"pytorch_model-00001-of-00002.bin"}}'),
    "nothing": ("bad_index", ""),
}


@pytest.mark.parametrize("what", BAD_INDICES)
def test_a_bad_index_is_never_passed_over(what: str, tmp_path: Path) -> None:
    """An index that is not one is refused, although all shards lie beside it."""
    reason, text = BAD_INDICES[what]
    write_shards(tmp_path, [A, B])
    (tmp_path / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    error = refusal(tmp_path)
    assert error.reason == reason
    assert INDEX in error.sentence


def test_an_endless_index(tmp_path: Path) -> None:
    """An index larger than any is refused without being read whole."""
    (tmp_path / INDEX).write_bytes(b"{}")
    os.truncate(tmp_path / INDEX, 1 << 40)
    error = refusal(tmp_path)
    assert error.reason == "bad_index"
    assert "too many" in error.sentence


@pytest.mark.parametrize("total", [12.5, 16, True, "16", None, [1]])
def test_total_size_is_advisory(total: object, tmp_path: Path) -> None:
    """Whatever an index announces as total size, its files are what it names."""
    write_file(tmp_path / "x.safetensors", A)
    write_index(tmp_path, {"a.weight": "x.safetensors"}, total_size=total)
    files = found(tmp_path)
    assert files.shards == ["x.safetensors"]
    assert files.total_size in (12.5, 16, None)


def test_close_is_idempotent_and_closes(tmp_path: Path) -> None:
    """The folder's descriptor is closed once."""
    write_file(tmp_path / SINGLE, A)
    checkpoint = open_checkpoint(tmp_path)
    folder = checkpoint.folder
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(folder)


def test_a_refusal_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """What was opened to find out is closed again."""
    before = len(list(DESCRIPTORS.iterdir()))
    for make in (make_fifo, make_folder):
        place = tmp_path / make.__name__
        place.mkdir()
        make(place / SINGLE)
        refusal(place)
    refusal(tmp_path, NotFound)
    assert len(list(DESCRIPTORS.iterdir())) == before
