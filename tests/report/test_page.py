"""The page: it says what happened, needs nothing but itself, and nobody can put markup into it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from broker.journal.reading import Entry
from broker.report.page import MOST_EVENTS, MOST_TROUBLES, render
from broker.report.rows import MOST_ROWS
from broker.report.telling import tell

HOSTILE = "</title><script>alert(1)</script><img src=//e.x onerror=\"x\" x='y'>\x1b[2J\u202e\x00"


class Page(HTMLParser):
    """A page taken apart: elements, attributes, text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def entries_of(*events: tuple[str, dict[str, Any]]) -> list[Entry]:
    return [Entry(1000.0 + number, event, facts) for number, (event, facts) in enumerate(events)]


def page_of(entries: list[Entry]) -> Page:
    return Page(render(tell(entries), entries, made=2000.0, is_running=True))


@pytest.fixture(scope="module")
def hostile() -> Page:
    """A page about peers that put markup wherever they can."""
    return page_of(
        entries_of(
            ("serving", {"name": HOSTILE, "device": HOSTILE, "pid": 1, "epoch": "e"}),
            ("memory", {"device": HOSTILE, "leased": 1, "idle": 0, "reserved": 0, "limit": 2}),
            ("session-opened", {"session": 1, "pid": 2, "uid": 0, "command": HOSTILE}),
            ("load-started", {"set": 1, "session": 2, "path": HOSTILE}),
            ("set-failed", {"set": 1, "cause": HOSTILE}),
            ("load-started", {"set": 2, "session": 3, "code": HOSTILE}),
            ("set-sealed", {"set": 2, "nbytes": 1}),
            ("set-named", {"set": 2, "name": HOSTILE, "generation": HOSTILE}),
            ("lease-granted", {"session": 1, "set": 2, HOSTILE: HOSTILE}),
            ("preload-failed", {"path": HOSTILE, "cause": HOSTILE}),
            ("session-ended", {"session": 1, "how": "died", "cause": HOSTILE, "label": HOSTILE}),
        )
    )


def test_nobody_puts_markup_into_it(hostile: Page) -> None:
    """What peers made up is text: no element, no attribute, no control character comes of it."""
    known = "html head meta link title style body header h1 h2 h3 span p b ul li time section div i"
    assert set(hostile.elements) <= set(f"{known} svg path table thead tbody tr th td".split())
    assert not [name for name, _value in hostile.attributes if name.startswith("on")]
    assert "alert(1)" in hostile.text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", hostile.text)


def test_nothing_is_fetched(hostile: Page) -> None:
    """The page names no other place, and a browser would not be allowed to go there."""
    places = [value for name, value in hostile.attributes if name in ("src", "href", "action")]
    assert places == ["data:,"]
    (policy,) = (value for _name, value in hostile.attributes if "default-src" in value)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not re.search(r"@import|url\(", hostile.text)
    lengths = [value for name, value in hostile.attributes if name == "style"]
    assert lengths
    assert all(re.fullmatch(r"left:[\d.]+%(;width:[\d.]+%)?", value) for value in lengths)


def test_what_it_says() -> None:
    """Numbers, troubles and rows are those of the story."""
    page = page_of(
        entries_of(
            ("serving", {"name": "prod", "device": "GPU-1", "pid": 1, "epoch": "e"}),
            ("session-opened", {"session": 1, "pid": 4711, "uid": 0, "command": "vllm"}),
            ("load-started", {"set": 5, "session": 2, "path": "/models/m"}),
            ("set-sealed", {"set": 5, "nbytes": 3 << 30}),
            ("set-named", {"set": 5, "name": "m", "generation": "12"}),
            ("lease-granted", {"session": 1, "set": 5}),
            ("session-ended", {"session": 1, "how": "died", "cause": "gone", "leases": 1}),
        )
    )
    text = " ".join(page.text.split())
    for said in (
        "Weight broker prod",
        "on GPU-1",
        "the broker is running",
        "1 weight sets completed",
        "1 deaths of engines",
        "engine 4711 (vllm) died, holding 1 lease : gone",
        "set 5 m#12",
        "engine 4711 vllm",
    ):
        assert said.replace(" :", ":") in text
    titles = [value for name, value in page.attributes if name == "title"]
    assert "set 5, m#12, 3.0 GiB, /models/m, still there, goes on" in titles


def test_its_size_is_bounded() -> None:
    """A long life makes a page that a browser still shows: the latest of everything."""
    loads = [
        (event, {"set": number, "session": number, "path": "/m", "cause": "x" * 300})
        for number in range(3000)
        for event in ("load-started", "set-failed")
    ]
    opened = [("session-opened", {"session": n, "pid": n, "uid": 0}) for n in range(1000)]
    used = [
        ("memory", {"device": "d", "leased": n % 7, "idle": 0, "reserved": 0, "limit": 9})
        for n in range(20_000)
    ]
    entries = entries_of(*loads, *opened, *used)
    html = render(tell(entries), entries, made=0.0, is_running=False)
    assert len(html) < 2 << 20
    text = " ".join(Page(html).text.split())
    assert f"{3000 - MOST_ROWS} earlier weight sets are not shown" in text
    assert f"{1000 - MOST_ROWS} earlier engines are not shown" in text
    assert f"{3000 - MOST_TROUBLES} earlier ones are not shown" in text
    assert f"The latest {MOST_EVENTS}; {27_000 - MOST_EVENTS} earlier ones are not shown" in text
