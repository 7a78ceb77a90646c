"""Amounts in sentences."""

from __future__ import annotations

import pytest

from broker.amounts import counted, human


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (90_857_472, "86.6 MiB"),
        (40 << 30, "40.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_human(nbytes: int, said: str) -> None:
    """Powers of 1024, one digit after the point; bytes have none."""
    assert human(nbytes) == said


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 loads wait"), (1, "1 load waits"), (2, "2 loads wait")]
)
def test_counted(number: int, said: str) -> None:
    """One is singular, whatever else plural."""
    assert counted(number, "load waits", "loads wait") == said
    assert counted(number, "set") == f"{number} set{'' if number == 1 else 's'}"
