"""A page as a browser shows it: headless Chromium, which asks nobody for anything."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import SCALE

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here (Debian: apt install chromium)"
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_START_SECONDS = 30


def measured(page: str, script: str, folder: Path, *, width: int, is_dark: bool) -> Any:
    """What a script finds in a page that a browser has laid out.

    The page's own policy, which would forbid the script, is taken out first: if it was all that
    kept others' scripts from running, they run now.

    Args:
        script: an expression, put at the end of the page, whose value JSON can hold.
        folder: empty; for the page and the browser's profile.
        width: of the window in pixels, 500 at least.
    """
    probe = f"<script>document.title = JSON.stringify({script})</script>"
    file = folder / "page.html"
    without_policy = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    file.write_text(without_policy.replace("</body>", f"{probe}</body>"), "utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    command = [
        *(str(CHROMIUM), *_FLAGS, *scheme, f"--user-data-dir={folder / 'profile'}"),
        *(f"--window-size={width},900", "--dump-dom", f"file://{file}"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_START_SECONDS * SCALE, check=True
    )
    _before, _title, rest = done.stdout.partition("<title>")
    return json.loads(html.unescape(rest.partition("</title>")[0]))
