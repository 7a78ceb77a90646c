"""What every subject needs: turns, medians and their spread, tables, goals, a file of results.

A subject is a module with `measure(quick) -> Result` that ends with `main(measure)`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))
VERSIONS = ("torch", "pyzmq", "msgspec", "safetensors", "blake3", "numpy")


def take_turns(
    cases: Mapping[str, Callable[[], T]], rounds: int, warmups: int = 1
) -> dict[str, list[T]]:
    """Run every case once a round, each round beginning with another one; the warm-ups are dropped.

    What disturbs the machine for a while disturbs all cases alike, and none always comes after the
    same other.
    """
    results: dict[str, list[T]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(warmups + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            result = cases[name]()
            if number >= warmups:
                results[name].append(result)
    return results


@dataclass(frozen=True)
class Spread:
    """Several runs of one thing."""

    median: float
    least: float
    most: float
    runs: int

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.least * factor, self.most * factor, self.runs)

    def __format__(self, spec: str) -> str:
        """Median, and in parentheses the least and the most."""
        return f"{self.median:{spec}} ({self.least:{spec}} to {self.most:{spec}})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Table:
    """Cells are text already: nothing is rounded later."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])

    def text(self) -> str:
        """For a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.columns))]
        shown = [_line(line, widths) for line in lines]
        rule = "-" * len(shown[0])
        return "\n".join([self.title, shown[0], rule, *shown[1:], *self.notes])

    def markdown(self) -> str:
        """For docs/performance.md."""
        rule = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [f"| {' | '.join(line)} |" for line in [self.columns, rule, *self.rows]]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"**{self.title}**\n", *lines, *notes])


def _line(cells: list[str], widths: list[int]) -> str:
    first = cells[0].ljust(widths[0])
    return "  ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])


@dataclass(frozen=True)
class Goal:
    """What was to be reached, and what was."""

    what: str
    bound: float
    measured: float
    is_least: bool
    """Whether the bound is the least that will do; else the most."""
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        return self.measured >= self.bound if self.is_least else self.measured <= self.bound


def at_least(bound: float, measured: float, what: str, unit: str = "x") -> Goal:
    return Goal(what, bound, measured, True, unit)


def at_most(bound: float, measured: float, what: str, unit: str = "x") -> Goal:
    return Goal(what, bound, measured, False, unit)


@dataclass
class Result:
    """What a subject has measured.

    Attributes:
        figures: numbers for plots, by name.
        left_out: what was not measured, and why.
    """

    subject: str
    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        parts = [table.text() for table in [*self.tables, goal_table(self.goals)]]
        return "\n\n".join([*parts, *(f"Left out: {what}" for what in self.left_out)])

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_result(path: Path) -> Result:
    """What `write` has written."""
    given = json.loads(path.read_text())
    given["tables"] = [Table(**table) for table in given["tables"]]
    given["goals"] = [Goal(**goal) for goal in given["goals"]]
    return Result(**given)


def goal_table(goals: Sequence[Goal]) -> Table:
    table = Table("Goals", ["goal", "bound", "measured", "met"])
    for goal in goals:
        sign = "at least" if goal.is_least else "at most"
        bound, measured = (f"{value:.4g} {goal.unit}" for value in (goal.bound, goal.measured))
        table.add(goal.what, f"{sign} {bound}", measured, "yes" if goal.is_met else "NO")
    return table


def conditions() -> dict[str, str]:
    """Machine, versions, date: what the figures hold for."""
    versions = [f"{name} {_version(name)}" for name in VERSIONS]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{CORES} cores of {_cpu()}, {_memory_gib()} GiB, Linux {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "load": f"{os.getloadavg()[0]:.1f} processes wanted to run in the minute before",
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB)


def main(subject: str, measure: Callable[[bool], Result]) -> None:
    """Measure, print, and write the results where `--out` says."""
    parser = argparse.ArgumentParser(description=f"measure: {subject}")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run at all?")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args()
    given = conditions()
    result = measure(options.quick)
    result.conditions = given
    print("\n".join(f"{key}: {value}" for key, value in given.items()), end="\n\n")
    print(result.text())
    if options.out is not None:
        result.write(options.out)
