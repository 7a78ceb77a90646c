"""How long engines wait for the next server: `python -m tests.campaign.recovery [--kills N]`.

Engines that read their weights without a pause; the server is killed over and over.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.campaign.engines import nursery
from tests.campaign.injected import kill_server
from tests.campaign.world import Lost, World
from tests.support.raw import percentile

KILLS = 50
ENGINES = 8


def run_recoveries(context: ForkServerContext, kills: int) -> list[float]:
    """Seconds from each kill until all engines had an answer.

    Raises:
        Lost: a byte was wrong, or books, kernel and engines disagree afterwards.
    """
    times = []
    with tempfile.TemporaryDirectory(prefix="wbv-", dir="/tmp") as directory:
        world = World(context, Path(directory), random.Random(0), ENGINES)  # noqa: S311
        try:
            path = next(iter(world.tags))
            for engine in world.engines:
                engine.ask("acquire", slot=1, path=path)
                engine.ask("read_on")
            for _ in range(kills):
                kill_server(world)
                killed = time.monotonic()
                for engine in world.engines:
                    engine.tell("ping")
                world.wait_for_answers()
                times.append(time.monotonic() - killed)
                world.check()
            for engine in world.engines:
                readings = engine.ask("readings")
                if readings["damage"] or not readings["passes"]:
                    raise Lost(f"engine {engine.pid} has read {readings}")
            world.close()
        except BaseException:
            world.kill()
            raise
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    times = run_recoveries(nursery(), parser.parse_args().kills)
    p50, p99, worst = (percentile(times, share) for share in (0.5, 0.99, 1.0))
    print(
        f"{len(times)} servers killed under {ENGINES} engines that read: all served again after "
        f"{p50:.2f} s (median), {p99:.2f} s (p99), {worst:.2f} s (worst); nothing read wrongly"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
