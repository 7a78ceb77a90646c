"""The limits of the wire, each with its sentence."""

from __future__ import annotations

import msgspec
import pytest

from broker import wire
from broker.errors import BadRequest, UnknownOperation
from broker.weights import WeightKey
from tests.support.messages import SOURCE, STAMP, changed, refusal


def test_the_limits() -> None:
    """The numbers that both sides of a conversation rely on."""
    assert wire.PROTOCOL == 1
    assert wire.MAX_FRAME_BYTES == 262_144
    assert (wire.MAX_ENVELOPE_FRAMES, wire.MAX_ENVELOPE_FRAME_BYTES) == (8, 256)
    assert (wire.MAX_WORD_BYTES, wire.MAX_NAME_BYTES, wire.MAX_LAYOUT) == (32, 256, 32)
    assert wire.MAX_SESSION_PACKET_BYTES == 65_536
    assert (wire.MAX_FILES, wire.MAX_PATH_BYTES) == (2048, 16_384)


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "a request has at least two frames: operation and payload"),
        ([b"ping"], "a request has at least two frames: operation and payload"),
        ([b""] * 9 + [b"ping", b""], "a request may have 10 frames at most, this one had more"),
        ([b"x" * 257, b"ping", b""], "an envelope frame may have 256 bytes at most"),
        ([b"ping", b"x" * 262_145], "a payload may have 262144 bytes at most"),
        ([b"p" * 33, b""], "the operation must be an ASCII word of 32 bytes at most"),
        (["pïng".encode(), b""], "the operation must be an ASCII word of 32 bytes at most"),
    ],
)
def test_frames_past_a_limit(frames: list[bytes], sentence: str) -> None:
    """Each limit has its own sentence."""
    with pytest.raises(BadRequest) as error:
        wire.split_request(frames)
    assert error.value.sentence == sentence


def test_frames_at_the_limit() -> None:
    """The largest request there may be is taken apart, its envelope untouched."""
    envelope = [b"x" * 256] * 8
    frames = [*envelope, b"p" * 32, b"y" * 262_144]
    assert wire.split_request(frames) == (tuple(envelope), "p" * 32, b"y" * 262_144)


def test_the_envelope_of_a_malformed_request() -> None:
    """A refusal goes back with the peer's envelope if that can have been one, else without."""
    assert wire.envelope_of([b"id", b"", b"ping"]) == (b"id",)
    assert wire.envelope_of([b"x"]) == ()
    assert wire.envelope_of([]) == ()
    assert wire.envelope_of([b""] * 11) == ()
    assert wire.envelope_of([b"x" * 257, b"ping", b""]) == ()


def test_an_unknown_operation_lists_the_known_ones() -> None:
    """The caller learns what there is; the word it said is quoted."""
    with pytest.raises(UnknownOperation) as error:
        wire.decode_request("acqire\n", b"")
    assert error.value.sentence.startswith(
        "there is no operation 'acqire\\n'; did you mean acquire? "
        "known are abandon, acquire, cancel, claim, "
    )


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        ("acquire", "lease"),
        ("reserve", "claim"),
        ("evict", "set"),
        ("report", "stage"),
        ("claim", "generation"),
        ("load", "description"),
    ],
)
@pytest.mark.parametrize("name", ["", "a" * 257, "ä" * 129, "two\nlines", "tab\t", "\u202e"])
def test_names_are_short_and_printable(operation: str, field: str, name: str) -> None:
    """Names are counted in bytes, and nothing in them can forge a line of a log."""
    assert refusal(operation, changed(operation, **{field: name})) == (
        f"{operation}: {field} must be a printable name of 1 to 256 bytes"
    )


@pytest.mark.parametrize("name", ["a" * 256, "ä" * 128, "llama 3.1/instruct", "模型"])
def test_names_people_use(name: str) -> None:
    """Spaces, slashes and any script are names."""
    message = wire.Evict(name)
    assert wire.decode_request("evict", wire.encode(message)) == message


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("acquire", wire.Acquire("w", wire.Demand("GPU-0", name=""))),
        ("acquire", wire.Acquire("w", wire.Demand("GPU-0", name="a" * 257))),
        ("acquire", wire.Acquire("w", wire.Demand("GPU-0", checkpoint=""))),
        ("acquire", wire.Acquire("w", wire.Demand("GPU-0", "m", generation="a" * 257))),
        ("acquire", wire.Acquire("w", wire.Demand("", "m"))),
        ("claim", wire.Claim("w", WeightKey("GPU-0", name="a\nb"))),
        ("claim", wire.Claim("w", WeightKey("GPU-0", "m", format="f" * 257))),
        ("load", wire.Load("w", WeightKey("GPU-0", "m", quantization="q" * 257), "b", 1.0)),
        ("reserve", wire.Reserve("c", 1, 1, "d" * 257)),
        ("seal", wire.Seal("c", "x" * 257)),
        ("resolve", wire.Resolve("c", "x" * 257, [])),
        ("watch", wire.Watch("a" * 257)),
    ],
)
def test_keys_and_demands_are_bounded_too(operation: str, message: wire.Message) -> None:
    """What comes back with each grant, or in a sentence, cannot grow a reply past its limit."""
    assert refusal(operation, wire.encode(message)).endswith(
        "must be a printable name of 1 to 256 bytes"
    )


def test_an_empty_field_of_a_key_is_none() -> None:
    """In a key an empty text leaves the field out; a demand may ask for unquantised weights."""
    for operation, message in (
        ("claim", wire.Claim("w", WeightKey("GPU-0", "m"))),
        ("acquire", wire.Acquire("w", wire.Demand("GPU-0", "m", quantization=""))),
    ):
        assert wire.decode_request(operation, wire.encode(message)) == message


@pytest.mark.parametrize("layout", [{f"axis{n}": n for n in range(33)}, {"": 1}, {"x" * 257: 1}])
def test_layouts_are_bounded(layout: dict[str, int]) -> None:
    """No more axes than any parallel layout has, each with a name."""
    for operation, message in (
        ("claim", wire.Claim("w", WeightKey("GPU-0", "m", layout=layout))),
        ("acquire", wire.Acquire("w", wire.Demand("GPU-0", "m", layout=layout))),
    ):
        assert refusal(operation, wire.encode(message)) == (
            f"{operation}: a layout may have 32 named sizes at most"
        )


def test_sources_are_bounded() -> None:
    """A source names its files, at most 2048, and its path is a path."""
    demand = wire.Demand("GPU-0")
    replace = msgspec.structs.replace
    for source, sentence in (
        (replace(SOURCE, files=[]), "the source names no file"),
        (replace(SOURCE, files=[STAMP] * 2049), "a checkpoint may have 2048 files at most"),
        (replace(SOURCE, path="ä" * 8193), "a path may have 16384 bytes at most"),
    ):
        payload = wire.encode(wire.Acquire("w", demand, source))
        assert refusal("acquire", payload) == f"acquire: {sentence}"
    assert refusal("seal", wire.encode(wire.Seal("c", "x", [STAMP] * 2049))) == (
        "seal: a checkpoint may have 2048 files at most"
    )


def converted(dtype: str, *exceptions: tuple[str, str]) -> bytes:
    conversion = wire.Conversion(dtype, exceptions)
    source = msgspec.structs.replace(SOURCE, conversion=conversion)
    return wire.encode(wire.Acquire("w", wire.Demand("GPU-0"), source))


def test_a_conversion_is_to_a_float() -> None:
    """Dtypes that no loader converts to are refused by name, also those of exceptions."""
    sentence = (
        "acquire: weights cannot be converted to 'int8'; possible are float16, bfloat16, float32, "
        "float64"
    )
    assert refusal("acquire", converted("int8")) == sentence
    assert refusal("acquire", converted("float16", ("a", "int8"))) == sentence
    assert refusal("acquire", converted("x\n")).startswith("acquire: dtype must be a printable")


def test_exceptions_of_a_conversion_are_bounded() -> None:
    """So many tensors at most, in order, by printable names: equal ones must be equal."""
    many = tuple((f"{n:05}", "float32") for n in range(wire.MAX_EXCEPTIONS + 1))
    sentence = (
        "acquire: a conversion may have 1024 exceptions at most, sorted by name, each name once"
    )
    wire.decode_request("acquire", converted("float16", *many[:-1]))
    for wrong in (many, many[1::-1], many[:1] * 2):
        assert refusal("acquire", converted("float16", *wrong)) == sentence
    assert refusal("acquire", converted("float16", ("", "float32"))).startswith(
        "acquire: an exception's name must be a printable name"
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 86_401.0])
def test_a_load_has_a_deadline(seconds: float) -> None:
    """A shipped loader's time is finite and positive."""
    sentence = "load: seconds must be above 0, at most 86400.0"
    assert refusal("load", changed("load", seconds=seconds)) == sentence


def test_session_packets_are_bounded() -> None:
    """A lease id is a name, a request id as short as an envelope's frame."""
    with pytest.raises(BadRequest, match=r"^attach: lease must be a printable name"):
        wire.decode_to_broker(wire.encode(wire.Attach("a\nb")))
    with pytest.raises(BadRequest, match=r"^deliver: a request id has 256 bytes at most$"):
        wire.decode_to_broker(wire.encode(wire.Deliver(b"x" * 257, "source")))


def test_the_largest_acquire_of_a_real_checkpoint_fits() -> None:
    """A checkpoint of 1,000 shards is described within one frame."""
    stamp = wire.FileStamp(
        "model-00001-of-01000.safetensors", 2**63, 2**63, 2**63, 2**62, 2**62, "f" * 64
    )
    request = wire.Acquire("w", wire.Demand("GPU-0"), wire.Source("/m", None, [stamp] * 1000, "f"))
    assert len(wire.encode(request)) < wire.MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        (wire.Demand("SIM-0", name="\ud800"), r"acquire: '\\ud800' is not valid Unicode"),
        (
            wire.Demand("SIM-0", layout={"tp_size": 1 << 64}),
            "acquire: a number has more than 64 bits",
        ),
    ],
)
def test_what_cannot_travel(demand: wire.Demand, said: str) -> None:
    """It is refused where it is sent, like everything that is refused where it arrives."""
    with pytest.raises(BadRequest, match=said):
        wire.encode(wire.Acquire("1", demand, None))
