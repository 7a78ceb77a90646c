"""Long runs that try to break a broker: faults, abuse, fuzzing, soak (docs/reliability.md).

Each is a program of its own (`python -m tests.campaign.faults`); the suite runs short versions.
"""
