"""Turns, medians, tables and goals of the benchmarks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import Result, Table, at_least, at_most, read_result, spread, take_turns


def test_every_round_begins_with_another_case() -> None:
    """Each case runs once a round, the first place goes round, and the warm-up is dropped."""
    order: list[str] = []

    def note(name: str) -> int:
        order.append(name)
        return len(order)

    results = take_turns({"a": lambda: note("a"), "b": lambda: note("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [4, 5], "b": [3, 6]}


def test_a_spread_shows_median_least_and_most() -> None:
    """Three runs are shown as their median with the least and the most beside it."""
    assert f"{spread([3.0, 1.0, 2.0]).scaled(10):.1f}" == "20.0 (10.0 to 30.0)"


def test_goals_are_met_at_their_bound() -> None:
    """The bound itself will do, in both directions."""
    assert at_least(2, 2.0, "").is_met
    assert not at_least(2, 1.99, "").is_met
    assert at_most(2, 2.0, "").is_met
    assert not at_most(2, 2.01, "").is_met


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A result comes back from its file with equal tables, goals and figures."""
    table = Table("t", ["", "ms"], [["a", "1"]], ["a note"])
    result = Result("s", [table], [at_least(1, 2.0, "g")], {"x": 1}, ["gone"], {"date": "now"})
    result.write(tmp_path / "s.json")
    assert read_result(tmp_path / "s.json") == result
