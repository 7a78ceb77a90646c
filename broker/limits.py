"""What one broker lets its peers use, all in one place. Plain data; imports nothing heavy.

The defaults suit a node with 16 engines of up to eight processes each and sets of 200,000 tensors,
with room to spare: an engine that works as it should meets none of them. Each is an option of
`weight-broker serve`, `--limit NAME=VALUE`, and whoever meets one is told its name and its value.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from broker.errors import BadRequest
from broker.suggest import did_you_mean

_MAX_FRAMES = 10
_MAX_FRAME_BYTES = 256 * 1024
"""As wire.py has them; not imported, so that `serve` and the keeper need no msgspec to start."""

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _limit(default: int, unit: str, meaning: str, least: int = 1, most: int = 1 << 40) -> Any:
    facts = {"unit": unit, "meaning": meaning, "least": least, "most": most}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, repr=False)  # to make one takes a millisecond of every start
class Limits:
    """Every limit, as a number of what its `unit` says. `LIMITS` has the meanings."""

    sessions: int = _limit(4096, "sessions", "processes connected at once, loaders not counted")
    connections: int = _limit(
        8192, "connections", "conversations open at once, tied to a session or not"
    )
    process_sessions: int = _limit(256, "sessions", "of those, sessions of one process")
    process_connections: int = _limit(512, "connections", "of those, conversations of one process")
    requests: int = _limit(1024, "requests", "requests of one session without an answer yet")
    request_bytes: int = _limit(
        16 << 20, "bytes", "payloads of one session's requests without an answer yet"
    )
    all_request_bytes: int = _limit(
        128 << 20, "bytes", "payloads of all requests without an answer yet"
    )
    waiting: int = _limit(
        256, "requests", "requests of one session that wait for weights: each blocks a thread there"
    )
    all_waiting: int = _limit(16_384, "requests", "requests of all sessions that wait for weights")
    claims: int = _limit(
        256, "claims", "weight sets that one session may be writing, or have loaded, at once"
    )
    all_claims: int = _limit(
        4096, "claims", "weight sets being written or loaded at once, waiting loads included"
    )
    names: int = _limit(
        16_384, "names", "names of resident sets; one for each device, layout, dtype and format"
    )
    set_names: int = _limit(256, "names", "names of one resident set")
    watches: int = _limit(64, "names", "names whose events one session gets")
    tensors: int = _limit(1_000_000, "tensors", "tensors of one weight set")
    manifest_bytes: int = _limit(
        256 << 20,
        "bytes",
        "description of one set's tensors; 200,000 take 16 MiB",
        most=1 << 30,
    )
    frames: int = _limit(
        _MAX_FRAMES,
        "frames",
        "frames of one request, envelope included",
        least=2,
        most=_MAX_FRAMES,
    )
    frame_bytes: int = _limit(
        _MAX_FRAME_BYTES,
        "bytes",
        "payload of one request",
        least=4096,
        most=_MAX_FRAME_BYTES,
    )
    descriptors: int = _limit(
        256,
        "descriptors",
        "delivered descriptors of one session that wait for their requests; of one process, while "
        "half of all that the broker may have open is open",
    )
    replies: int = _limit(
        256, "replies", "final replies kept for a peer that does not read, before it is cut off"
    )
    reply_bytes: int = _limit(
        8 << 20, "bytes", "final replies kept for a peer that does not read, before it is cut off"
    )
    packets: int = _limit(
        64, "packets", "session packets kept for a peer that does not read, before its session ends"
    )
    stream_bytes: int = _limit(
        8 << 20,
        "bytes",
        "memory that may go into requests whose end does not come, before their peers are cut off",
        least=1 << 20,
    )
    seal_seconds: int = _limit(
        7200, "seconds", "time a writer has from reserving memory to sealing the set"
    )
    restart_seconds: int = _limit(
        10, "seconds", "longest pause before a server that dies again and again is started", least=0
    )
    loaders: int = _limit(
        8, "loaders", "loader processes at once; further loads wait for their turn"
    )

    def __post_init__(self) -> None:
        for name, facts in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int:
                raise BadRequest(
                    f"Limits: {name} must be a whole number, not {value!r:.100}", limit=name
                )
            if not facts["least"] <= value <= facts["most"]:
                raise BadRequest(
                    f"--limit {name}={value}: {facts['least']} to {facts['most']} "
                    f"{facts['unit']} are possible",
                    limit=name,
                )

    def reached(self, name: str) -> str:
        """The end of the sentence for a peer that has met a limit: which it is, and the option."""
        unit = LIMITS[name]["unit"]
        value = f"{getattr(self, name)}" + ("" if name.endswith(unit) else f" {unit}")
        return f"(limit {name}={value}; serve --limit {name}=… changes it)"


LIMITS: dict[str, dict[str, Any]] = {
    limit.name: dict(limit.metadata) for limit in dataclasses.fields(Limits)
}
"""By name: unit, meaning, least and most."""

DEFAULTS = Limits()


LEAST_DESCRIPTORS = 256
"""What a broker has open itself and keeps free, and some sessions."""


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_descriptor_limit() -> None:
    """libzmq ends the process when it runs out of descriptors, so take all that are allowed.

    Raises:
        BadRequest: they are too few for a broker.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST_DESCRIPTORS:
        raise BadRequest(
            f"this process may have {hard} descriptors open, a broker needs {LEAST_DESCRIPTORS} at "
            "least: raise the limit (ulimit -n, or LimitNOFILE= of a service)",
            limit="RLIMIT_NOFILE",
            value=hard,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def parse_limits(options: Iterable[str]) -> Limits:
    """Limits from `NAME=VALUE` texts; a value may end in k, m or g for powers of 1024.

    Raises:
        BadRequest: no such limit (the sentence has the nearest names), no number, or a number that
            makes no sense.
    """
    given: dict[str, int] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise BadRequest(f"--limit {option!r}: give NAME=VALUE, e.g. sessions=1000")
        if name not in LIMITS:
            raise _unknown(name)
        given[name] = _number(name, text)
    return Limits(**given)


def _unknown(name: str) -> BadRequest:
    hint = did_you_mean(name, LIMITS, 3) or f"there are {', '.join(LIMITS)}"
    return BadRequest(f"--limit {name}: there is no such limit; {hint}", limit=name)


def _number(name: str, text: str) -> int:
    word = text.strip().lower()
    unit = _UNITS.get(word[-1:], 1)
    digits = word if unit == 1 else word[:-1]
    if not (digits.isascii() and digits.isdecimal()):
        raise BadRequest(
            f"--limit {name}={text}: give a whole number, with k, m or g for powers of 1024",
            limit=name,
        )
    return int(digits[:20]) * unit
