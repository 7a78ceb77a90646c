"""docs/performance.md says what the benchmarks printed, and nothing else between its markers."""

from __future__ import annotations

import pytest

from benchmarks.common import Result, Table, at_most
from benchmarks.pages import PAGE, SUBJECTS, read_results, render


def test_the_page_is_made_of_the_results() -> None:
    """Rendering the committed results into the page changes nothing."""
    page = PAGE.read_text()
    results = read_results()
    if not results:
        pytest.skip("no results have been committed")
    assert render(page, results) == page


def test_every_subject_has_its_place() -> None:
    """The page has both markers of every subject."""
    page = PAGE.read_text()
    for name in (*SUBJECTS, "goals"):
        assert f"<!-- {name} -->" in page
        assert f"<!-- /{name} -->" in page


def test_tables_replace_what_was_between_the_markers() -> None:
    """Old figures go, new ones come, the rest of the page stays."""
    page = "head\n<!-- goals -->\nold\n<!-- /goals -->\n<!-- load -->\nold\n<!-- /load -->\nend\n"
    goal = at_most(2, 3.0, "as fast")
    rendered = render(page, [Result("load", [Table("T", ["", "ms"], [["a", "5"]])], [goal])])
    assert "old" not in rendered
    assert "| a | 5 |" in rendered
    assert "0 of 1 are met" in rendered
    assert rendered.startswith("head\n")
    assert rendered.endswith("end\n")


def test_a_page_without_markers_is_refused() -> None:
    """Figures are never silently left out."""
    with pytest.raises(ValueError, match="no markers"):
        render("nothing here", [Result("load")])
