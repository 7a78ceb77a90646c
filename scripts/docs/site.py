"""What MkDocs does besides mkdocs.yml.

The changelog is a page, the states are a picture, links that lead out of docs/ are texts.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.docs.diagram import svg

ROOT = Path(__file__).parents[2]
_STATES = re.compile(r"<!-- states -->.*?<!-- /states -->", re.DOTALL)
_LINK_UP = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]*)\)")
log = logging.getLogger("mkdocs.hooks.site")  # MkDocs counts the warnings of its own loggers


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """The changelog lies beside the README; it is a page too."""
    text = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Where the source has the states as Mermaid, the site has them drawn; where it leads into the
    repository, the site, which may be anywhere, says the place."""
    folder = Path("docs", page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = os.path.normpath(folder / link[2])
        if target.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            log.warning("%s leads to %s, which is not there", page.file.src_uri, link[2])
        return link[1] if target in link[1] else f"{link[1]} (`{target}`)"

    return _LINK_UP.sub(shown, _STATES.sub(lambda _found: svg(), markdown))
