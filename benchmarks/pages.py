"""docs/performance.md from results: tables between markers, plots beside them.

Whatever stands between `<!-- NAME -->` and `<!-- /NAME -->` is replaced; the rest is written by
hand and quotes no figures of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Result, Table, goal_table, read_result

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "performance"
PAGE = FOLDER.with_suffix(".md")
SUBJECTS = ("attach", "load", "fanout", "conversation", "start", "growth")


def read_results(folder: Path = FOLDER) -> list[Result]:
    """Of every subject that has been measured, in order."""
    paths = [folder / f"{subject}.json" for subject in SUBJECTS]
    return [read_result(path) for path in paths if path.exists()]


def render(page: str, results: Sequence[Result]) -> str:
    """The page with these results in it."""
    for name, text in _sections(results).items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not marked.search(page):
            raise ValueError(f"docs/performance.md has no markers <!-- {name} -->")
        page = marked.sub(lambda found, text=text: found[1] + text + found[2], page)  # type: ignore[misc]
    return page


def _sections(results: Sequence[Result]) -> dict[str, str]:
    sections = {"goals": _goals(results)}
    for result in results:
        sections[result.subject] = _section(result)
    return sections


def _goals(results: Sequence[Result]) -> str:
    table = Table("Goals", ["", *goal_table([]).columns])
    for result in results:
        for row in goal_table(result.goals).rows:
            table.add(result.subject, *row)
    met = sum(goal.is_met for result in results for goal in result.goals)
    table.notes.append(f"{met} of {len(table.rows)} are met.")
    return table.markdown() + "\n"


def _section(result: Result) -> str:
    parts = [f"- {key}: {value}" for key, value in result.conditions.items()]
    parts += [f"- left out: {what}" for what in result.left_out]
    blocks = ["\n".join(parts), *(table.markdown() for table in result.tables)]
    plot = FOLDER / f"{result.subject}.svg"
    if plot.exists():
        blocks.append(f"![{result.subject}](performance/{plot.name})")
    return "\n\n".join(blocks) + "\n"


# --- plots ---------------------------------------------------------------------------------------


def plot(result: Result, folder: Path = FOLDER) -> None:
    """The subject's plot as an SVG file; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "weight-broker"  # equal figures make equal files
    from matplotlib import pyplot

    draw = _DRAWN.get(result.subject)
    if draw is None:
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    draw(axes, result.figures)
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / f"{result.subject}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _attach(axes: Any, figures: Mapping[str, Any]) -> None:
    by_count = {int(count): methods for count, methods in figures["tensors"].items()}
    names = dict.fromkeys(name for methods in by_count.values() for name in methods)
    for name in names:
        points = {count: m[name] * 1e3 for count, m in by_count.items() if name in m}
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tensors", ylabel="ms", title="Attach")
    axes.legend(fontsize="small")


def _load(axes: Any, figures: Mapping[str, Any]) -> None:
    _bars(axes, figures["fresh"], "GB/s", "1 GB into fresh memory, page cache warm")


def _fanout(axes: Any, figures: Mapping[str, Any]) -> None:
    points = {int(name): s * 1e3 for name, s in figures["last"].items() if name.isdecimal()}
    axes.plot(list(points), list(points.values()), marker="o")
    axes.set(
        xlabel="engines at once", ylabel="ms until the last has mapped", title="Engines at once"
    )


def _conversation(axes: Any, figures: Mapping[str, Any]) -> None:
    names = next(iter(figures.values()))
    for name in names:
        rates = [figures[clients][name] for clients in figures]
        axes.plot(list(figures), rates, marker="o", label=name)
    axes.set(xlabel="clients", ylabel="answers/s", title="Conversation")
    axes.legend(fontsize="small")


def _growth(axes: Any, figures: Mapping[str, Any]) -> None:
    for name, points in figures.items():
        sizes = [int(size) for size in points]
        values = list(points.values())
        axes.plot(
            [size / sizes[0] for size in sizes],
            [value / values[0] for value in values],
            marker="o",
            label=name,
        )
    axes.set(
        xscale="log", yscale="log", xlabel="times as much", ylabel="times as long", title="Growth"
    )
    axes.legend(fontsize="small")


def _bars(axes: Any, figures: Mapping[str, float], unit: str, title: str) -> None:
    axes.barh(list(figures), list(figures.values()))
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)


_DRAWN = {
    "attach": _attach,
    "load": _load,
    "fanout": _fanout,
    "conversation": _conversation,
    "growth": _growth,
}
