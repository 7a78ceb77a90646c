"""A long ordinary life: `python -m tests.campaign.soak` (SOAK_SECONDS, 1800 by default).

Engines come and go, acquire, publish, move to newer generations, end in order or are killed. What
keeper and server use must be the same at the end as at the beginning.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.campaign.cycles import Use, use_of
from tests.campaign.engines import Engine, nursery
from tests.campaign.faults import ALWAYS_POSSIBLE
from tests.campaign.world import LINES, SIZES, Lost, World
from tests.support.raw import RawDealer, percentile

SECONDS = 1800.0
ENGINES = 32
MEMORY_LIMIT = "64m"
SAMPLE_SECONDS = 2.0
PAUSE_SECONDS = 1.0
"""What an engine does between two requests, on average."""
MAX_GROWTH_BYTES = 4 << 20
"""Between the median of the second and of the last quarter; each process."""
KINDS = ("acquire",) * 4 + ("swap",) * 6 + ("publish", "rewrite", "end", "die")


@dataclass
class Sample:
    keeper: Use
    server: Use
    sets: int
    sessions: int


@dataclass
class Soak:
    """A soak under way, and what has come of it."""

    world: World
    rng: random.Random
    empty: dict[str, Use]
    done: Counter[str] = field(default_factory=Counter)
    pings: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    due: dict[int, float] = field(default_factory=dict)
    slots: dict[int, list[int]] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        """Raises `Lost`."""
        until = time.monotonic() + seconds
        sampled = 0.0
        with RawDealer(self.world.directory) as other:
            while time.monotonic() < until:
                self._turn()
                self.pings.append(other.ping_seconds())
                if time.monotonic() - sampled > SAMPLE_SECONDS:
                    sampled = time.monotonic()
                    self._sample()
                time.sleep(0.01)
        self.world.wait_for_answers()
        self._judge()
        self.world.check()

    def _turn(self) -> None:
        """Everybody whose time has come asks for something."""
        now = time.monotonic()
        for engine in self.world.engines:
            if not engine.is_alive:
                continue
            self.world.outcomes += engine.pump()
            self._judge()
            if not engine.asked and now >= self.due.get(engine.pid, 0.0):
                self.due[engine.pid] = now + self.rng.expovariate(1 / PAUSE_SECONDS)
                self._ask(engine)
        self.world.fill_up()

    def _ask(self, engine: Engine) -> None:
        world, rng = self.world, self.rng
        kind, slots = rng.choice(KINDS), self.slots.setdefault(engine.pid, [])
        if len(slots) >= 3:
            engine.tell("release", slot=slots.pop(0))
            return
        slot, line = world.new_slot(), rng.choice(LINES)
        if kind == "acquire":
            engine.tell("acquire", slot=slot, path=rng.choice(list(world.tags)))
        elif kind == "swap":
            engine.tell("swap", slot=-1 - LINES.index(line), name=line)
        elif kind == "publish":
            tag = world.new_tag(line)
            world.published[line].add(tag)
            nbytes = rng.choice(SIZES)
            engine.tell("publish", slot=slot, name=line, tag=tag, nbytes=nbytes)
        elif kind == "rewrite":
            world.rewrite(rng.choice(list(world.tags)))
        elif kind == "end":
            self.done["engines ended by SIGTERM"] += 1
            engine.signal(signal.SIGTERM)
            engine.gone()
            self.slots.pop(engine.pid)  # another engine may get its pid
        else:
            self.done["engines killed"] += 1
            engine.kill()
            self.slots.pop(engine.pid)

    def _judge(self) -> None:
        for outcome in self.world.outcomes:
            self.done[f"{outcome.command}: {outcome.kind}"] += 1
            changed = outcome.kind == "LoadFailed" and outcome.value.get("reason") == "changed"
            gone = outcome.kind == "LoadFailed" and "is gone" in outcome.sentence
            if outcome.kind == "ok":
                if outcome.command in ("acquire", "publish"):
                    self.slots[outcome.pid].append(outcome.arguments["slot"])
            elif outcome.kind not in ALWAYS_POSSIBLE and not changed and not gone:
                raise Lost(f"{outcome.command} {outcome.arguments}: {outcome}")
        self.world.outcomes.clear()

    def _sample(self) -> None:
        report = self.world.status()
        server = report["broker"]["pid"]
        sizes = (len(report["sets"]), len(report["sessions"]))
        self.samples.append(Sample(use_of(self.world.keeper), use_of(server), *sizes))

    # --- the result -----------------------------------------------------------------------

    def table(self, seconds: float) -> str:
        """The summary, as the documentation shows it."""
        uname, python = platform.uname(), platform.python_version()
        machine = f"{os.cpu_count()} cores, {uname.system} {uname.release}, Python {python}"
        here = self.world.wanted
        p50, p99, worst = (percentile(self.pings, share) * 1e3 for share in (0.5, 0.99, 1.0))
        lines = [
            f"{time.strftime('%Y-%m-%d')}, {machine}",
            f"{seconds:.0f} s, {here} engines at a time, {self.world.engines_started} in all",
            f"ping: median {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.1f} ms",
            "",
            f"{'':40} {'2nd quarter':>12} {'last quarter':>12}",
        ]
        for what, early, late in self.compared():
            lines.append(f"{what:40} {early:12.0f} {late:12.0f}")
        lines += ["", "what engines did"]
        lines += [f"  {what:38} {number:12}" for what, number in sorted(self.done.items())]
        return "\n".join(lines)

    def compared(self) -> list[tuple[str, float, float]]:
        """Medians of the second and of the last quarter."""
        quarter = max(1, len(self.samples) // 4)
        parts = (self.samples[quarter : 2 * quarter], self.samples[-quarter:])
        numbers: tuple[tuple[str, Callable[[Sample], int]], ...] = (
            ("keeper, resident KiB", lambda sample: sample.keeper.resident >> 10),
            ("server, resident KiB", lambda sample: sample.server.resident >> 10),
            ("keeper, descriptors", lambda sample: sample.keeper.descriptors),
            ("server, descriptors", lambda sample: sample.server.descriptors),
            ("server, threads", lambda sample: sample.server.threads),
            ("sessions", lambda sample: sample.sessions),
            ("weight sets", lambda sample: sample.sets),
        )
        medians = [
            [statistics.median([number(sample) for sample in part]) for part in parts]
            for _what, number in numbers
        ]
        return [(numbers[i][0], early, late) for i, (early, late) in enumerate(medians)]

    def check(self) -> None:
        """Raise `Lost` unless memory is flat and everything has come back at the end."""
        for what, early, late in self.compared():
            if what.endswith("KiB") and late - early > MAX_GROWTH_BYTES >> 10:
                raise Lost(f"{what}: {early} became {late}")
        self.world.empty(refill=False)
        for who, after in _use_when_quiet(self.world).items():
            before = self.empty[who]
            if (before.descriptors, before.children) != (after.descriptors, after.children):
                raise Lost(f"{who}: {before} became {after}")


def _use_when_quiet(world: World) -> dict[str, Use]:
    world.check()
    time.sleep(0.5)  # the last connections' end, by libzmq's own threads
    return {"keeper": use_of(world.keeper), "server": use_of(world.server())}


def run_soak(context: ForkServerContext, seconds: float, engines: int = ENGINES) -> Soak:
    """The whole soak.

    Raises:
        Lost.
    """
    rng = random.Random(0)  # noqa: S311 - what engines do
    with tempfile.TemporaryDirectory(prefix="wbk-", dir="/tmp") as directory:
        world = World(context, Path(directory), rng, engines=0, memory_limit=MEMORY_LIMIT)
        try:
            empty = _use_when_quiet(world)
            world.wanted = engines
            world.fill_up()
            soak = Soak(world, rng, empty)
            soak.run(seconds)
            soak.check()
            world.close()
        except BaseException:
            print(world.log.read_text()[-3000:], file=sys.stderr)
            world.kill()
            raise
    return soak


def main() -> int:
    seconds = float(os.environ.get("SOAK_SECONDS", SECONDS))
    print(run_soak(nursery(), seconds).table(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
