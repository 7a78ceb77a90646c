"""Nothing is unpickled where it must not be; what is written to a log holds no secret."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNPICKLING = {"load", "loads", "Unpickler", "_Unpickler", "load_module_from_file"}
PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg"}
ONLY = Path("broker/loader/shipped.py")
"""A process of its own, for code that the broker was told to run."""


@functools.cache
def sources() -> list[tuple[Path, ast.Module]]:
    paths = [p for package in ("broker", "engine_client") for p in (ROOT / package).rglob("*.py")]
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in sorted(paths)]


def imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def calls(tree: ast.Module) -> set[str]:
    """Attributes that are used, as `module.name`."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def test_who_imports_a_pickler() -> None:
    """One module of the loader unpickles; one of the client packs code to ship; nobody else."""
    using = {path: imported(tree) & PICKLERS for path, tree in sources()}
    assert {path: names for path, names in using.items() if names} == {
        ONLY: {"pickle"},
        Path("engine_client/publisher.py"): {"cloudpickle"},
    }


def test_the_client_packs_and_never_unpacks() -> None:
    """Of what can read a pickle only the loader uses anything; `torch.load` and eval nobody."""
    for path, tree in sources():
        used = calls(tree)
        reading = {f"{module}.{name}" for module in PICKLERS for name in UNPICKLING}
        if path != ONLY:
            assert not used & reading, path
        assert not used & {"torch.load", "numpy.load", "np.load"}, path
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec"}, path


def test_no_shell() -> None:
    """Children are started with fixed argument lists, never through a shell."""
    for path, tree in sources():
        words = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        assert "shell" not in words, path
        assert not calls(tree) & {"os.system", "os.popen"}, path
