"""Measure everything, one subject after the other, and put the results into docs/performance.md.

    python -m benchmarks.run [--quick] [--only SUBJECT …]

Each subject runs in a process of its own, prints its tables, writes docs/performance/SUBJECT.json.
With --quick everything is small, takes some minutes, and nothing is written.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.pages import FOLDER, PAGE, SUBJECTS, plot, read_results, render
from benchmarks.processes import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small and few; writes nothing")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, metavar="SUBJECT")
    options = parser.parse_args()
    began = time.monotonic()
    failed = [subject for subject in options.only if not measured(subject, quick=options.quick)]
    if not options.quick:
        write_page()
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    for subject in failed:
        print(f"FAILED: {subject}")
    return 1 if failed else 0


def measured(subject: str, *, quick: bool) -> bool:
    """Run a subject; whether it came to its end."""
    print(f"\n=== {subject}\n", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{subject}"]
    command += ["--quick"] if quick else ["--out", str(FOLDER / f"{subject}.json")]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def write_page() -> None:
    """Plots and tables of all results that there are."""
    results = read_results()
    for result in results:
        plot(result)
    PAGE.write_text(render(PAGE.read_text(), results))


if __name__ == "__main__":
    sys.exit(main())
