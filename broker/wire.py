"""What travels between engine and broker: frames, messages, limits. Imports no zmq and no torch.

**Conversation** (ZeroMQ). A request is `[*envelope, operation, payload]`, a reply
`[*envelope, status, payload]`; the broker returns the envelope untouched. Ours is a fresh request
id and an empty delimiter; a peer that sends no envelope gets none. `operation` and `status` are
short ASCII words. The payload of a request and of the statuses `ok`, `progress`, `event` is msgpack
for exactly one struct below; the payload of every other status is UTF-8 text (errors.py). `ping`
and `status` take an empty payload.

**Session** (Unix socket, SOCK_SEQPACKET). Each packet is one msgpack struct of the `Session…` union
below, with the descriptors it announces beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from broker.errors import BadRequest, UnknownOperation
from broker.suggest import did_you_mean
from broker.weights import CONVERTIBLE, WeightKey

NO_PLATFORM = ""
"""`Hello.platform` of a peer that maps nothing (status, evict, shutdown)."""

PROTOCOL = 1
"""Raised when a message changes its meaning; `hello` refuses any other number."""

MAX_FRAME_BYTES = 256 * 1024
"""Largest payload either way."""
MAX_ENVELOPE_FRAMES = 8
MAX_ENVELOPE_FRAME_BYTES = 256
MAX_WORD_BYTES = 32
MAX_SESSION_PACKET_BYTES = 64 * 1024
MAX_NAME_BYTES = 256
"""Names of sets, leases, layouts: what a person or an engine may make up."""
MAX_PATH_BYTES = 4 * 4096
"""A checkpoint's path for messages: PATH_MAX of Linux, each byte perhaps escaped."""
MAX_FILES = 2048
"""Files of one checkpoint (the largest published ones have under 300)."""

MAX_EXCEPTIONS = 1024
"""Tensors of a checkpoint that a conversion treats otherwise: one or two of each layer."""

MAX_LAYOUT = 32
"""Entries of a parallel layout (tp, pp, dp, ep, … with rank and size each)."""

MAX_LOAD_SECONDS = 86_400.0
"""Longest deadline a shipped loader may be given."""

OK = "ok"
PROGRESS = "progress"
EVENT = "event"


class Frames(NamedTuple):
    """One request, its envelope apart. Nothing of the payload is decoded yet."""

    envelope: tuple[bytes, ...]
    operation: str
    payload: bytes


def split_request(frames: list[bytes]) -> Frames:
    """Take a request's frames apart (routing id already removed).

    Raises:
        BadRequest: too few or too many frames, a frame too large, an operation that is no word.
    """
    if len(frames) < 2:
        raise BadRequest("a request has at least two frames: operation and payload")
    if len(frames) > MAX_ENVELOPE_FRAMES + 2:
        raise BadRequest(
            f"a request may have {MAX_ENVELOPE_FRAMES + 2} frames at most, this one had more"
        )
    *envelope, word, payload = frames
    if not is_envelope(envelope):
        raise BadRequest(f"an envelope frame may have {MAX_ENVELOPE_FRAME_BYTES} bytes at most")
    if len(payload) > MAX_FRAME_BYTES:
        raise BadRequest(f"a payload may have {MAX_FRAME_BYTES} bytes at most")
    return Frames(tuple(envelope), _WORDS.get(word) or _word(word), payload)


def envelope_of(frames: list[bytes]) -> tuple[bytes, ...]:
    """The envelope to answer a malformed request with: its own if it can have been one."""
    envelope = frames[:-2]
    return tuple(envelope) if is_envelope(envelope) else ()


def is_envelope(frames: Sequence[bytes]) -> bool:
    """Whether a request may begin with these frames."""
    if len(frames) > MAX_ENVELOPE_FRAMES:
        return False
    for frame in frames:  # noqa: SIM110 - asked for every request, and a generator costs more
        if len(frame) > MAX_ENVELOPE_FRAME_BYTES:
            return False
    return True


def _word(frame: bytes) -> str:
    if len(frame) > MAX_WORD_BYTES or not frame.isascii():
        raise BadRequest(f"the operation must be an ASCII word of {MAX_WORD_BYTES} bytes at most")
    return frame.decode("ascii")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that travels: immutable, unknown fields refused."""


# --- what a checkpoint is, to the broker -----------------------------------------------------


class FileStamp(Message, array_like=True, frozen=True):
    """What the kernel says of one file, and BLAKE3 of its header (of all of a small file)."""

    name: str
    """Below the checkpoint's folder."""
    device: int
    """`st_dev` of stat(2)."""
    inode: int
    """`st_ino`."""
    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change of its bytes, in nanoseconds since 1970."""
    ctime_ns: int
    """Time of the last change of its inode, in the same unit."""
    header_digest: str
    """64 hex digits."""


class Conversion(Message, array_like=True, frozen=True):
    """Which dtypes a checkpoint's floating-point tensors get as they are loaded.

    One and the same for all that mean the same: it is part of what tells weight sets apart.
    """

    dtype: str
    """float16, bfloat16, float32 or float64 (`CONVERTIBLE` of broker/weights.py)."""
    exceptions: tuple[tuple[str, str], ...] = ()
    """Stored name and dtype of tensors that get another one, sorted by name."""


class Source(Message, frozen=True, omit_defaults=True):
    """A checkpoint an engine can show the folder of. The broker itself never opens it."""

    path: str
    """As the engine sees it; for sentences only."""
    only: str | None
    """The one file meant, or nil for the whole folder."""
    files: list[FileStamp]
    """The index if there is one, then the weight files by name."""
    fingerprint: str
    """Equal for checkpoints that may have equal bytes: sizes and headers, no names, no times."""
    conversion: Conversion | None = None
    """Nil: every tensor as it is stored."""

    @property
    def identity(self) -> SourceIdentity:
        """What the books tell loads apart by."""
        return SourceIdentity(tuple(self.files), self.conversion)


class SourceIdentity(Message, array_like=True, frozen=True):
    """What the kernel says of a checkpoint's files, in a fixed order, and what becomes of them."""

    files: tuple[FileStamp, ...]
    conversion: Conversion | None = None


class Demand(Message, frozen=True):
    """What an engine asks for; nil leaves a field open. Checked against the set's key."""

    device: str
    """UUID of one of the devices in `hello`'s answer."""
    name: str | None = None
    """Of a line: its newest generation."""
    checkpoint: str | None = None
    """Content identity."""
    dtype: str | None = None
    """As `WeightKey.dtype`, and so on."""
    layout: dict[str, int] | None = None
    """Equal to the set's, whole."""
    format: str | None = None
    """Who laid the tensors out."""
    quantization: str | None = None
    """The method's name."""
    generation: str | None = None
    """A label of the line."""
    set: int | None = None
    """This very set of this epoch: for an engine that comes back to what it had mapped."""


# --- requests ---------------------------------------------------------------------------------


class Ping(Message, frozen=True):
    """Does the broker answer?"""


class Status(Message, frozen=True):
    """What is on the broker's books."""


class Shutdown(Message, frozen=True):
    """End in order."""

    force: bool = False
    """Also while leases are held."""


class Upgrade(Message, frozen=True):
    """Replace the server, by the version that is installed now; engines notice nothing."""


class Hello(Message, frozen=True):
    """Tie this conversation to a session; the first request on it."""

    token: bytes
    """From `welcome`."""
    protocol: int
    """`PROTOCOL`."""
    platform: str
    """"cuda", "rocm" or "simulated": must be the broker's; or `NO_PLATFORM`."""
    label: str = ""
    """For status: what the engine calls itself."""


class Acquire(Message, frozen=True):
    """A lease on a set that is there; if it is not and a source is given: load it, and wait."""

    lease: str
    """The lease's id, made up by the engine; one that this session does not use already."""
    demand: Demand
    """What it must be."""
    source: Source | None = None
    """The checkpoint, if it may have to be loaded."""


class Claim(Message, frozen=True):
    """A lease if the set is there, else the right to write it, else wait for who writes it."""

    lease: str
    """The id of what comes of it, lease or claim."""
    key: WeightKey
    """What will be written; `checkpoint` may be empty."""
    willing: bool = True
    """If another holds the claim and dies, this request may inherit it."""
    generation: str | None = None
    """A label; nil: the next number."""
    fresh: bool = False
    """Never a lease and no waiting: a generation of its own, or `busy`."""


class Load(Message, frozen=True):
    """As `claim`, but if the set is absent a loader process runs the code that the engine ships.

    The code's descriptor has gone before, on the session socket, under this request's id. The
    broker hands it on and never looks into it.
    """

    lease: str
    """The lease's id."""
    key: WeightKey
    """What the code will make."""
    description: str
    """For messages and the log: what the code calls itself."""
    seconds: float
    """The loader is ended when it has not sealed by then."""


class Resolve(Message, frozen=True):
    """A loader found out whose bytes it is about to load: are they resident already?"""

    claim: str
    """The claim's id."""
    checkpoint: str
    """Content identity."""
    files: list[FileStamp]
    """Stamps that lead to these bytes."""


class Reserve(Message, frozen=True):
    """The manifest's descriptor has gone before, on the session socket, under this request's id."""

    claim: str
    """The claim's id."""
    nbytes: int
    """Bytes that the manifest needs."""
    tensors: int
    """How many it has."""
    dtype: str
    """For the set's key."""
    quantization: str = ""
    """For the set's key."""


class Seal(Message, frozen=True):
    claim: str
    """The claim's id."""
    checkpoint: str
    """Content identity of what was written; \"\": what the claim's key says."""
    files: list[FileStamp] = []
    """Stamps that lead to these bytes."""
    keep: bool = False
    """The claim becomes a lease of the same id at once, so that nothing can evict the set first."""


class Abandon(Message, frozen=True):
    """Give up. The error is what the waiters get, unless one of them takes the claim over."""

    claim: str
    """The claim's id."""
    status: str
    """The error's word."""
    payload: str
    """Its text, as in a reply."""


class Report(Message, frozen=True):
    """How far a writer is: passed on as `progress` to who waits, at most four times a second."""

    claim: str
    """The claim's id."""
    stage: str
    """What it is doing, for people."""
    done: int
    """Bytes."""
    total: int
    """Bytes; 0: not known."""


class Release(Message, frozen=True):
    """Give a lease back, after the memory was unmapped."""

    lease: str
    """The lease's id."""


class Cancel(Message, frozen=True):
    lease: str
    """The lease of an `acquire` or `claim` of the same session. Still waiting: withdrawn; granted
    already: given back; unknown: nothing to do. So a client whose time ran out leaves no lease."""


class Evict(Message, frozen=True):
    """Forget sets as soon as nobody leases them."""

    set: str
    """A set's id as `status` prints it ("7"), its name, or its checkpoint identity."""


class Pin(Message, frozen=True):
    """Keep these sets although nobody leases them and memory is needed."""

    set: str
    """As of `evict`."""


class Unpin(Message, frozen=True):
    """The opposite of `pin`."""

    set: str
    """As of `evict`."""


class Watch(Message, frozen=True):
    """Send this session's conversation events about the lines of this name; "" about all."""

    name: str
    """Of the lines."""


class Unwatch(Message, frozen=True):
    """No more events about this name."""

    name: str
    """As of `watch`."""


REQUESTS: dict[str, type[Message]] = {
    "ping": Ping,
    "status": Status,
    "shutdown": Shutdown,
    "upgrade": Upgrade,
    "hello": Hello,
    "acquire": Acquire,
    "claim": Claim,
    "resolve": Resolve,
    "reserve": Reserve,
    "seal": Seal,
    "abandon": Abandon,
    "report": Report,
    "release": Release,
    "cancel": Cancel,
    "evict": Evict,
    "load": Load,
    "pin": Pin,
    "unpin": Unpin,
    "watch": Watch,
    "unwatch": Unwatch,
}

_WORDS = {operation.encode(): operation for operation in REQUESTS}

SESSIONLESS = frozenset({"ping", "status"})
"""Operations a peer may use without `hello`; their payload is empty."""


# --- replies ----------------------------------------------------------------------------------


class Pong(Message, frozen=True):
    """The broker's loop turns."""

    protocol: int
    """`PROTOCOL` of the broker."""
    epoch: str
    """As in `welcome`."""
    pid: int
    """The server's."""
    loop_age_ms: float
    """Milliseconds since the loop's last turn began."""


class Welcomed(Message, frozen=True):
    """The conversation is the session's."""

    session: int
    """Its number, as `status` shows it."""
    epoch: str
    """Must be that of `welcome`."""
    devices: list[str]
    """UUIDs."""


class Granted(Message, frozen=True, tag_field="right", tag="lease"):
    """A lease. The descriptors come with `attach` on the session socket."""

    lease: str
    """The id that was asked for."""
    set: int
    """The set's number in this epoch."""
    key: WeightKey
    """What the set is."""
    generation: str | None
    """Its label, or nil: the set is of no line."""
    nbytes: int
    """Bytes of the slab."""
    tensors: int
    """How many it has."""
    how: str
    """"resident" (it was there), "loaded" (this request caused the load), "shared" (waited for
    another's), "hashed" (the bytes were read, found to be resident, and not loaded again) or
    "published" (this session wrote it)."""


class Claimed(Message, frozen=True, tag_field="right", tag="claim"):
    """The right to write: `reserve`, fill, `seal` or `abandon`, all under this claim's id."""

    claim: str
    """The id that was asked for."""


class Resolved(Message, frozen=True):
    """Whether the bytes have to be loaded."""

    resident: bool
    """True: the bytes are here already, everybody was served, the claim is over."""


class Reserved(Message, frozen=True):
    """The slab is there: `attach` delivers it, writable."""

    claim: str
    """The claim's id."""
    nbytes: int
    """Bytes of the slab, at least those asked for."""


class Sealed(Message, frozen=True):
    """The set is complete and immutable; the claim is over."""

    set: int
    """The set's number."""
    checkpoint: str
    """Its content identity."""
    generation: str | None
    """Its label, or nil."""
    resident: bool
    """True: another set held the same bytes already; this slab was discarded for that one."""
    granted: Granted | None = None
    """The lease, if `keep` was asked for."""


class Done(Message, frozen=True):
    """It is done."""


class Pinned(Message, frozen=True, omit_defaults=True):
    """Which sets were meant."""

    sets: list[int]
    """Their numbers."""
    kept: list[int] = []
    """Of these, sets that `pin` has saved: they were to go with their last lease."""


class Evicted(Message, frozen=True):
    """Which sets were meant."""

    sets: list[int]
    """Their numbers."""
    draining: list[int]
    """Of these, sets still leased: freed when their last lease ends."""


class Progress(Message, frozen=True):
    """How far the load is that a request waits for."""

    stage: str
    """What is being done, for people."""
    done: int
    """Bytes."""
    total: int
    """Bytes; 0: not known."""


class StatusReport(Message, frozen=True):
    """Everything on the books, for people and monitoring."""

    broker: dict[str, Any]
    """Name, version, pids, times, what to look at."""
    devices: dict[str, Any]
    """By UUID: the books of each device's bytes."""
    sets: list[Any]
    """Weight sets."""
    sessions: list[Any]
    """Processes with a session."""
    counters: dict[str, int]
    """What happened since the server started."""


class Event(Message, frozen=True):
    """Something happened that the session watches. Hints: one that does not read misses some."""

    event: str
    """Which."""
    detail: dict[str, Any] = {}
    """What about."""


# --- session packets --------------------------------------------------------------------------


class SessionMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of the packets on the session socket."""


class Welcome(SessionMessage, tag="welcome", frozen=True):
    """Broker to engine, first packet."""

    session: int
    """The session's number."""
    token: bytes
    """For `hello`; secret."""
    epoch: str
    """Of this broker; another one after its end."""
    protocol: int = PROTOCOL
    """`PROTOCOL` of the broker."""


class Refused(SessionMessage, tag="refused", frozen=True):
    """Broker to engine instead of `welcome` or `attached`: an error."""

    lease: str
    """Of the `attach`; \"\": of another packet, or there is no session."""
    status: str
    """The error's word."""
    payload: str
    """Its text, as in a reply."""


CANARY = "canary:"
"""`Attach.lease` begins with it, and a device's UUID follows: for the device's canary."""


class Attach(SessionMessage, tag="attach", frozen=True):
    """Engine to broker: deliver the descriptors of a granted lease, or of a claim's slab."""

    lease: str
    """The id of a lease or claim of this session."""


class Attached(SessionMessage, tag="attached", frozen=True):
    """Broker to engine, with the slab's descriptor and, for a lease, the manifest's."""

    lease: str
    """As of the `attach`."""
    nbytes: int
    """Bytes of the slab."""
    epoch: str
    """As in `welcome`."""
    seed: str = ""
    """Of a canary: what its pattern is made of."""


class Deliver(SessionMessage, tag="deliver", frozen=True):
    """Engine to broker, with one descriptor that the request of this id is about.

    If the same is delivered twice, the latest counts.
    """

    request: bytes
    """The request's id: the first frame of its envelope."""
    what: str
    """"source" (an `acquire`: the checkpoint's folder), "manifest" (a `reserve`) or "code" (a
    `load`)."""


class Leave(SessionMessage, tag="leave", frozen=True):
    """Engine to broker, the last packet: what follows is no death. Changes nothing by itself."""


ToBroker: TypeAlias = Attach | Deliver | Leave
ToEngine: TypeAlias = Welcome | Refused | Attached

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    operation: msgspec.msgpack.Decoder(struct) for operation, struct in REQUESTS.items()
}
_to_broker = msgspec.msgpack.Decoder(ToBroker)
_right = msgspec.msgpack.Decoder(Granted | Claimed)
_to_engine = msgspec.msgpack.Decoder(ToEngine)


def encode(message: msgspec.Struct) -> bytes:
    """The message as it travels.

    Raises:
        BadRequest: a text, a number or a value of another type in it is none that can.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{type(message).__name__.lower()}: {error.object[:MAX_NAME_BYTES]!a} is not valid "
            "Unicode"
        ) from error
    except OverflowError as error:
        raise BadRequest(
            f"{type(message).__name__.lower()}: a number has more than 64 bits"
        ) from error
    except TypeError as error:
        raise BadRequest(f"{type(message).__name__.lower()}: {error}") from error


def as_plain(message: msgspec.Struct) -> dict[str, Any]:
    """The message as dicts, lists, strings and numbers, for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    return plain


def decode_request(operation: str, payload: bytes) -> Message:
    """The request's struct.

    Raises:
        UnknownOperation, BadRequest.
    """
    decoder = _decoders.get(operation)
    if decoder is None:
        known = f"known are {', '.join(sorted(REQUESTS))}"
        near = did_you_mean(operation, REQUESTS)
        hint = f"{near} {known}" if near else known
        raise UnknownOperation(f"there is no operation {operation!r}; {hint}", operation=operation)
    if operation in SESSIONLESS:
        if payload:
            raise BadRequest(f"{operation} takes an empty payload")
        return REQUESTS[operation]()
    try:
        message: Message = decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the payload of {operation} cannot be decoded: {error}") from error
    _check_names(operation, message)
    return message


_MAY_BE_EMPTY = ("checkpoint", "dtype", "quantization")
_NAMES = ("lease", "claim", "set", "stage", "generation", *_MAY_BE_EMPTY)
_NAMES_IN = {
    operation: tuple(field for field in _NAMES if field in struct.__struct_fields__)
    for operation, struct in REQUESTS.items()
}


def _check_names(operation: str, message: Message) -> None:
    for field in _NAMES_IN[operation]:
        name = getattr(message, field)
        if (name is None or is_name(name)) or (not name and field in _MAY_BE_EMPTY):
            continue
        raise _bad_name(operation, field)
    check = _CHECKS.get(operation)
    if check is not None:
        check(operation, message)


def _check_acquire(operation: str, message: Acquire) -> None:
    _check_described(operation, message.demand)
    _check_source(operation, message.source)


def _check_claim(operation: str, message: Claim) -> None:
    _check_described(operation, message.key)


def _check_load(operation: str, message: Load) -> None:
    _check_described(operation, message.key)
    _check_name(operation, "description", message.description)
    if not 0 < message.seconds <= MAX_LOAD_SECONDS:
        raise BadRequest(f"{operation}: seconds must be above 0, at most {MAX_LOAD_SECONDS}")


def _check_watched(operation: str, message: Watch | Unwatch) -> None:
    if message.name:
        _check_name(operation, "name", message.name)


def _check_files(operation: str, message: Source | Resolve | Seal) -> None:
    if len(message.files) > MAX_FILES:
        raise BadRequest(f"{operation}: a checkpoint may have {MAX_FILES} files at most")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "acquire": _check_acquire,
    "claim": _check_claim,
    "load": _check_load,
    "watch": _check_watched,
    "unwatch": _check_watched,
    "resolve": _check_files,
    "seal": _check_files,
}
"""What the names alone do not say."""


def _check_source(operation: str, source: Source | None) -> None:
    if source is None:
        return
    if not source.files:
        raise BadRequest(f"{operation}: the source names no file")
    _check_files(operation, source)
    if len(source.path.encode()) > MAX_PATH_BYTES:
        raise BadRequest(f"{operation}: a path may have {MAX_PATH_BYTES} bytes at most")
    _check_name(operation, "fingerprint", source.fingerprint)
    if source.conversion is not None:
        _check_conversion(operation, source.conversion)


def _check_conversion(operation: str, conversion: Conversion) -> None:
    names = [name for name, _ in conversion.exceptions]
    if len(names) > MAX_EXCEPTIONS or names != sorted(set(names)):
        raise BadRequest(
            f"{operation}: a conversion may have {MAX_EXCEPTIONS} exceptions at most, sorted by "
            "name, each name once"
        )
    for name in names:
        _check_name(operation, "an exception's name", name)
    for dtype in {conversion.dtype, *(dtype for _, dtype in conversion.exceptions)}:
        _check_name(operation, "dtype", dtype)
        if dtype not in CONVERTIBLE:
            raise BadRequest(
                f"{operation}: weights cannot be converted to {dtype!r}; possible are "
                + ", ".join(CONVERTIBLE)
            )


_DESCRIBING = ("device", "name", "checkpoint", "dtype", "format", "quantization", "generation")
_DESCRIBED_IN = {
    struct: tuple(field for field in _DESCRIBING if field in struct.__struct_fields__)
    for struct in (Demand, WeightKey)
}


def _check_described(operation: str, described: Demand | WeightKey) -> None:
    # What a key says comes back with each grant and in error sentences: it must stay small.
    for field in _DESCRIBED_IN[type(described)]:
        text = getattr(described, field)
        if text is None:
            continue
        if is_name(text):
            continue
        may_be_empty = field in ("dtype", "quantization") or isinstance(described, WeightKey)
        if text or not may_be_empty:
            raise _bad_name(operation, field)
    layout = described.layout
    if layout and (len(layout) > MAX_LAYOUT or not all(map(is_name, layout))):
        raise BadRequest(f"{operation}: a layout may have {MAX_LAYOUT} named sizes at most")


def _check_name(operation: str, field: str, name: str | None) -> None:
    if name is not None and not is_name(name):
        raise _bad_name(operation, field)


def _bad_name(operation: str, field: str) -> BadRequest:
    return BadRequest(
        f"{operation}: {field} must be a printable name of 1 to {MAX_NAME_BYTES} bytes"
    )


def is_name(text: str) -> bool:
    if not text.isprintable():  # so are halves of a pair, which have no bytes
        return False
    nbytes = len(text) if text.isascii() else len(text.encode())
    return 0 < nbytes <= MAX_NAME_BYTES


def decode_to_broker(packet: bytes) -> ToBroker:
    """Raises `BadRequest` for anything but a packet an engine may send."""
    message: ToBroker = _decode_packet(_to_broker, packet)
    if isinstance(message, Attach):
        if not is_name(message.lease):
            raise _bad_name("attach", "lease")
    elif isinstance(message, Deliver) and len(message.request) > MAX_ENVELOPE_FRAME_BYTES:
        raise BadRequest(f"deliver: a request id has {MAX_ENVELOPE_FRAME_BYTES} bytes at most")
    return message


def decode_to_engine(packet: bytes) -> ToEngine:
    """Raises `BadRequest` for anything but a packet the broker may send."""
    message: ToEngine = _decode_packet(_to_engine, packet)
    return message


def _decode_packet(decoder: msgspec.msgpack.Decoder[Any], packet: bytes) -> Any:
    try:
        return decoder.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"a session packet cannot be decoded: {error}") from error


def decode_right(payload: bytes) -> Granted | Claimed:
    """Client side: the answer to a `claim`.

    Raises:
        BadRequest: it is neither.
    """
    try:
        return _right.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the reply is neither a lease nor a claim: {error}") from error


def decode_reply(kind: type[msgspec.Struct], payload: bytes) -> Any:
    """Client side: the struct of an `ok`, `progress` or `event` payload, as `kind`.

    Raises:
        BadRequest: the broker sent something else (a broker of another version, or not a broker).
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the reply is not a {kind.__name__}: {error}") from error
