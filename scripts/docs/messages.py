"""The messages of the wire, from their structs: broker/wire.py and broker/weights.py."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from msgspec import inspect

from broker import weights, wire
from scripts.docs.sources import class_texts, constant_texts
from scripts.docs.tables import table

_Structs = tuple[type[msgspec.Struct], ...]

ANSWERS: dict[str, _Structs] = {
    "ping": (wire.Pong,),
    "status": (wire.StatusReport,),
    "shutdown": (wire.Done,),
    "upgrade": (wire.Done,),
    "hello": (wire.Welcomed,),
    "acquire": (wire.Granted,),
    "claim": (wire.Granted, wire.Claimed),
    "resolve": (wire.Resolved,),
    "reserve": (wire.Reserved,),
    "seal": (wire.Sealed,),
    "abandon": (wire.Done,),
    "report": (wire.Done,),
    "release": (wire.Done,),
    "cancel": (wire.Done,),
    "evict": (wire.Evicted,),
    "load": (wire.Granted,),
    "pin": (wire.Pinned,),
    "unpin": (wire.Pinned,),
    "watch": (wire.Done,),
    "unwatch": (wire.Done,),
}
"""What an `ok` to each operation carries; the client's calls name the same (tests/docs)."""

DELIVERED = {
    "acquire": '"source": the checkpoint\'s folder, opened, if `source` is given',
    "reserve": '"manifest": the manifest in a sealed memory file',
    "load": '"code": the code in a sealed memory file',
}

_TO_BROKER: _Structs = (wire.Attach, wire.Deliver, wire.Leave)
_TO_ENGINE: _Structs = (wire.Welcome, wire.Refused, wire.Attached)
_PARTS: _Structs = (
    wire.Demand,
    wire.Source,
    wire.FileStamp,
    wire.Conversion,
    weights.WeightKey,
)
_MANIFEST: _Structs = (weights.Manifest, weights.TensorGroup, weights.AliasGroup)
_CONSTANTS = (
    "PROTOCOL",
    "MAX_FRAME_BYTES",
    "MAX_ENVELOPE_FRAMES",
    "MAX_ENVELOPE_FRAME_BYTES",
    "MAX_WORD_BYTES",
    "MAX_SESSION_PACKET_BYTES",
    "MAX_NAME_BYTES",
    "MAX_PATH_BYTES",
    "MAX_FILES",
    "MAX_EXCEPTIONS",
    "MAX_LAYOUT",
    "MAX_LOAD_SECONDS",
)


def requests() -> str:
    """A section for each operation: what it does, carries, and is answered with."""
    return "\n\n".join(_request(name, struct) for name, struct in wire.REQUESTS.items())


def _request(operation: str, struct: type[msgspec.Struct]) -> str:
    said = []
    if operation in wire.SESSIONLESS:
        said.append("Needs no session. The payload is empty: no byte, not an empty map.")
    if operation in DELIVERED:
        said.append(
            f"Its descriptor goes ahead with [`deliver`](#deliver): {DELIVERED[operation]}."
        )
    answers = " or ".join(map(_link, ANSWERS[operation]))
    said.append(f"Answer: {answers}.")
    parts = [f"### {operation}", _text(struct), _fields(struct), " ".join(said)]
    return "\n\n".join(filter(None, parts))


def replies() -> str:
    """A section for each struct that an `ok`, `progress` or `event` carries."""
    answers = dict.fromkeys(struct for structs in ANSWERS.values() for struct in structs)
    return _sections((*answers, wire.Progress, wire.Event))


def packets() -> str:
    """A section for each packet of the session socket, named by its `type`."""
    return _sections((*_TO_ENGINE, *_TO_BROKER))


def structs() -> str:
    """A section for each struct that stands inside others."""
    return _sections(_PARTS)


def manifest() -> str:
    """A section for each struct of a manifest."""
    return _sections(_MANIFEST)


def dtypes() -> str:
    """Every dtype and its bytes."""
    rows = [[f"`{name}`", str(nbytes)] for name, nbytes in weights.ITEM_BYTES.items()]
    return table(["dtype", "bytes of an element"], rows)


def constants() -> str:
    """The fixed limits of the protocol."""
    texts = constant_texts(wire)
    rows = [[f"`{name}`", f"{getattr(wire, name):,}", texts.get(name, "")] for name in _CONSTANTS]
    return table(["name", "value", "what it is"], rows)


def _sections(structs: _Structs) -> str:
    return "\n\n".join(
        "\n\n".join(filter(None, [f"### {_title(struct)}", _text(struct), _form(struct)]))
        for struct in structs
    )


def _title(struct: type[msgspec.Struct]) -> str:
    tag = struct.__struct_config__.tag
    is_packet = issubclass(struct, wire.SessionMessage)
    return str(tag) if is_packet else struct.__name__


def _link(struct: type[msgspec.Struct]) -> str:
    return f"[`{_title(struct)}`](#{_title(struct).lower()})"


def _text(struct: type[msgspec.Struct]) -> str:
    texts = class_texts(sys.modules[struct.__module__])[struct.__name__]
    return texts.text


def _form(struct: type[msgspec.Struct]) -> str:
    config = struct.__struct_config__
    if config.array_like:
        return f"An array, not a map: the fields in this order.\n\n{_fields(struct)}"
    return _fields(struct)


def _fields(struct: type[msgspec.Struct]) -> str:
    texts = class_texts(sys.modules[struct.__module__])[struct.__name__].fields
    (info,) = inspect.multi_type_info([struct])
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{struct} is no struct")
    rows = [
        [f"`{each.encode_name}`", _kind(each.type), _default(each), texts.get(each.name, "")]
        for each in info.fields
    ]
    if info.tag is not None:
        rows.insert(0, [f"`{info.tag_field}`", f'"{info.tag}"', "", "says which this is"])
    if not rows:
        return "No fields: an empty map." if struct not in (wire.Ping, wire.Status) else ""
    return table(["field", "type", "if absent", "what it is"], rows)


_PLAIN: dict[type[inspect.Type], str] = {
    inspect.StrType: "text",
    inspect.BytesType: "binary",
    inspect.IntType: "integer",
    inspect.FloatType: "float",
    inspect.BoolType: "boolean",
    inspect.NoneType: "nil",
    inspect.AnyType: "anything",
}


def _kind(kind: inspect.Type) -> str:
    """A type in msgpack's words."""
    match kind:
        case inspect.UnionType(types):
            return " or ".join(map(_kind, types))
        case inspect.ListType(item) | inspect.VarTupleType(item):
            return f"array of {_kind(item)}"
        case inspect.TupleType(items):
            return f"array of {', '.join(map(_kind, items))}"
        case inspect.DictType(key, value):
            return f"map of {_kind(key)} to {_kind(value)}"
        case inspect.StructType(struct):
            return _link(struct)
    return _PLAIN[type(kind)]


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    default: Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    shown = msgspec.json.encode(default).decode()
    return "nil" if shown == "null" else f"`{shown}`"
