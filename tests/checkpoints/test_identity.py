"""Stamps, fingerprints and the identity of contents."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from broker.checkpoints import identity
from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.identity import (
    CHUNK_BYTES,
    content_identity,
    fingerprint,
    slab_identity,
    stamp_files,
    tensor_digest,
)
from broker.errors import LoadFailed
from broker.weights import AliasGroup, Manifest, TensorGroup
from broker.wire import FileStamp
from tests.checkpoints.loading import load
from tests.support.safetensors_files import (
    INDEX,
    SINGLE,
    Stored,
    entries,
    entry,
    header_text,
    stored,
    write_config,
    write_file,
    write_raw,
    write_shards,
)

TENSORS = [stored("a.weight"), stored("b.weight", "BF16", (6,)), stored("e", "F16", (0, 3))]


def stamps_of(path: Path) -> list[FileStamp]:
    with open_checkpoint(path) as checkpoint:
        return stamp_files(checkpoint.folder, checkpoint.files, checkpoint.path)


def identity_of(path: Path) -> str:
    return load(path).result.checkpoint


def test_more_shards_than_can_be_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted before any is read, in a sentence that names the checkpoint."""
    monkeypatch.setattr(identity, "MAX_FILES", 2)
    write_shards(tmp_path, [TENSORS[:1], TENSORS[1:]])  # with the index, three
    with pytest.raises(
        LoadFailed, match=f"'{tmp_path}': it has 3 files .*, 2 are possible"
    ) as told:
        stamps_of(tmp_path)
    assert told.value.reason == "too_many_files"


def test_stamps_cover_index_and_shards(tmp_path: Path) -> None:
    """Every file is stamped, the index first, with what fstat says and a digest."""
    write_shards(tmp_path, [TENSORS[:1], TENSORS[1:]])
    stamps = stamps_of(tmp_path)
    assert [stamp.name for stamp in stamps] == [INDEX, *sorted(p.name for p in tmp_path.glob("*s"))]
    for stamp in stamps:
        status = (tmp_path / stamp.name).stat()
        assert (stamp.device, stamp.inode, stamp.size, stamp.mtime_ns, stamp.ctime_ns) == (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
    assert stamps[0].header_digest == blake3((tmp_path / INDEX).read_bytes()).hexdigest()


def test_stamps_digest_the_header_only(tmp_path: Path) -> None:
    """Stamping reads headers: equal headers have equal digests, whatever the bytes."""
    one = write_file(tmp_path / "one" / SINGLE, [stored("a", seed=1)])
    two = write_file(tmp_path / "two" / SINGLE, [stored("a", seed=2)])
    three = write_file(tmp_path / "three" / SINGLE, [stored("b")])
    digests = [stamps_of(path.parent)[0].header_digest for path in (one, two, three)]
    assert digests[0] == digests[1] != digests[2]


def rewrite(path: Path) -> None:
    """Write the same bytes again and put the old mtime back."""
    before = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copy2(path, other)
    other.replace(path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def permit(path: Path) -> None:
    path.chmod(0o640)


@pytest.mark.parametrize("change", [rewrite, replace, touch, permit])
def test_any_change_shows_in_the_stamp(change: Callable[[Path], None], tmp_path: Path) -> None:
    """A file written again has another stamp, also with equal bytes, size and mtime."""
    path = write_file(tmp_path / SINGLE, TENSORS)
    load(tmp_path)  # so that the first stamp is older than a clock tick
    before = stamps_of(tmp_path)
    change(path)
    assert stamps_of(tmp_path) != before


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    """Before any header is read, all shards are looked for."""
    write_shards(tmp_path, [[tensor] for tensor in TENSORS])
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    for name in names[1:]:
        (tmp_path / name).unlink()
    (tmp_path / names[0]).write_bytes(b"no header")
    with pytest.raises(LoadFailed) as caught:
        stamps_of(tmp_path)
    assert caught.value.reason == "missing_shard"
    assert caught.value.missing == names[1:]
    assert all(name in caught.value.sentence for name in names[1:])


def test_fingerprint_ignores_names_and_times(tmp_path: Path) -> None:
    """A copy elsewhere under another name has an equal fingerprint; another header has not."""
    one = write_file(tmp_path / "one" / SINGLE, TENSORS)
    two = tmp_path / "two" / "other.safetensors"
    two.parent.mkdir()
    shutil.copy(one, two)
    three = write_file(tmp_path / "three" / SINGLE, TENSORS, '{"format":"pt"}')
    prints = [fingerprint(stamps_of(path.parent)) for path in (one, two, three)]
    assert prints[0] == prints[1] != prints[2]


def test_fingerprint_ignores_the_index(tmp_path: Path) -> None:
    """The same shards with and without an index may have equal bytes."""
    with_index = write_shards(tmp_path / "one", [TENSORS[:1], TENSORS[1:]])
    without = write_shards(tmp_path / "two", [TENSORS[:1], TENSORS[1:]], index=False)
    assert fingerprint(stamps_of(with_index)) == fingerprint(stamps_of(without))


def test_identity_is_of_the_contents(tmp_path: Path) -> None:
    """Sharding, order, file names, metadata and white space do not change it."""
    plain = write_file(tmp_path / "plain" / SINGLE, TENSORS).parent
    turned = write_file(tmp_path / "turned" / "other.safetensors", TENSORS[::-1]).parent
    formatted = write_raw(
        tmp_path / "formatted" / SINGLE,
        header_text(entries(TENSORS), '{"format":"pt"}') + b" \n",
        b"".join(tensor.data for tensor in TENSORS),
    ).parent
    sharded = write_shards(tmp_path / "sharded", [TENSORS[2:], TENSORS[:2]])
    identities = {identity_of(path) for path in (plain, turned, formatted, sharded)}
    assert len(identities) == 1
    assert identities.pop().startswith("blake3:")


OTHERS = {
    "another byte": [TENSORS[0]._replace(data=TENSORS[0].data[:-1] + b"\0"), *TENSORS[1:]],
    "another name": [TENSORS[0]._replace(name="c"), *TENSORS[1:]],
    "another dtype": [TENSORS[0]._replace(dtype="I32"), *TENSORS[1:]],
    "another shape": [TENSORS[0]._replace(shape=(2, 2)), *TENSORS[1:]],
    "names exchanged": [
        stored("a.weight")._replace(data=bytes(16)),
        stored("b.weight", "BF16", (6,)),
        stored("e", "F16", (0, 3)),
    ],
    "another empty shape": [*TENSORS[:2], stored("e", "F16", (0, 4))],
    "one fewer": TENSORS[:2],
    "none": [],
}


@pytest.mark.parametrize("what", OTHERS)
def test_identity_tells_contents_apart(what: str, tmp_path: Path) -> None:
    """Whatever an engine could notice changes the identity."""
    one = write_file(tmp_path / "one" / SINGLE, TENSORS).parent
    two = write_file(tmp_path / "two" / SINGLE, OTHERS[what]).parent
    assert identity_of(one) != identity_of(two)


def test_identity_tells_ties_apart(tmp_path: Path) -> None:
    """Equal bytes that share a storage are not the weights that do not."""
    data = stored("x").data
    tensors = [Stored("lm_head.weight", "F32", (4,), data), Stored("wte.weight", "F32", (4,), data)]
    one = write_file(tmp_path / "one" / SINGLE, tensors).parent
    two = write_file(tmp_path / "two" / SINGLE, tensors).parent
    write_config(two, tie_word_embeddings=True)
    assert identity_of(one) != identity_of(two)


def test_identity_is_pinned(tmp_path: Path) -> None:
    """The identity is what its description says, so that it never changes unnoticed."""
    text = header_text([("w", entry("F32", [2], 0, 8))])
    folder = write_raw(tmp_path / SINGLE, text, struct.pack("<2f", 1, 2)).parent
    row = b"\x94\xa1w\xa7float32\x91\x02\xc4\x20" + blake3(struct.pack("<2f", 1, 2)).digest()
    encoded = b"\x93\x01\x91" + row + b"\x90"
    assert identity_of(folder) == f"blake3:{blake3(encoded).hexdigest()}"


def test_digests_of_chunks_cannot_pass_for_weights() -> None:
    """A tensor of 64 bytes that are two digests has another digest than the tensor they are of."""
    chunks = blake3(b"a" * CHUNK_BYTES).digest() + blake3(b"b").digest()
    assert tensor_digest(chunks) != tensor_digest(blake3(chunks).digest())
    assert tensor_digest(b"") == blake3(b"").digest()


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 << 19])
def test_slab_and_manifest_give_the_loaders_identity(nbytes: int, tmp_path: Path) -> None:
    """What was found while reading is found again in the slab, at any number of chunks."""
    tensors = [stored("big", "U8", (nbytes,)), *TENSORS, stored("last", "U8", (3,))]
    loaded = load(write_file(tmp_path / SINGLE, tensors))
    memory = memoryview(loaded.memory)
    assert slab_identity(loaded.plan.manifest, memory) == loaded.result.checkpoint
    damaged = bytearray(loaded.memory)
    damaged[nbytes - 1] ^= 1
    assert slab_identity(loaded.plan.manifest, memoryview(damaged)) != loaded.result.checkpoint


def test_slab_identity_with_ties(tmp_path: Path) -> None:
    """Tied names count with the bytes they share."""
    data = stored("x").data
    tensors = [Stored("lm_head.weight", "F32", (4,), data), Stored("wte.weight", "F32", (4,), data)]
    write_file(tmp_path / SINGLE, tensors)
    write_config(tmp_path, tie_word_embeddings=True)
    loaded = load(tmp_path)
    assert loaded.plan.manifest.aliases
    memory = memoryview(loaded.memory)
    assert slab_identity(loaded.plan.manifest, memory) == loaded.result.checkpoint


def published(stride: list[int], offset: int) -> Manifest:
    """A manifest as a publisher may write it: two views of one storage."""
    groups = [
        TensorGroup("uint8", [2, 2], [2, 1], "parameter", ["base"], [0]),
        TensorGroup("uint8", [2, 2], stride, "parameter", ["view"], [offset]),
    ]
    return Manifest(16, groups, [AliasGroup(["base", "view"], 0, 16)])


def test_slab_identity_of_views() -> None:
    """Strides and places within a shared storage count, too."""
    memory = memoryview(bytes(16))
    identities = {
        slab_identity(published(stride, offset), memory)
        for stride, offset in [([2, 1], 0), ([1, 2], 0), ([2, 1], 4)]
    }
    assert len(identities) == 3


@given(
    st.lists(st.tuples(st.text(max_size=3), st.sampled_from(["uint8", "int8"])), unique=True),
    st.randoms(),
)
def test_identity_does_not_depend_on_order(rows: list[tuple[str, str]], random: object) -> None:
    """Rows may come in any order; other rows give another identity."""
    by_name = {name: (name, dtype, (1,), b"d" * 32) for name, dtype in rows}
    ordered = list(by_name.values())
    turned = ordered[::-1]
    assert content_identity(ordered, []) == content_identity(turned, [])
    if ordered:
        assert content_identity(ordered[1:], []) != content_identity(ordered, [])
