"""What a safetensors header may say, and the one sentence for what it may not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.checkpoints.header import DTYPES, MAX_HEADER_BYTES, Header, read_header
from broker.errors import LoadFailed
from tests.support.safetensors_files import (
    SINGLE,
    Stored,
    entries,
    entry,
    header_text,
    stored,
    write_file,
    write_raw,
)

FOUR = entry("U8", [4], 0, 4)


def read(path: Path) -> Header:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor, path.name)
    finally:
        os.close(descriptor)


def refusal(path: Path) -> LoadFailed:
    with pytest.raises(LoadFailed) as caught:
        read(path)
    return caught.value


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_format_and_torch(dtype: str, tmp_path: Path) -> None:
    """Each dtype is known by torch's name, with its place and size."""
    tensor = stored("t", dtype, (3, 4))
    header = read(write_file(tmp_path / SINGLE, [tensor]))
    (found,) = header.tensors
    assert found.dtype == DTYPES[dtype][0]
    assert found.shape == ((3, 2) if dtype == "F4" else (3, 4))
    assert (found.offset, found.nbytes) == (header.nbytes, len(tensor.data))


@pytest.mark.parametrize("metadata", [None, "null", "{}", '{"format":"pt","other":"x } y"}'])
@pytest.mark.parametrize("padding", [b"", b"     ", b" \n\t\r\n"])
def test_metadata_and_padding_change_nothing(
    metadata: str | None, padding: bytes, tmp_path: Path
) -> None:
    """Metadata may be absent, null or empty; any JSON white space may follow the header."""
    tensors = [stored("a"), stored("b", "BF16", (2, 2))]
    data = b"".join(tensor.data for tensor in tensors)
    text = header_text(entries(tensors), metadata) + padding
    header = read(write_raw(tmp_path / SINGLE, text, data))
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    """No tensors and no data are a valid file."""
    assert read(write_raw(tmp_path / SINGLE, b"{}")).tensors == []
    assert read(write_raw(tmp_path / SINGLE, b'{"__metadata__":{"k":"v"}}')).tensors == []


def test_empty_and_scalar_tensors_keep_their_places(tmp_path: Path) -> None:
    """Empty tensors share an offset with their neighbours; a scalar has one element."""
    tensors = [
        stored("e0", shape=(0,)),
        stored("a", shape=()),
        stored("e1", "BF16", (2, 0)),
        stored("b", "U8", (5,)),
        stored("e2", shape=(3, 0, 4)),
    ]
    header = read(write_file(tmp_path / SINGLE, tensors))
    assert {t.name: (t.shape, t.nbytes) for t in header.tensors} == {
        "e0": ((0,), 0),
        "a": ((), 4),
        "e1": ((2, 0), 0),
        "b": ((5,), 5),
        "e2": ((3, 0, 4), 0),
    }


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    """The order of the names in the header does not matter."""
    pairs = [("late", entry("U8", [2], 2, 4)), ("early", entry("U8", [2], 0, 2))]
    header = read(write_raw(tmp_path / SINGLE, header_text(pairs), b"1234"))
    assert [tensor.name for tensor in header.tensors] == ["early", "late"]


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    """Strides that a header claims are not honoured."""
    text = entry("F32", [4], 0, 16, strides=[2], crc="00", more={"deep": [1, {"x": None}]})
    (found,) = read(write_raw(tmp_path / SINGLE, header_text([("w", text)]), bytes(16))).tensors
    assert found.shape == (4,)


@pytest.mark.parametrize("name", ["ключ.вес", "a\nb", 'say "hi"', "back\\slash", "", "😀", "\x00"])
def test_any_unicode_name(name: str, tmp_path: Path) -> None:
    """A name is any text; the way it is escaped does not matter."""
    (found,) = read(write_file(tmp_path / SINGLE, [Stored(name, "U8", (1,), b"x")])).tensors
    assert found.name == name


FAULTS: dict[str, tuple[str, bytes, bytes]] = {
    # what: (reason, header, data)
    "header begins with a space": ("header_start", b" " + header_text([("a", FOUR)]), b"1234"),
    "header begins with a BOM": ("header_start", b"\xef\xbb\xbf{}", b""),
    "header is empty": ("header_start", b"", b""),
    "header is a list": ("bad_entry", b"[]", b""),
    "header is cut": ("bad_json", b'{"a":', b""),
    "header ends in NUL": ("bad_json", b"{}\0\0", b""),
    "header is not UTF-8": ("bad_json", b'{"a\xff":' + FOUR.encode() + b"}", b"1234"),
    "name with a raw control character": ("bad_json", b'{"a\x01":%b}' % FOUR.encode(), b"1234"),
    "name with half a pair": ("bad_json", b'{"a\\ud800":%b}' % FOUR.encode(), b"1234"),
    "name with a raw surrogate": ("bad_json", b'{"\xed\xa0\x80":%b}' % FOUR.encode(), b"1234"),
    "two objects": ("bad_json", b"{}{}", b""),
    "trailing comma": ("bad_json", b'{"a":%b,}' % FOUR.encode(), b"1234"),
    "trailing comma after metadata": ("bad_json", b'{"__metadata__":{"a":"b"},}', b""),
    "NaN": ("bad_json", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234"),
    "leading zero": (
        "bad_json",
        b'{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "nesting bomb of lists": ("bad_json", b'{"a":' + b"[" * 200_000, b""),
    "nesting bomb of objects": ("bad_json", b'{"a":' * 100_000, b""),
    "closed nesting bomb": ("bad_json", b'{"a":' + b"[" * 99_999 + b"]" * 99_999 + b"}", b""),
    "ignored field nested deeply": (
        "bad_json",
        b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":%b1%b}}'
        % (b"[" * 150, b"]" * 150),
        b"1234",
    ),
    "integer of 5,000 digits": (
        "bad_json",
        b'{"a":{"dtype":"U8","shape":[%b],"data_offsets":[0,4]}}' % (b"9" * 5000),
        b"1234",
    ),
    "tensor twice": ("duplicate_key", header_text([("w", FOUR), ("w", FOUR)]), b"1234"),
    "tensor twice, once escaped": (
        "duplicate_key",
        b'{"w":%b,"\\u0077":%b}' % (FOUR.encode(), FOUR.encode()),
        b"1234",
    ),
    "field twice": (
        "duplicate_key",
        b'{"w":{"dtype":"U8","shape":[4],"shape":[2,2],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "extra field twice": (
        "duplicate_key",
        b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":{"y":1,"y":2}}}',
        b"1234",
    ),
    "metadata twice": (
        "duplicate_key",
        b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"}}',
        b"",
    ),
    "metadata twice, once as a tensor": (
        "duplicate_key",
        b'{"__metadata__":{"a":"b"},"__metadata__":%b}' % FOUR.encode(),
        b"1234",
    ),
    "metadata's key twice": ("duplicate_key", b'{"__metadata__":{"a":"b","a":"c"}}', b""),
    "metadata is a list": ("bad_metadata", b'{"__metadata__":[]}', b""),
    "metadata has a number": ("bad_metadata", b'{"__metadata__":{"a":1}}', b""),
    "metadata is a tensor": ("bad_metadata", b'{"__metadata__":%b}' % FOUR.encode(), b"1234"),
    "entry is null": ("bad_entry", b'{"w":null}', b""),
    "entry is a list": ("bad_entry", b'{"w":["U8",[4],[0,4]]}', b"1234"),
    "no dtype": ("bad_entry", b'{"w":{"shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "no shape": ("bad_entry", b'{"w":{"dtype":"U8","data_offsets":[0,4]}}', b"1234"),
    "no data_offsets": ("bad_entry", b'{"w":{"dtype":"U8","shape":[4]}}', b"1234"),
    "no data_offsets, but another field": (
        "bad_entry",
        b'{"w":{"dtype":"U8","shape":[4],"offsets":[0,4]}}',
        b"1234",
    ),
    "dtype is a number": (
        "bad_entry",
        b'{"w":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "three offsets": ("bad_entry", header_text([("w", FOUR.replace("0, 4", "0, 4, 4"))]), b"1234"),
    "offsets are floats": ("bad_entry", header_text([("w", entry("U8", [4], 0.0, 4))]), b"1234"),
    "offsets are booleans": (
        "bad_entry",
        header_text([("w", entry("U8", [4], False, 4))]),
        b"1234",
    ),
    "negative offsets": ("bad_entry", header_text([("w", entry("U8", [4], -4, 0))]), b"1234"),
    "offset minus zero": ("bad_entry", header_text([("w", entry("U8", [4], -0.0, 4))]), b"1234"),
    "offset -0": ("bad_entry", b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}', b"1234"),
    "offsets run backwards": (
        "size_mismatch",
        header_text([("w", entry("U8", [4], 4, 0))]),
        b"1234",
    ),
    "dtype of another format": (
        "unknown_dtype",
        header_text([("w", entry("Q4_K", [4], 0, 4))]),
        b"1234",
    ),
    "dtype in small letters": (
        "unknown_dtype",
        header_text([("w", entry("u8", [4], 0, 4))]),
        b"1234",
    ),
    "dtype torch has not got": (
        "unknown_dtype",
        header_text([("w", entry("F6_E2M3", [4], 0, 3))]),
        b"123",
    ),
    "float dimension": ("bad_shape", header_text([("w", entry("U8", [4.0], 0, 4))]), b"1234"),
    "boolean dimension": ("bad_shape", header_text([("w", entry("U8", [True, 4], 0, 4))]), b"1234"),
    "text dimension": ("bad_shape", header_text([("w", entry("U8", ["4"], 0, 4))]), b"1234"),
    "null dimension": ("bad_shape", header_text([("w", entry("U8", [None], 0, 4))]), b"1234"),
    "shape is a number": ("bad_shape", header_text([("w", entry("U8", 4, 0, 4))]), b"1234"),
    "negative dimensions": (
        "bad_shape",
        header_text([("w", entry("U8", [-2, -2], 0, 4))]),
        b"1234",
    ),
    "dimension above int64": (
        "bad_shape",
        header_text([("w", entry("U8", [2**63, 0], 0, 0))]),
        b"",
    ),
    "zero times huge": ("bad_shape", header_text([("w", entry("U8", [0, 2**62, 4], 0, 0))]), b""),
    "huge times zero": ("bad_shape", header_text([("w", entry("U8", [2**62, 4, 0], 0, 0))]), b""),
    "too many dimensions": ("bad_shape", header_text([("w", entry("U8", [1] * 65, 0, 1))]), b"1"),
    "product wraps to zero": (
        "size_mismatch",
        header_text([("w", entry("F32", [2**32, 2**32], 0, 0))]),
        b"",
    ),
    "product wraps to four": (
        "size_mismatch",
        header_text([("w", entry("U8", [2**62 + 1, 4], 0, 4))]),
        b"1234",
    ),
    "half a byte": ("subbyte_shape", header_text([("w", entry("F4", [3], 0, 2))]), b"12"),
    "rows of half bytes": (
        "subbyte_shape",
        header_text([("w", entry("F4", [2, 3], 0, 3))]),
        b"123",
    ),
    "scalar of half a byte": ("subbyte_shape", header_text([("w", entry("F4", [], 0, 1))]), b"1"),
    "fewer bytes than the shape": (
        "size_mismatch",
        header_text([("w", entry("F32", [4], 0, 15))]),
        b"1" * 15,
    ),
    "overlap": (
        "overlap",
        header_text([("a", FOUR), ("b", entry("U8", [4], 2, 6))]),
        b"123456",
    ),
    "same bytes twice": ("overlap", header_text([("a", FOUR), ("b", FOUR)]), b"1234"),
    "empty tensor inside another": (
        "overlap",
        header_text([("a", FOUR), ("b", entry("U8", [0], 2, 2))]),
        b"1234",
    ),
    "hole": ("hole", header_text([("a", FOUR), ("b", entry("U8", [1], 6, 7))]), b"1234567"),
    "hole before the first": ("hole", header_text([("a", entry("U8", [1], 3, 4))]), b"1234"),
    "empty tensor far away": ("hole", header_text([("a", entry("U8", [0], 2**70, 2**70))]), b""),
    "cut short": ("truncated", header_text([("a", FOUR)]), b"123"),
    "goes on": ("trailing_bytes", header_text([("a", FOUR)]), b"12345"),
    "data without tensors": ("trailing_bytes", b"{}", b"1"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_fault_is_refused_with_its_reason(what: str, tmp_path: Path) -> None:
    """Each fault has its reason and a sentence that names the file, the tensor and a cure."""
    reason, text, data = FAULTS[what]
    error = refusal(write_raw(tmp_path / SINGLE, text, data))
    assert error.reason == reason
    assert error.file == SINGLE
    assert repr(SINGLE) in error.sentence
    assert "; " in error.sentence
    assert "\n" not in error.sentence
    if "tensor" in error.fields and reason not in ("bad_metadata", "duplicate_key"):
        assert repr(error.tensor) in error.sentence


FOREIGN: dict[str, tuple[str, bytes, str]] = {
    "Git LFS": (
        "lfs_pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "Git LFS",
    ),
    "web page": ("not_safetensors", b"<!doctype html><html></html>", "web page"),
    "web page after blank lines": ("not_safetensors", b"\r\n\r\n<html><body>", "web page"),
    "GGUF": ("not_safetensors", b"GGUF\x03\0\0\0" + bytes(24), "GGUF"),
    "torch archive": ("unsafe_pickle", b"PK\x03\x04\0\0\x08\x08" + bytes(24), "zip"),
    "pickle": ("unsafe_pickle", b"\x80\x02}q\0(X\x08\0\0\0a.weight", "pickle"),
    "noise": ("header_too_large", bytes(range(200, 232)), "100000000"),
    "short LFS": ("header_truncated", b"vers", "4 bytes"),
    "nothing": ("header_truncated", b"", "0 bytes"),
    "seven bytes": ("header_truncated", bytes(7), "7 bytes"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_other_kinds_of_files_are_called_by_name(what: str, tmp_path: Path) -> None:
    """A pointer, a page or a pickle is said to be one, not a header too large."""
    reason, content, word = FOREIGN[what]
    path = tmp_path / SINGLE
    path.write_bytes(content)
    error = refusal(path)
    assert error.reason == reason
    assert word in error.sentence


def test_length_word_is_checked_against_the_file(tmp_path: Path) -> None:
    """A length within the format's limit but past the file's end is refused before allocation."""
    error = refusal(write_raw(tmp_path / SINGLE, b"{}", length=MAX_HEADER_BYTES))
    assert error.reason == "header_truncated"


def test_length_word_above_the_limit(tmp_path: Path) -> None:
    """A header longer than the format's limit is refused, even in a file that is as long."""
    path = write_raw(tmp_path / SINGLE, b"{}", length=MAX_HEADER_BYTES + 1)
    os.truncate(path, MAX_HEADER_BYTES + 100)
    assert refusal(path).reason == "header_too_large"


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    """A descriptor of a directory is refused like any other that is no regular file."""
    assert refusal(tmp_path).reason == "not_a_file"


def test_a_huge_name_is_shortened_in_the_sentence(tmp_path: Path) -> None:
    """A name of a megabyte does not make a sentence of a megabyte, nor fields."""
    text = header_text([("n" * 1_000_000, entry("U8", [4], 0, 5))])
    error = refusal(write_raw(tmp_path / SINGLE, text, b"12345"))
    assert error.reason == "size_mismatch"
    assert len(error.sentence) < 1000
    assert len(error.to_payload()) < 4000
