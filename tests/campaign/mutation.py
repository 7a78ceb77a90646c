"""Random changes to bytes and to lists of frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

TELLING = (0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)
"""Bytes that mean something to msgpack, or to nobody."""


def mutate(data: bytes, rng: random.Random, times: int | None = None) -> bytes:
    """Change some places of it, perhaps its length too."""
    changed = bytearray(data)
    for _ in range(times or rng.choice((1, 1, 1, 2, 4, 16))):
        rng.choice(_CHANGES)(changed, rng)
    return bytes(changed)


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _replace(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(TELLING)


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 2, 8)))


def _remove(data: bytearray, rng: random.Random) -> None:
    if data:
        at = rng.randrange(len(data))
        del data[at : at + rng.choice((1, 1, 2, 8))]


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randint(0, len(data)) :]


def _repeat(data: bytearray, rng: random.Random) -> None:
    if data:
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice((1, 4, 16, 64)))
        data[end:end] = data[begin:end] * rng.choice((1, 2, 40))


_CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _flip, _replace, _replace),
    *(_insert, _remove, _cut, _repeat),
)


def frame_list(requests: Sequence[tuple[bytes, bytes]], rng: random.Random) -> list[bytes]:
    """Something like a request: perhaps one as it should be, perhaps no more than noise."""
    operation, payload = rng.choice(requests)
    if rng.random() < 0.7:
        payload = mutate(payload, rng)
    if rng.random() < 0.1:
        operation = mutate(operation, rng)
    if rng.random() < 0.1:
        operation = rng.choice(requests)[0]
    frames = [rng.randbytes(8), b"", operation, payload]
    shape = rng.random()
    if shape < 0.05:
        frames = [rng.randbytes(rng.choice((0, 1, 300))) for _ in range(rng.choice((0, 1, 2, 30)))]
    elif shape < 0.1:
        rng.shuffle(frames)
    elif shape < 0.15:
        del frames[rng.randrange(len(frames))]
    elif shape < 0.17:
        frames[-1] = bytes(rng.choice((1000, 300_000)))
    return frames
