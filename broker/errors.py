"""Every error the broker and its clients raise on purpose, and the words they travel under.

    BrokerError                            anything below; `status` is the word on the wire
    ├── BadRequest                         the caller's fault: the request cannot be understood
    ├── UnknownOperation                   the caller's fault: no such operation
    ├── ProtocolMismatch                   client and broker are of incompatible versions
    ├── NoSession                          the conversation is not tied to a live session
    ├── NotFound                           nothing by that key or name is resident, or no such file
    ├── Mismatch                           resident weights are not what was demanded
    │   └── BindError                      client only: weights and module do not fit
    ├── Busy                               somebody else holds what was asked for; try later
    ├── OverBudget                         the weights do not fit
    ├── LoadFailed                         the checkpoint or its loader is at fault
    ├── UnsupportedPlatformForIPCError     no device here can share memory between processes
    ├── UnsupportedQuantForIPCError        the tensors alone are not all the method needs
    ├── StaleEpoch                         the broker that gave this out is gone
    ├── RequestTimeout                     the caller's time ran out (also a `TimeoutError`)
    ├── Cancelled                          the request was withdrawn
    ├── ShuttingDown                       the broker is stopping
    ├── InternalError                      the broker's fault: please report it
    ├── BrokerNotFound                     client only: nobody listens
    ├── BrokerLost                         client only: the broker died during the call
    └── UsageError                         client only: the object cannot be used like this

An error travels as UTF-8 text: its first line is the sentence for a person, its second line a JSON
object with the fields. `to_payload` writes that, `from_payload` reads it; an error made from a
payload has the same type, sentence and fields as the one that was sent.

docs/reference/errors.md has cause and cure of each.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

MAX_SENTENCE_BYTES = 8192
"""Longest error text that travels: a reply must stay far below the frame limit (wire.py)."""


class BrokerError(Exception):
    """Something the broker, its client or a loader refused or could not do.

    Attributes:
        status: the word this error travels under (DESIGN: one per class).
        sentence: one line for a person: what, where, what to do.
        fields: the facts behind the sentence, JSON values only; also readable as attributes.
    """

    status: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1

    # Positional only: fields come from the peer too, and may be called "self" or "sentence".
    def __init__(self, sentence: str, /, **fields: Any) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.fields: dict[str, Any] = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        # No dunder names: copying and printing ask for those, and a peer chose the fields.
        if name in fields and not name.startswith("__"):
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or field {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.sentence, self.fields))

    def to_payload(self) -> bytes:
        """The error as it travels: sentence, and the fields as JSON on a second line.

        Never fails: fields that JSON cannot hold, or that are too long, stay behind.
        """
        sentence = " ".join(self.sentence.split("\n"))
        text = sentence.encode("utf-8", "backslashreplace")[:MAX_SENTENCE_BYTES]
        payload = text.decode("utf-8", "ignore").encode()
        encoded = _encoded(self.fields) if self.fields else b""
        if not encoded or len(encoded) > 4 * MAX_SENTENCE_BYTES:
            return payload
        return payload + b"\n" + encoded


def _encoded(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=True, allow_nan=False, default=str).encode()
    except (TypeError, ValueError, RecursionError):  # such a key, not a number, a cycle
        return b""


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # whatever a peer may put there
        return {}
    return fields if isinstance(fields, dict) else {}


def _rebuild(cls: type[BrokerError], sentence: str, fields: dict[str, Any]) -> BrokerError:
    return cls(sentence, **fields)


class BadRequest(BrokerError):
    status = "bad-request"
    exit_code = 2


class UnknownOperation(BrokerError):
    status = "unknown-operation"
    exit_code = 2


class ProtocolMismatch(BrokerError):
    status = "protocol-mismatch"
    exit_code = 4


class NoSession(BrokerError):
    status = "no-session"
    exit_code = 4


class NotFound(BrokerError):
    status = "not-found"
    exit_code = 5


class Mismatch(BrokerError):
    """Fields: `differing`: {field: {"wanted": …, "resident": …}}."""

    status = "mismatch"
    exit_code = 6


class BindError(Mismatch):
    """Client only: the weights do not fit the module, which was left as it was.

    Fields: `reason` (one word for the gravest misfit), the full lists `missing`, `unexpected`,
    `on_meta` and `tie_conflicts`, `mismatched`: {name: {"module": …, "stored": …}}, and `prefix`:
    the one with which all names would be found, or "".
    """


class Busy(BrokerError):
    status = "busy"
    exit_code = 7


class OverBudget(BrokerError):
    """Fields, bytes as numbers: `requested`, `limit` (what the broker may hold; not where an
    engine's own mapping failed), `free` (of the limit, or of a device that has less; None: its
    driver does not say), `device`, and where the limit was met `held`: sets that cannot make room,
    each with `set`, `nbytes` and `why`."""

    status = "over-budget"
    exit_code = 8


class LoadFailed(BrokerError):
    """Fields: `reason` (a short word, e.g. "truncated"), `file`, `tensor` where known; of a loader
    that failed `last_words`, and `traceback` if its code raised."""

    status = "load-failed"
    exit_code = 9


class UnsupportedPlatformForIPCError(BrokerError):
    """Fields: `where` ("broker" or "engine"), `platform` (what was found), `reason`."""

    status = "unsupported-platform"
    exit_code = 3


class UnsupportedQuantForIPCError(BrokerError):
    """Fields: `where`, `method` (the quantisation method's name)."""

    status = "unsupported-quantization"
    exit_code = 10


class StaleEpoch(BrokerError):
    status = "stale-epoch"
    exit_code = 4


class RequestTimeout(BrokerError, TimeoutError):
    """Fields: `stage`: what was being waited for, `seconds`."""

    status = "timeout"
    exit_code = 11


class Cancelled(BrokerError):
    status = "cancelled"
    exit_code = 11


class ShuttingDown(BrokerError):
    status = "shutting-down"
    exit_code = 12


class InternalError(BrokerError):
    status = "internal"
    exit_code = 1


class BrokerNotFound(BrokerError):
    """Client only. Fields: `tried`: every socket path that was tried."""

    status = "not-found"
    exit_code = 13


class BrokerLost(BrokerError):
    """Client only: the broker went away. Mapped weights stay valid until they are unmapped."""

    status = "shutting-down"
    exit_code = 13


class UsageError(BrokerError):
    """Client only: this object cannot be used like this (closed, forked, tensors still alive)."""

    status = "bad-request"
    exit_code = 2


_BY_STATUS: dict[str, type[BrokerError]] = {
    cls.status: cls
    for cls in (
        BadRequest,
        UnknownOperation,
        ProtocolMismatch,
        NoSession,
        NotFound,
        Mismatch,
        Busy,
        OverBudget,
        LoadFailed,
        UnsupportedPlatformForIPCError,
        UnsupportedQuantForIPCError,
        StaleEpoch,
        RequestTimeout,
        Cancelled,
        ShuttingDown,
        InternalError,
    )
}
ERROR_STATUSES: frozenset[str] = frozenset(_BY_STATUS)


def text_of(error: BaseException) -> str:
    """What an exception of anybody's says; of one that cannot even do that, nothing."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its own code has failed
        return ""


def from_payload(status: str, payload: bytes) -> BrokerError:
    """The error a reply stands for; an unknown status becomes an `InternalError` naming it."""
    first, *rest = payload.split(b"\n", 2)
    sentence = first.decode("utf-8", "replace")
    fields = _decoded(rest[0]) if rest else {}
    cls = _BY_STATUS.get(status)
    if cls is None:
        return InternalError(f"the broker answered with the unknown status {status!r}: {sentence}")
    return cls(sentence, **fields)
