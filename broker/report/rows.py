"""Servers, weight sets and engines as rows of bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from broker.amounts import counted, human
from broker.commands.text import shown
from broker.report.axis import Axis
from broker.report.story import End, EngineStory, ServerLife, SetStory, Span

MOST_ROWS = 150
"""Of a kind: the latest. All of them are in the page's numbers."""
MOST_CHARACTERS = 120
"""Of a text that a peer made up."""

_BAD = {End.DIED: "died", End.FAILED: "failed"}

Told = TypeVar("Told", bound=Span)


@dataclass(frozen=True)
class Bar:
    """Something that lasted; `left` and `width` are CSS lengths."""

    kind: str
    left: str
    width: str


@dataclass(frozen=True)
class Row:
    """One line of the timeline. `title` is the whole story in words."""

    label: str
    detail: str
    title: str
    bars: list[Bar]
    mark: str = ""
    """"died" or "failed", at `at`; "" for an end that needs no attention."""
    at: str = ""


@dataclass(frozen=True)
class Rows:
    rows: list[Row] = field(default_factory=list)
    left_out: int = 0


def rows_of(told: list[Told], row: Callable[[Told, Axis], Row], axis: Axis) -> Rows:
    """The latest of what is told, in the order in which it began."""
    latest = sorted(told, key=lambda each: (each.end is None, each.end or each.start))[-MOST_ROWS:]
    latest.sort(key=lambda each: each.start)
    return Rows([row(each, axis) for each in latest], len(told) - len(latest))


def server_row(life: ServerLife, axis: Axis) -> Row:
    """One server process."""
    how = f"{life.how.value}: {life.cause}" if life.cause else life.how.value
    return Row(
        label=f"server {life.pid}",
        detail=life.how.value,
        title=f"server {life.pid}, {_how_long(life)}, {cut(how)}",
        bars=[_bar("server", life, axis)],
        **_mark(life.how, life, axis),
    )


def set_row(record: SetStory, axis: Axis) -> Row:
    """One weight set: while it is loaded, resident, and not wanted any more but leased."""
    names = ", ".join(f"{name}#{label}" for name, label in sorted(record.names.items()))
    size = human(record.nbytes) if record.nbytes else ""
    origin = cut(record.origin)
    said = (f"set {record.number}", cut(names), size, origin, _how_long(record), _told_end(record))
    return Row(
        label=f"set {record.number}",
        detail=cut(names) if names else origin,
        title=", ".join(part for part in said if part),
        bars=[
            *_phases(record, axis),
            *(_bar("attached", span, axis) for span in axis.merged(record.leased)),
        ],
        **_mark(record.how, record, axis),
    )


def engine_row(engine: EngineStory, axis: Axis) -> Row:
    """One process: its session, and in it when it leased weights."""
    sets = ", ".join(map(str, sorted(engine.leases)))
    leased = f"leased set {sets}" if sets else "leased nothing"
    end = engine.how.value
    if engine.held:
        end += f", holding {counted(engine.held, 'lease')}"
    command = " ".join(part for part in (cut(engine.label), cut(engine.command)) if part)
    said = (f"process {engine.pid}", command, f"session {engine.session}", f"uid {engine.uid}")
    spans = sorted(
        (span for spans in engine.leases.values() for span in spans), key=lambda span: span.start
    )
    return Row(
        label=f"engine {engine.pid}" if engine.pid else "the broker's own",  # for preloads
        detail=command,
        title=", ".join([*said, leased, _how_long(engine), end, cut(engine.cause)]).rstrip(", "),
        bars=[
            _bar("session", engine, axis),
            *(_bar("leasing", span, axis) for span in axis.merged(spans)),
        ],
        **_mark(engine.how, engine, axis),
    )


def cut(text: str) -> str:
    """A text that a peer made up: one line, printable, not too long."""
    if not text:
        return ""
    plain = shown(text)
    return plain if len(plain) <= MOST_CHARACTERS else plain[: MOST_CHARACTERS - 1] + "…"


def _phases(record: SetStory, axis: Axis) -> list[Bar]:
    if record.sealed is None:
        return [_bar("loading", record, axis)]
    phases = [_bar("loading", Span(record.start, record.sealed), axis)]
    if record.unwanted is None:
        return [*phases, _bar("resident", Span(record.sealed, record.end), axis)]
    return [
        *phases,
        _bar("resident", Span(record.sealed, record.unwanted), axis),
        _bar("unwanted", Span(record.unwanted, record.end), axis),
    ]


def _bar(kind: str, span: Span, axis: Axis) -> Bar:
    return Bar(kind, axis.left(span.start), axis.width(span))


def _mark(how: End, span: Span, axis: Axis) -> dict[str, str]:
    if how not in _BAD or span.end is None:
        return {}
    return {"mark": _BAD[how], "at": axis.left(span.end)}


def _told_end(record: SetStory) -> str:
    end = record.how.value
    return f"{end}: {cut(record.cause)}" if record.cause else end


def _how_long(span: Span) -> str:
    return "still there" if span.end is None else f"for {lasting(span.end - span.start)}"


def lasting(seconds: float) -> str:
    """A length of time as people say it."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
