"""The JSON of a safetensors header, read strictly: entries by name, before any layout is judged.

Duplicate keys are what makes this more than one call of a decoder: two parsers that keep different
ones of two equal keys see different tensors, and most decoders keep one in silence. Two ways of
reading give the same answer:

- the plain one, three times as fast, for headers without escapes: decode into typed entries, then
  compare the strings that came out with the quotation marks in the text; a key that was dropped
  leaves two marks too many;
- the careful one for everything else, also for every header with a fault, because it knows what to
  say.

Pure: imports neither zmq nor torch.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

from broker.checkpoints.faults import load_failed, quoted

METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_DEEPEST = 100
"""The library's parser stops at 128 levels, also in fields that are ignored."""

_STRINGS_OF_ENTRY = 5  # the name, three keys and the dtype's value


class Entry(msgspec.Struct, gc=False):
    """One tensor as the header writes it. Types are checked, values are not."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_entries_decoder = msgspec.json.Decoder(dict[str, Entry])
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def decode_header(text: bytes, file: str) -> dict[str, Entry]:
    """The entries of a header, by name, in the order of the text. Metadata is checked and dropped.

    `text` is the header without its length word, padding included.

    Raises:
        LoadFailed: not strict JSON, a duplicate key at any level, an entry that is not a dtype, a
            list of integers and a pair of integers.
    """
    entries = _decode_plain(text)
    return _decode_carefully(text, file) if entries is None else entries


def decode_object(text: bytes, file: str, reason: str) -> dict[str, Any]:
    """A JSON object in which no key appears twice, for the index of a sharded checkpoint.

    Raises:
        LoadFailed: with `reason`.
    """
    try:
        decoded = _loads(text)
    except (ValueError, RecursionError) as error:
        raise load_failed(
            reason, f"{quoted(file)} is not a JSON object: {_words(error)}; {_AGAIN}", file=file
        ) from error
    if not isinstance(decoded, dict):
        raise load_failed(reason, f"{quoted(file)} is JSON but not an object; {_AGAIN}", file=file)
    return decoded


_AGAIN = "download or write it again"


def _decode_plain(text: bytes) -> dict[str, Entry] | None:
    """None where only the careful way can tell: escapes, "-0", or anything out of order."""
    if b"\\" in text or b"-0" in text:
        return None
    try:
        strings, tensors = _without_metadata(text)
        entries = _entries_decoder.decode(tensors)
    except (msgspec.DecodeError, RecursionError):
        return None
    strings += _STRINGS_OF_ENTRY * len(entries)
    if METADATA in entries or text.count(b'"') != 2 * strings:
        return None
    return entries


def _without_metadata(text: bytes) -> tuple[int, bytes]:
    """How many strings metadata at the very beginning has (writers put it there); the text without.

    A piece of JSON text that is a whole object by itself is the whole value, so cutting at the
    first closing brace is right or fails to decode.
    """
    if not text.startswith(_METADATA_FIRST):
        return 0, text
    end = text.find(b"}") + 1
    metadata = _metadata_decoder.decode(text[len(_METADATA_FIRST) : end])
    # A comma must be followed by a name: without the metadata, a trailing one would go unnoticed.
    rest = text[end + 1 :] if text[end : end + 2] == b',"' else text[end:]
    return 1 + 2 * len(metadata), b"{" + rest


_METADATA_FIRST = b'{"__metadata__":'


def _decode_carefully(text: bytes, file: str) -> dict[str, Entry]:
    try:
        decoded = _loads(text)
    except _DuplicateKeyError as error:
        sentence = f"the header of {quoted(file)} has the key {quoted(error.key)} twice; {_FOREIGN}"
        raise load_failed("duplicate_key", sentence, file=file, tensor=error.key) from error
    except (ValueError, RecursionError) as error:
        raise load_failed(
            "bad_json",
            f"the header of {quoted(file)} is not valid JSON: {_words(error)}; {_FOREIGN}",
            file=file,
        ) from error
    if not isinstance(decoded, dict):
        raise load_failed(
            "bad_entry", f"the header of {quoted(file)} is not an object; {_FOREIGN}", file=file
        )
    if METADATA in decoded:
        _check_metadata(decoded.pop(METADATA), file)
    return {name: _checked_entry(name, value, file) for name, value in decoded.items()}


_FOREIGN = "download the file again, or write it with the safetensors library"


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"the key {quoted(key)} appears twice")
        self.key = key


def _loads(text: bytes) -> Any:
    """`json.loads` without what JSON does not have; bytes are decoded here, never guessed at."""
    decoded = json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_unique,
        parse_constant=_refuse_constant,
        # serde reads "-0" as a floating-point number, so it is no dimension and no offset.
        parse_int=_integer if b"-0" in text else None,
    )
    if b"\\u" in text:
        # Escapes can spell half a surrogate pair, which no UTF-8 text can hold: it would only fail
        # later, on the socket or in the log.
        json.dumps(decoded, ensure_ascii=False).encode("utf-8")
    return decoded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _integer(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return "half a surrogate pair"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return quoted(str(error))[1:-1]


def _check_metadata(value: object, file: str) -> None:
    """The reference lets the metadata be absent, null or a map of strings; so do we."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise load_failed(
            "bad_metadata",
            f'"{METADATA}" of {quoted(file)} is not a map from strings to strings; {_FOREIGN}',
            file=file,
            tensor=METADATA,
        )


def _checked_entry(name: str, value: Any, file: str) -> Entry:
    fault = _entry_fault(value)
    if fault is None:
        begin, end = value["data_offsets"]
        return Entry(value["dtype"], tuple(value["shape"]), (begin, end))
    reason, what = fault
    sentence = f"tensor {quoted(name)} in {quoted(file)} {what}; {_FOREIGN}"
    raise load_failed(reason, sentence, file=file, tensor=name)


def _entry_fault(value: object) -> tuple[str, str] | None:
    """Each type is compared exactly: True is an int and 4.0 equals 4 in Python, not in a header."""
    if not isinstance(value, dict):
        return "bad_entry", "has an entry that is not an object"
    for field in _FIELDS:
        if field not in value:
            return "bad_entry", f"has no {field}"
    if len(value) > len(_FIELDS) and not _extras_are_shallow(value):
        return "bad_json", "is nested too deeply"
    shape, offsets = value["shape"], value["data_offsets"]
    if type(value["dtype"]) is not str:
        return "bad_entry", "has a dtype that is not a string"
    if type(shape) is not list or not _INT_ONLY.issuperset(map(type, shape)):
        return "bad_shape", "has a shape that is not a list of integers"
    if type(offsets) is not list or [type(n) for n in offsets] != [int, int]:
        return "bad_entry", "has data_offsets that are not two integers"
    return None


_INT_ONLY = frozenset([int])


def _extras_are_shallow(entry: dict[str, object]) -> bool:
    return all(_is_shallow(entry[key], _DEEPEST) for key in entry.keys() - _FIELDS)


def _is_shallow(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, list):
        return True
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in value)
