"""What the test and vLLM's workers agree on. Imports nothing."""

TIMES = "WEIGHT_BROKER_TEST_TIMES"
"""Variable: the folder where each process writes how long its model took."""
UNPACKED = "WEIGHT_BROKER_TEST_UNPACKED"
"""Variable: the CPU build is to compute with plain weights."""
