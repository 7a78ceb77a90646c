"""Numbers of bytes as people read them."""

from __future__ import annotations


def human(nbytes: int) -> str:
    """Bytes as people read them, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
