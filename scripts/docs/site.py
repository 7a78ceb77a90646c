"""What MkDocs is told besides mkdocs.yml: pages that are files elsewhere, links into the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """The changelog is a page too."""
    text = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changelog.md", content=text))
    return files
