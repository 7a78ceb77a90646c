"""Amounts in sentences: bytes as people read them, one or many of something."""

from __future__ import annotations


def human(nbytes: int) -> str:
    """Bytes as people read them, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def counted(number: int, one: str, many: str = "") -> str:
    """So many of something: "1 lease", "2 leases". `many`: where it is more than an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
