"""Speed, scale and cost beside named alternatives, measured in one run: `make bench`.

One file for each subject; what they share is in `common.py`, `processes.py`, `checkpoints.py` and
`talkers.py`; `run.py` runs them all, `pages.py` writes docs/performance.md.
"""
