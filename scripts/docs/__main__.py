"""`python -m scripts.docs`."""

from __future__ import annotations

import argparse
import sys

from scripts.docs.pages import outdated, write


def main() -> int:
    """Write the generated parts, or with `--check` name the pages that differ."""
    parser = argparse.ArgumentParser(prog="python -m scripts.docs")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    if not parser.parse_args().check:
        write()
        return 0
    pages = outdated()
    for page in pages:
        print(f"{page} is not up to date: python -m scripts.docs", file=sys.stderr)
    return 1 if pages else 0


if __name__ == "__main__":
    sys.exit(main())
