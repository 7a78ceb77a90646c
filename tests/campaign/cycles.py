"""Engines attach and are killed, over and over: `python -m tests.campaign.cycles [--cycles N]`.

Resident memory, descriptors, threads and children of keeper and server before and after.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.campaign import kernel
from tests.campaign.engines import Engine, nursery
from tests.campaign.world import Lost, World

CYCLES = 1000
WARM_UP = 30
"""First engines make allocators and caches as large as they will be."""
MAX_GROWTH_BYTES = 2 << 20
"""Of each process, however many cycles: what an allocator may keep."""
AT_A_TIME = 4


@dataclass(frozen=True)
class Use:
    """What a process uses."""

    resident: int
    descriptors: int
    threads: int
    children: int


def use_of(pid: int) -> Use:
    return Use(
        kernel.resident_bytes(pid),
        kernel.descriptors(pid),
        kernel.threads(pid),
        len(kernel.children(pid)),
    )


@dataclass(frozen=True)
class Result:
    cycles: int
    seconds: float
    before: dict[str, Use]
    after: dict[str, Use]

    def table(self) -> str:
        lines = [
            f"{self.cycles} engines attached and were killed in {self.seconds:.0f} s",
            (
                f"{'':8} {'':7} {'resident KiB':>13} {'descriptors':>12} "
                f"{'threads':>8} {'children':>9}"
            ),
        ]
        for who in self.before:
            for when, use in (("before", self.before[who]), ("after", self.after[who])):
                lines.append(
                    f"{who:8} {when:7} {use.resident >> 10:13} {use.descriptors:12} "
                    f"{use.threads:8} {use.children:9}"
                )
        return "\n".join(lines)

    def check(self) -> None:
        """Raise `Lost` unless everything has come back."""
        for who, before in self.before.items():
            after = self.after[who]
            same = (before.descriptors, before.threads, before.children)
            if (after.descriptors, after.threads, after.children) != same:
                raise Lost(f"{who}: {before} became {after}")
            if after.resident - before.resident > MAX_GROWTH_BYTES:
                raise Lost(f"{who} has grown by {after.resident - before.resident} bytes")


def run_cycles(context: ForkServerContext, cycles: int) -> Result:
    """Engines at random moments of their attaching, each killed with SIGKILL.

    Raises:
        Lost.
    """
    rng = random.Random(0)  # noqa: S311 - when engines are killed
    with tempfile.TemporaryDirectory(prefix="wbc-", dir="/tmp") as directory:
        world = World(context, Path(directory), rng, engines=1)
        try:
            path = next(iter(world.tags))
            world.engines[0].ask("acquire", slot=1, path=path)
            world.check()
            _attach_and_kill(world, path, WARM_UP)
            before = _uses(world)
            began = time.monotonic()
            _attach_and_kill(world, path, cycles)
            result = Result(cycles, time.monotonic() - began, before, _uses(world))
            world.close()
        except BaseException:
            world.kill()
            raise
    return result


def _uses(world: World) -> dict[str, Use]:
    """Once the books are right: what is still being closed is none of the result."""
    world.check()
    time.sleep(0.5)  # the last connections' end, by libzmq's own threads
    return {"keeper": use_of(world.keeper), "server": use_of(world.server())}


def _attach_and_kill(world: World, path: str, cycles: int) -> None:
    for start in range(0, cycles, AT_A_TIME):
        engines = [
            Engine(world.context, str(world.directory))
            for _ in range(min(AT_A_TIME, cycles - start))
        ]
        for engine in engines:
            engine.tell("connect_and_acquire", slot=1, path=path)
        for engine in engines:
            if world.rng.random() < 0.5:
                engine.wait(world.rng.choice([0.0, 0.01, 0.05]))
            else:
                engine.wait(60.0)
            engine.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=CYCLES)
    result = run_cycles(nursery(), parser.parse_args().cycles)
    print(result.table())
    result.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
