"""Manifests: what may be mapped, what a hostile one is told, and the arithmetic of layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import BadRequest
from broker.weights import (
    ITEM_BYTES,
    KINDS,
    SLOT_ALIGNMENT,
    AliasGroup,
    Manifest,
    TensorGroup,
    WeightKey,
    align_up,
    contiguous_stride,
    decode_manifest,
    encode_manifest,
    storage_extent,
    tensor_nbytes,
    validate_manifest,
)

SLAB = 8192


def group(
    names: str = "a",
    offsets: list[int] | None = None,
    shape: list[int] | None = None,
    stride: list[int] | None = None,
    dtype: str = "float32",
    kind: str = "tensor",
) -> TensorGroup:
    """A group of tensors named by letters; by default one float32 tensor of 4 x 8 at 0."""
    shape = [4, 8] if shape is None else shape
    stride = contiguous_stride(shape) if stride is None else stride
    return TensorGroup(dtype, shape, stride, kind, list(names), [0] if offsets is None else offsets)


def refusal(*groups: TensorGroup, **others: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        validate_manifest(Manifest(**{"nbytes": SLAB, "groups": list(groups), **others}), SLAB)
    return str(caught.value)


def accept(*groups: TensorGroup, **others: Any) -> Manifest:
    manifest = Manifest(**{"nbytes": SLAB, "groups": list(groups), **others})
    validate_manifest(manifest, SLAB)
    return manifest


# --- what is accepted ---------------------------------------------------------------------------


def test_ordinary_manifest() -> None:
    """Tensors side by side, up to the slab's last byte, are accepted and counted."""
    manifest = accept(group("ab", [0, 512]), group("c", [SLAB - 512], [512], dtype="uint8"))
    assert manifest.tensor_count == 3
    assert Manifest(nbytes=0, groups=[]).tensor_count == 0


def test_slab_may_be_larger() -> None:
    """A slab is padded to the device's granularity, so it may be larger than described."""
    validate_manifest(Manifest(nbytes=1024, groups=[group()]), SLAB)
    validate_manifest(Manifest(nbytes=0, groups=[]), SLAB)


def test_strided_and_expanded_tensors() -> None:
    """Transposed, sliced and expanded tensors are described by their strides."""
    accept(group("a", [0], [8, 4], [1, 8]), group("b", [512], [1 << 40], [0]))


def test_empty_and_scalar_tensors() -> None:
    """Tensors without elements take no room and may lie anywhere, tensors without dimensions do."""
    accept(group("ab", [0, SLAB], [0, 4]), group("c", [0], []))
    assert "overlap" in refusal(group("ab", [0, 0], []))


def test_ties_and_views() -> None:
    """Tied names and views share the storage of their alias group, a whole element apart."""
    accept(
        group("ab", [512, 512]),
        group("c", [516], [3]),
        group("d", [512 + 128], [0]),
        group("e", [1024]),
        aliases=[AliasGroup(["a", "b", "c", "d"], 512, 128)],
    )


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_and_kind(dtype: str, kind: str) -> None:
    """Every dtype that is listed is accepted as every kind."""
    accept(group(dtype=dtype, kind=kind))


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (group(dtype="float31"), "tensor 'a' has the unknown dtype 'float31'"),
        (group(kind="gradient"), "tensor 'a' has the unknown kind 'gradient'"),
        (group(""), "the group of '?' has not one offset for each name"),
        (group("ab", [0]), "the group of 'a' has not one offset for each name"),
        (group("a", [0, 512]), "the group of 'a' has not one offset for each name"),
        (group("ab", [0, SLAB]), "a tensor of the group of 'a' lies outside the slab"),
        (group("a", [SLAB - 64]), "a tensor of the group of 'a' lies outside the slab"),
        (group("a", [-512]), "a tensor of the group of 'a' lies outside the slab"),
        (group("a", [1 << 70], [0]), "a tensor of the group of 'a' lies outside the slab"),
        (group("a", [0], [2, 2], [4096, 1]), "a tensor of the group of 'a' lies outside the slab"),
        (group("a", [0], [2], []), "shape [2] and stride [] do not describe a tensor"),
        (group("a", [0], [-1], [1]), "shape [-1] and stride [1] do not describe a tensor"),
        (group("a", [0], [2], [-1]), "shape [2] and stride [-1] do not describe a tensor"),
        (
            group("a", [0], [1 << 62], [0]),
            f"a tensor of shape [{1 << 62}] and stride [0] is too large for torch",
        ),
        (
            group("a", [0], [0, 1 << 32, 1 << 32], [0, 0, 0]),
            (
                f"a tensor of shape [0, {1 << 32}, {1 << 32}] and stride [0, 0, 0] is too "
                "large for torch"
            ),
        ),
        (
            group("a", [0], [1], [1 << 63]),
            f"a tensor of shape [1] and stride [{1 << 63}] is too large for torch",
        ),
        (group("a", [256]), "a storage of the manifest is not aligned to 512 bytes"),
        (group("aa", [0, 512]), "the manifest names a tensor twice"),
        (group("ab", [0, 0]), "two tensors of the manifest overlap without being tied"),
    ],
)
def test_bad_group(bad: TensorGroup, sentence: str) -> None:
    """A group that cannot be mapped safely is refused with its first tensor's name."""
    assert refusal(bad) == sentence


def test_overlap_between_groups() -> None:
    """Tensors of different groups may not overlap either, by a single byte."""
    wide = group("b", [512], [513], dtype="uint8")
    assert refusal(wide, group("c", [1024])) == (
        "two tensors of the manifest overlap without being tied"
    )
    assert refusal(group("a"), group("a", [512])) == "the manifest names a tensor twice"


@pytest.mark.parametrize(
    ("alias", "sentence"),
    [
        (AliasGroup(["a"], -512, 1024), "the storage of ['a'] lies outside the slab"),
        (AliasGroup(["a"], 0, -1), "the storage of ['a'] lies outside the slab"),
        (AliasGroup(["a"], 512, SLAB), "the storage of ['a'] lies outside the slab"),
        (AliasGroup([], 0, 512), "an alias group of the manifest has no names"),
        (AliasGroup(["a", "a"], 0, 512), "the manifest puts 'a' into two alias groups"),
        (AliasGroup(["a", "z"], 0, 512), "the manifest ties a name it does not describe"),
        (AliasGroup(["a"], 0, 64), "tensor 'a' lies outside the storage it is said to share"),
        (AliasGroup(["a"], 512, 512), "tensor 'a' lies outside the storage it is said to share"),
        (AliasGroup(["a"], 0, 1024), "two tensors of the manifest overlap without being tied"),
        (AliasGroup(["e"], 0, 512), "tensor 'e' lies outside the storage it is said to share"),
    ],
)
def test_bad_alias(alias: AliasGroup, sentence: str) -> None:
    """An alias group must lie in the slab, hold its tensors and overlap nobody else."""
    groups = [group("ab", [0, 512]), group("e", [1024], [0])]
    assert refusal(*groups, aliases=[alias]) == sentence


def test_name_in_two_alias_groups() -> None:
    """A tensor has one storage."""
    aliases = [AliasGroup(["a"], 0, 512), AliasGroup(["a"], 512, 512)]
    assert refusal(group(), aliases=aliases) == "the manifest puts 'a' into two alias groups"


def test_view_between_elements() -> None:
    """A view that begins inside an element of its storage could only be mapped wrongly."""
    view = group("a", [514], [4])
    assert refusal(view, aliases=[AliasGroup(["a"], 512, 512)]) == (
        "tensor 'a' lies between the elements of the storage it shares"
    )
    unaligned = AliasGroup(["a"], 514, 512)
    assert refusal(view, aliases=[unaligned]) == (
        "a storage of the manifest is not aligned to 512 bytes"
    )


def test_other_version() -> None:
    """A manifest of another version is refused by number before anything is believed."""
    assert refusal(group(dtype="?"), version=2) == (
        "the manifest is of version 2, this client reads 1"
    )


@pytest.mark.parametrize("nbytes", [SLAB + 1, -1, 1 << 63])
def test_more_than_the_slab(nbytes: int) -> None:
    """A manifest may not describe more than its slab holds, nor less than nothing."""
    assert refusal(nbytes=nbytes) == f"the manifest describes {nbytes} bytes, its slab has {SLAB}"


# --- decoding -----------------------------------------------------------------------------------

GOOD = Manifest(
    nbytes=SLAB,
    groups=[group("ab", [0, 512]), group("c", [1024], dtype="bfloat16", kind="parameter")],
    aliases=[AliasGroup(["c"], 1024, 64)],
    metadata={"format": "pt", "nested": {"n": [1, 2.5, None]}},
)


def test_round_trip() -> None:
    """What is encoded is decoded equal, from bytes and from a view of mapped memory."""
    data = encode_manifest(GOOD)
    assert decode_manifest(data, SLAB) == GOOD
    assert decode_manifest(memoryview(data), SLAB) == GOOD


def raw(**changes: object) -> bytes:
    plain = {**msgspec.to_builtins(GOOD), **changes}
    return msgspec.msgpack.encode({k: v for k, v in plain.items() if v is not ...})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Input data was truncated"),
        (b"\xc1", "MessagePack data is malformed"),
        (b"\x93\x01\x02\x03", "Expected `object`, got `array`"),
        (raw(nbytes=...), "Object missing required field `nbytes`"),
        (raw(owner="me"), "Object contains unknown field `owner`"),
        (raw(nbytes="8192"), "Expected `int`, got `str`"),
        (raw(groups=[{}]), "Object missing required field `dtype`"),
        (raw(metadata=[]), "Expected `object`, got `array`"),
        (raw() + b"\x00", "trailing"),
        (raw().replace(b"\xa1a", b"\xa1\xff"), "Invalid UTF-8"),
        (raw(metadata=...)[:-1] + b"\x80", "Expected"),
    ],
)
def test_undecodable(data: bytes, why: str) -> None:
    """Bytes that are no manifest are refused with the decoder's own words."""
    with pytest.raises(BadRequest) as caught:
        decode_manifest(data, SLAB)
    assert str(caught.value).startswith("the manifest cannot be decoded: ")
    assert why in str(caught.value)


def test_deep_nesting() -> None:
    """Metadata nested without end is refused and does not end the process."""
    deep = msgspec.Raw(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00")
    with pytest.raises(BadRequest) as caught:
        decode_manifest(raw(metadata=deep), SLAB)
    assert "recursion" in str(caught.value)


@given(st.data())
def test_damaged_manifests(data: st.DataObject) -> None:
    """A manifest with any bytes changed decodes to a valid one or is refused, nothing else."""
    damaged = bytearray(encode_manifest(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest = decode_manifest(bytes(damaged), SLAB)
    except BadRequest:
        return
    validate_manifest(manifest, SLAB)


sizes = st.integers(0, 6)
shapes = st.lists(sizes, max_size=3)


@st.composite
def laid_out(draw: st.DrawFn) -> Manifest:
    """A manifest as a careful writer makes it: storages one after the other at 512 bytes."""
    groups, aliases, end, count = [], [], 0, 0
    for _ in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = draw(shapes)
        names = [f"t{count + i}" for i in range(draw(st.integers(1, 3)))]
        count += len(names)
        nbytes = tensor_nbytes(dtype, shape)
        tied = draw(st.booleans())
        offsets = [end if tied else end + i * align_up(nbytes, 512) for i in range(len(names))]
        if tied:
            aliases.append(AliasGroup(names, end, nbytes))
        groups.append(TensorGroup(dtype, shape, contiguous_stride(shape), "tensor", names, offsets))
        end = align_up(max(offsets) + nbytes, SLOT_ALIGNMENT)
    return Manifest(nbytes=end, groups=groups, aliases=aliases, metadata={"n": count})


@given(laid_out())
def test_any_careful_layout_makes_the_round_trip(manifest: Manifest) -> None:
    """Whatever a careful writer lays out is accepted and decoded equal."""
    assert decode_manifest(encode_manifest(manifest), manifest.nbytes) == manifest


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), min_size=1, max_size=6))
def test_overlaps_are_found(storages: list[tuple[int, int]]) -> None:
    """Two storages that share a byte are refused, and only those: compared with every pair."""
    groups = [
        group(chr(97 + i), [start * 512], [blocks * 512], dtype="uint8")
        for i, (start, blocks) in enumerate(storages)
    ]
    pieces = [set(range(start, start + blocks)) for start, blocks in storages]
    overlap = any(one & other for i, one in enumerate(pieces) for other in pieces[i + 1 :])
    if overlap:
        assert refusal(*groups) == "two tensors of the manifest overlap without being tied"
    else:
        accept(*groups)


# --- arithmetic, against torch ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_item_bytes(dtype: str) -> None:
    """Every dtype has the size that torch gives it."""
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


@given(st.lists(sizes, max_size=4))
def test_contiguous_strides(shape: list[int]) -> None:
    """Row-major strides are torch's, empty dimensions included."""
    assert contiguous_stride(shape) == list(torch.empty(shape).stride())


@given(st.lists(st.tuples(sizes, st.integers(0, 9)), max_size=4))
def test_extents(dims: list[tuple[int, int]]) -> None:
    """An extent is the least storage that torch needs for a tensor of this shape and stride."""
    shape, stride = [n for n, _ in dims], [step for _, step in dims]
    extent = storage_extent(shape, stride, 4)
    storage = torch.empty(extent // 4)
    torch.as_strided(storage, shape, stride)
    if extent:
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.as_strided(storage[:-1].clone(), shape, stride)


def test_sizes() -> None:
    """Sizes are bytes; rounding up keeps what is a multiple already."""
    assert tensor_nbytes("bfloat16", [3, 5]) == 30
    assert tensor_nbytes("float64", []) == 8
    assert [align_up(n, 512) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


# --- keys ---------------------------------------------------------------------------------------


def test_key_round_trip() -> None:
    """A key travels whole, and one with unknown fields is refused."""
    key = WeightKey(device="SIM-0", name="m", layout={"tp_rank": 0, "tp_size": 2})
    data = msgspec.msgpack.encode(key)
    assert msgspec.msgpack.decode(data, type=WeightKey) == key
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"device": "d", "x": 1}), type=WeightKey)


def test_keys_share_no_layout() -> None:
    """A key's default layout is its own: two keys never share a dict."""
    one, other = WeightKey(device="a"), WeightKey(device="b")
    assert one.layout == {}
    assert one.layout is not other.layout


def test_light() -> None:
    """Importing the module pulls in neither torch nor zmq."""
    program = (
        "import json, sys, broker.weights\n"
        "print(json.dumps([name in sys.modules for name in ('torch', 'zmq')]))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert json.loads(result.stdout) == [False, False]
