"""The story as one page that needs nothing but itself.

What peers made up (names, paths, commands, causes) reaches the page as escaped text only: the
template escapes everything, and characters that are not printable are spelt out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from broker.amounts import human
from broker.commands.text import shown
from broker.journal.reading import Entry
from broker.report.axis import Axis
from broker.report.memory import HEIGHT, WIDTH, memory_chart
from broker.report.rows import cut, engine_row, lasting, rows_of, server_row, set_row
from broker.report.story import End, Story

_STYLE = files("broker.report") / "page.css"

MOST_TROUBLES = 50
MOST_EVENTS = 1000
"""Lines of the journal that the page lists: the latest."""
MOST_CHARACTERS = 400
"""Of what one line of the journal says."""


@dataclass(frozen=True)
class Number:
    """One of the numbers at the top. `is_bad`: somebody should look."""

    value: str
    what: str
    is_bad: bool = False


def render(story: Story, entries: list[Entry], *, made: float, is_running: bool) -> str:
    """The whole page.

    Args:
        entries: what the story was told from.
        made: when, in seconds since 1970.
        is_running: the broker answers at this moment.
    """
    axis = Axis(story.begin, story.end)
    latest = entries[-MOST_EVENTS:]
    return (
        _environment()
        .get_template("page.html")
        .render(
            style=Markup(_STYLE.read_text("utf-8")),  # noqa: S704 - ours, not a peer's
            name=cut(story.name),
            devices=", ".join(map(cut, story.devices)),
            state="running" if is_running else "not running",
            begin=moment(story.begin),
            end=moment(story.end),
            made=moment(made),
            lasted=lasting(axis.seconds),
            numbers=_numbers(story),
            troubles=[
                (moment(each.time), cut(each.what), shown(each.cause)[:MOST_CHARACTERS])
                for each in story.troubles[: -MOST_TROUBLES - 1 : -1]
            ],
            troubles_left_out=max(0, len(story.troubles) - MOST_TROUBLES),
            ticks=axis.ticks(),
            width=WIDTH,
            height=HEIGHT,
            charts=[memory_chart(*device, axis) for device in story.memory.items()],
            kinds=[
                ("Servers", "server processes", rows_of(story.servers, server_row, axis)),
                ("Weight sets", "weight sets", rows_of(story.sets, set_row, axis)),
                ("Engines", "engines", rows_of(story.engines, engine_row, axis)),
            ],
            events=[
                (moment(entry.time), cut(entry.event), _facts(entry)) for entry in latest[::-1]
            ],
            events_left_out=len(entries) - len(latest),
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("broker.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def moment(when: float) -> str:
    """A moment for people, in UTC."""
    return f"{datetime.fromtimestamp(when, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _numbers(story: Story) -> list[Number]:
    sealed = [record for record in story.sets if record.sealed is not None]
    failed = sum(record.how is End.FAILED for record in story.sets)
    died = sum(engine.how is End.DIED for engine in story.engines)
    most = max((point.used for points in story.memory.values() for point in points), default=0)
    now = sum(engine.end is None for engine in story.engines)
    return [
        Number(str(len(sealed)), "weight sets completed"),
        Number(str(failed), "not completed", failed > 0),
        Number(human(most), "in use at most, on one device"),
        Number(str(len(story.engines)), f"engines seen, {now} still there"),
        Number(str(died), "deaths of engines", died > 0),
        Number(str(len(story.restarts)), "server restarts", any(_deaths(story))),
        Number(str(len(story.evictions)), "evictions"),
    ]


def _deaths(story: Story) -> list[bool]:
    return [life.how is End.DIED for life in story.servers]


def _facts(entry: Entry) -> str:
    """What a line of the journal says beside its event, as in the log."""
    said = (f"{key}={_value(value)}" for key, value in entry.facts.items())
    return shown(" ".join(said))[:MOST_CHARACTERS] if entry.facts else ""


def _value(value: object) -> str:
    return value if isinstance(value, str) and " " not in value else json.dumps(value)
