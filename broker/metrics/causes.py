"""Why a load or publication failed, as one of a few words: what a metric is labelled with.

A loader, or an engine that publishes, chooses the words of its error; a series for each would be
without bound.
"""

from __future__ import annotations

from broker.errors import ERROR_STATUSES

OTHER = "other"

REASONS = frozenset(
    {
        # of checkpoints (checkpoints/faults.py)
        "lfs_pointer",
        "not_safetensors",
        "unsafe_pickle",
        "header_too_large",
        "header_truncated",
        "header_start",
        "bad_json",
        "duplicate_key",
        "bad_metadata",
        "bad_entry",
        "unknown_dtype",
        "bad_shape",
        "subbyte_shape",
        "size_mismatch",
        "overlap",
        "hole",
        "truncated",
        "trailing_bytes",
        "bad_index",
        "missing_shard",
        "missing_tensor",
        "ambiguous_tensor",
        "no_weights",
        "ambiguous_files",
        "too_many_files",
        "bad_config",
        "conversion",
        "tie_conflict",
        "unreadable",
        "not_a_file",
        "changed",
        "device",
        # of loader processes (loaders.py, loading.py, loader/) and of writers
        "loader-exited",
        "loader-crashed",
        "loader-finished",
        "loader-killed",
        "loader-too-slow",
        "loader-died",
        "loader-returned",
        "loader-unpickled",
        "loader-raised",
        "loader-unwanted",
        "builder-failed",
        "writer-stalled",
    }
)
"""Of `load-failed`, whose status alone says little."""

CAUSES = tuple(sorted({*REASONS, *ERROR_STATUSES, OTHER}))


def cause_of(status: object, reason: object) -> str:
    """The reason of a failed load where it is a known one, else its status."""
    if status == "load-failed" and reason in REASONS:
        return str(reason)
    return str(status) if status in ERROR_STATUSES else OTHER
