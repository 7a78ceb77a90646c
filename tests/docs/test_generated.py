"""Pages say what the code says: generated parts, errors, reasons, answers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from broker import wire
from broker.custody.states import TABLE
from broker.metrics.causes import REASONS
from scripts.docs import errors, messages
from scripts.docs.diagram import moves, svg
from scripts.docs.pages import DOCS, PARTS, filled, outdated, pages

ROOT = DOCS.parent
ERRORS = (DOCS / "reference" / "errors.md").read_text()
WIRE = (DOCS / "reference" / "wire.md").read_text()


def sections(text: str) -> dict[str, str]:
    """A page's sections of the second level by their titles."""
    found = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_generated_parts_are_up_to_date() -> None:
    """No page differs from what the code gives, and every part has its page."""
    assert outdated() == []
    used = re.findall(r"<!-- generated: (\w+) -->", "".join(page.read_text() for page in pages()))
    assert sorted(used) == sorted(PARTS)


def test_an_outdated_part_is_noticed() -> None:
    """A page whose part says something else is not what it would be filled with."""
    changed = ERRORS.replace("| 13 |", "| 14 |")
    assert changed != ERRORS
    assert filled(changed) == ERRORS


CODE = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|(`+)(?!`).+?(?<!`)\2(?!`)", re.DOTALL | re.M)


def tags(text: str) -> list[str]:
    """What would be a tag of HTML where the page is rendered: not what is code, or a comment."""
    return re.findall(r"</?[A-Za-z][^<>\n]*>?", CODE.sub("", text))


def test_no_word_disappears_as_a_tag() -> None:
    """`<uid>` outside code is not seen on a rendered page: it is written `&lt;uid>`."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    found = {str(page.relative_to(ROOT)): tags(page.read_text()) for page in pages}
    assert {page: words for page, words in found.items() if words} == {}
    assert tags("a <uid> `<b>`, ``<c> ` ``\n```\n<d>\n```\n<!-- e --> &lt;f> </g") == [
        "<uid>",
        "</g",
    ]


def test_every_error_has_a_cause_and_a_cure() -> None:
    """reference/errors.md has each class once, in the order of the source, with both."""
    found = sections(ERRORS)
    assert list(found) == [error.__name__ for error in errors.classes()]
    for name, text in found.items():
        assert len(re.findall(r"^\*\*Cause\.\*\* ", text, re.MULTILINE)) == 1, name
        assert len(re.findall(r"^\*\*Cure\.\*\* ", text, re.MULTILINE)) == 1, name


def test_every_reason_of_a_failed_load_is_explained() -> None:
    """The table of reasons is the code's, each with cause and cure."""
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| (.+) \|$", sections(ERRORS)["LoadFailed"], re.M)
    assert sorted(reason for reason, _cause, _cure in rows) == sorted(REASONS)


def test_every_field_of_the_wire_is_explained() -> None:
    """No row of the wire page's tables of fields lacks its text."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", WIRE, re.MULTILINE)
    assert len(rows) > 100
    assert [field for field, _kind, _default, text in rows if not text.strip()] == []


def test_answers() -> None:
    """What the page says an operation is answered with is what our client decodes."""
    decoded = dict(answers_of_the_client())
    assert len(decoded) >= 14
    for operation, struct in decoded.items():
        assert struct in {each.__name__ for each in messages.ANSWERS[operation]}, operation
    assert list(messages.ANSWERS) == list(wire.REQUESTS)


def answers_of_the_client() -> Iterator[tuple[str, str]]:
    """Operation and struct of each `call("operation", message, wire.Struct, …)`."""
    for source in (ROOT / "engine_client").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            match node:
                case ast.Call(
                    args=[ast.Constant(str(operation)), _, ast.Attribute(ast.Name("wire"), struct)]
                ):
                    yield operation, struct


def test_the_picture_of_the_states() -> None:
    """Each state is a box, each move from one to another an arrow with its triggers."""
    picture = svg()
    assert picture.count("<rect ") == len(TABLE)
    assert picture.count("marker-end") == sum(start is not end for start, end, _why in moves())
    for _start, _end, why in moves():
        assert f"{why}</text>" in picture
    drawn = sum(len(why.split(", ")) for _start, _end, why in moves())
    assert drawn == sum(map(len, TABLE.values()))
