"""The loop: who is called back, and who is not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from broker.loop import READ, Loop
from tests.support.clock import SCALE


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_a_number_that_is_another_descriptor_by_now(loop: Loop) -> None:
    """What was seen of a descriptor is nothing that its successor of the same number has done."""
    pipes = [os.pipe() for _ in range(3)]
    (first, tell_first), (second, tell_second), (other, tell_other) = pipes
    heard: list[str] = []

    def replace(gone: int) -> None:
        """Both are readable: whichever is heard first ends the other, and takes its number."""
        loop.remove(first)
        loop.remove(second)
        os.dup2(other, gone)
        loop.add(gone, READ, hear)
        loop.call_later(0, wait)

    def wait() -> None:
        heard.append("a turn later")
        os.write(tell_other, b"x")

    def hear(_events: int) -> None:
        heard.append("the new one")
        loop.stop()

    loop.add(first, READ, lambda _events: replace(second))
    loop.add(second, READ, lambda _events: replace(first))
    os.write(tell_first, b"x")
    os.write(tell_second, b"x")
    loop.call_later(10 * SCALE, loop.stop)
    loop.run(lambda: False)
    assert heard == ["a turn later", "the new one"]
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)
