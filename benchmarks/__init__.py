"""Speed, scale and cost beside named alternatives, measured in one run: `make bench`.

One file for each subject; `common.py` and `processes.py` are what they share; `run.py` runs them all.
"""
