"""Checkpoints collected from other projects' reports, where that collection is at hand."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.header import DTYPES
from broker.checkpoints.plan import plan_checkpoint
from broker.errors import LoadFailed
from broker.weights import SLOT_ALIGNMENT
from tests.checkpoints.loading import ObservedWriter, fill, load

CASES = Path(__file__).parents[2].parent / "shared" / "cases"
BOUND_ELSEWHERE = ("89_", "91_")
"""Faults that show when the weights are bound to a module; their bytes load."""

SCRIPTS = sorted(CASES.glob("[0-9]*.py"))

pytestmark = pytest.mark.skipif(not SCRIPTS, reason=f"there are no shared cases at {CASES}")


def build(script: Path, folder: Path) -> dict[str, Any]:
    """Let a case write its checkpoint; what it expects."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(script), str(folder)]
    subprocess.run(command, check=True, cwd=CASES, env=environment, timeout=60)
    expected: dict[str, Any] = json.loads((folder / "expect.json").read_text())
    return expected


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_case_gives_what_it_expects(script: Path, tmp_path: Path) -> None:
    """Each case loads byte for byte, or is refused for the reason and with the names it states."""
    expected = build(script, tmp_path)
    loads = expected["expect"] == "loads" or script.stem.startswith(BOUND_ELSEWHERE)
    for place in [expected["load"], *expected.get("also_load", [])]:
        if loads:
            check_loads(tmp_path / place, expected)
        else:
            check_refused(tmp_path / place, expected)
    for name in expected.get("must_not_exist", []):
        assert not (tmp_path / name).exists()


def check_loads(path: Path, expected: dict[str, Any]) -> None:
    loaded = load(path)
    tensors = loaded.tensors()
    for wanted in expected.get("tensors", []):
        dtype, shape, data = tensors[wanted["name"]]
        assert dtype == DTYPES[wanted["dtype"]][0]
        assert list(shape) == wanted["shape"]
        assert hashlib.sha256(data).hexdigest() == wanted["sha256"]
    if "tensors" in expected:
        ignorable = set(expected.get("may_ignore", []))
        assert set(tensors) - ignorable == {wanted["name"] for wanted in expected["tensors"]}
    offsets = [at for group in loaded.plan.manifest.groups for at in group.offsets]
    assert not any(at % SLOT_ALIGNMENT for at in offsets)


CHANGING = [script for script in SCRIPTS if "actions=" in script.read_text()]


@pytest.mark.parametrize("script", CHANGING, ids=lambda script: script.stem)
def test_case_whose_file_changes_meanwhile(script: Path, tmp_path: Path) -> None:
    """Where a case overwrites a file during the load, the load fails: no mixture of both."""
    (action,) = build(script, tmp_path)["actions"]

    def overwrite() -> None:
        (tmp_path / action["file"]).write_bytes((tmp_path / action["by"]).read_bytes())

    with open_checkpoint(tmp_path) as checkpoint:
        plan = plan_checkpoint(checkpoint.folder, None, checkpoint.path)
        with pytest.raises(LoadFailed) as caught:
            fill(plan, checkpoint.folder, wrap=lambda w: ObservedWriter(w, 1, overwrite))
    assert caught.value.reason == "changed"


def check_refused(path: Path, expected: dict[str, Any]) -> None:
    with pytest.raises(LoadFailed) as caught:
        load(path)
    assert caught.value.reason == expected["reason"]
    for name in expected.get("names", []):
        assert name in caught.value.sentence


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.stem.startswith(BOUND_ELSEWHERE)], ids=lambda s: s.stem
)
def test_case_is_refused_when_bound(script: Path) -> None:
    """What these cases refuse is the binding, which the engine client's tests try."""
    pytest.skip("binding to a module is tested with the engine client")
