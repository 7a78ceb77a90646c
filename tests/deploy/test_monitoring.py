"""The dashboard and the alert rules: they load, and ask for what the broker says and no more."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.metrics.families import families
from tests.metrics.pages import snapshot
from tests.support.clock import SCALE
from tests.test_observability import ROOT

DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="there is no promtool here (Debian: apt install prometheus)"
)
COLUMNS = 24
"""Of a dashboard's grid."""


def sample_names() -> set[str]:
    """Every name that a query can ask for."""
    names = set()
    for metric in families(snapshot()):
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {metric.name + ending for ending in endings.get(metric.type, [""])}
    return names


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana/weight-broker.json").read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def queries() -> Iterator[str]:
    """Every expression of the dashboard, as Prometheus gets it."""
    found = dashboard()
    expressions = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    for expression in [*expressions, *(note["expr"] for note in found["annotations"]["list"])]:
        yield re.sub(r"\$__(rate_interval|range)\b", "5m", expression)


def test_only_what_is_exported() -> None:
    """Each metric that a rule, its text or a panel names is on the page."""
    texts = [json.dumps(rules()), *queries()]
    asked = {name for text in texts for name in re.findall(r"\bweight_broker_\w+", text)}
    assert len(asked) > 20
    assert asked <= sample_names()


def test_rules() -> None:
    """Each alert has a name of its own, a severity, and says what it is and what to do."""
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_dashboard() -> None:
    """Panels have ids, titles and room of their own, and all ask the chosen data source."""
    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert all(panel["title"] for panel in panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _y in cells) < COLUMNS
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert '$instance"' in target["expr"]


def test_the_questions_have_panels() -> None:
    """The dashboard's rows are the questions of a person on call."""
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == [
        "Who holds the memory?",
        "Is anybody waiting?",
        "Why did that load fail?",
        "Is a generation stuck?",
        "The broker itself",
    ]


def promtool(*arguments: str) -> str:
    """What it says; it must be content."""
    done = subprocess.run(
        [str(PROMTOOL), *arguments],
        capture_output=True,
        text=True,
        timeout=20 * SCALE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    """The rules, and every query of the dashboard, are what Prometheus understands."""
    recorded = [{"record": f"x:{n}", "expr": query} for n, query in enumerate(queries())]
    asked = tmp_path / "queries.yml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    said = promtool("check", "rules", str(DEPLOY / "prometheus/alerts.yml"), str(asked))
    assert f"{len(rules())} rules found" in said
    assert f"{len(recorded)} rules found" in said


@needs_promtool
def test_rules_fire_when_they_should() -> None:
    """Each rule fires on numbers of a broker in that trouble, and on no others."""
    cases = Path(__file__).parent / "alerts_test.yml"
    promtool("test", "rules", str(cases))
    assert set(re.findall(r'alertname="(\w+)"', cases.read_text())) == {r["alert"] for r in rules()}
