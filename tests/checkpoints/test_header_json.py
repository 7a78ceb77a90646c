"""The two ways of reading a header's JSON give one answer."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from broker.checkpoints import header_json
from broker.checkpoints.header_json import Entry, decode_header
from broker.errors import LoadFailed
from tests.support.safetensors_files import entries, header_text, stored

WELL_FORMED = header_text(
    entries([stored("a"), stored("b.weight", "BF16", (2, 3)), stored("ü", "U8", (0,))]),
    '{"format":"pt"}',
)

MUTATIONS = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 300), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 300), st.integers(0, 40)),
    st.tuples(st.just("repeat"), st.integers(0, 300), st.integers(1, 60)),
    st.tuples(st.just("swap"), st.integers(0, 300), st.integers(0, 300)),
)


def mutated(text: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    for what, at, amount in mutations:
        at %= max(len(text), 1)
        if what == "flip":
            text = text[:at] + bytes([amount % 256]) + text[at + 1 :]
        elif what == "cut":
            text = text[:at] + text[at + amount :]
        elif what == "repeat":
            text = text[: at + amount] + text[at:]
        else:
            text = text[:at] + text[amount : amount + 1] + text[at:]
    return text


def careful(text: bytes) -> dict[str, Entry] | None:
    try:
        return header_json._decode_carefully(text, "f")
    except LoadFailed:
        return None


@given(st.lists(MUTATIONS, max_size=4))
@example([])
def test_what_the_plain_way_reads_the_careful_way_reads_alike(
    mutations: list[tuple[str, int, int]],
) -> None:
    """The plain way gives up, or gives exactly what the careful way gives."""
    text = mutated(WELL_FORMED, mutations)
    plain = header_json._decode_plain(text)
    assert plain is None or plain == careful(text)


def refused_for(text: bytes) -> str | None:
    try:
        decode_header(text, "f")
    except LoadFailed as error:
        return str(error.reason)
    return None


REASONS = {None, "bad_json", "bad_entry", "bad_shape", "bad_metadata", "duplicate_key"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w", "x"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["__metadata__", "w", "x", "y"]), JSON, max_size=3))
def test_any_json_object_is_read_or_refused(value: object) -> None:
    """Whatever the values are, only the documented error comes out, from both ways alike."""
    text = json.dumps(value).encode()
    plain = header_json._decode_plain(text)
    assert plain is None or plain == careful(text)
    reason = refused_for(text)
    assert (reason is None) == (careful(text) is not None)
    assert reason in REASONS


@given(st.lists(st.sampled_from([b'"w":1', b'"x":{}', b'"\\u0077":2']), min_size=2, max_size=4))
def test_a_repeated_key_is_always_seen(parts: list[bytes]) -> None:
    """Two equal keys are refused as such, however they are spelt."""
    names = [next(iter(json.loads(b"{" + part + b"}"))) for part in parts]
    text = b"{" + b",".join(parts) + b"}"
    refused = refused_for(text) == "duplicate_key"
    assert refused == (len(set(names)) < len(names))


def test_headers_as_the_library_writes_them_are_read_the_plain_way() -> None:
    """The fast way is the one that ordinary headers take."""
    assert header_json._decode_plain(WELL_FORMED) is not None
    assert header_json._decode_plain(WELL_FORMED + b"   ") is not None
    assert header_json._decode_plain(b'{"__metadata__":{"format":"pt"}}') == {}
