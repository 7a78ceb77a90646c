"""The fault campaign: `python -m tests.campaign.faults [--rounds N] [--seed N] [--jobs N]`.

Each round asks several engines for something, does harm meanwhile, takes the harm away, waits for
every answer and compares books, kernel and engines. It ends with a table, or with what was lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.campaign.engines import Engine, Outcome, nursery
from tests.campaign.injected import ANY_CONNECTION, FAULTS, Fault, new_broker
from tests.campaign.world import LINES, SIZES, SLOTS, Lost, World

ROUNDS = 2000
ROUNDS_OF_A_WORLD = 125
"""Then everything is given back, which must leave nothing, and another broker starts."""
ALWAYS_POSSIBLE = frozenset({"NotFound", "Busy", "OverBudget", "Cancelled"})
"""What others may do to one who asks for weights: nobody has them, writes them, room is short,
they were evicted meanwhile."""
KINDS = (
    ("checkpoint",) * 4
    + ("line", "line", "publish", "publish", "shared", "shared")
    + (*("ping", "status", "evict", "reconnect"),)
)


@dataclass
class Tally:
    """What a campaign has done."""

    rounds: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    """By the brokers themselves."""

    def add(self, other: Tally) -> None:
        self.rounds += other.rounds
        self.injected += other.injected
        self.outcomes += other.outcomes
        self.counted += other.counted


class Campaign:
    """The rounds of one world."""

    def __init__(self, world: World, rng: random.Random, tally: Tally) -> None:
        self._world = world
        self._rng = rng
        self._tally = tally
        self.now = "nothing yet"
        self.told: list[str] = []

    def round(self) -> None:
        """Ask, do harm, heal, wait, compare.

        Raises:
            Lost.
        """
        world, rng = self._world, self._rng
        world.end_children()
        faults = rng.choices(FAULTS, [fault.weight for fault in FAULTS], k=rng.randint(1, 2))
        self.now = " + ".join(fault.name for fault in faults)
        tags = [dict(world.tags)]
        world.outcomes.clear()
        shared = world.new_tag("shared").replace(":", "-")
        for engine in rng.sample(world.engines, rng.randint(2, len(world.engines))):
            self._ask(engine, shared)
        done = [fault for fault in faults if self._inject(fault)]
        for fault in done:
            if fault.heal is not None:
                fault.heal(world)
        world.wait_for_answers()
        self.told = [
            f"{o.pid} {o.command} {o.arguments}: {o.kind} {o.value}" for o in world.outcomes
        ]
        tags.append(dict(world.tags))
        self._judge(frozenset().union(*(fault.excuses for fault in done)), tags)
        settles = {fault.settle for fault in done if fault.settle is not None}
        for settle in sorted(settles, key=lambda settle: settle is not new_broker):
            settle(world)  # a new broker first: what others had taken away needs one to come back
        world.fill_up()
        world.check()
        self._tally.rounds += 1

    def _inject(self, fault: Fault) -> bool:
        pauses = (0.0, 0.0, self._rng.uniform(0, 0.02), self._rng.uniform(0, 0.4))
        time.sleep(self._rng.choice(pauses))
        is_done = fault.inject(self._world)
        if is_done:
            self._tally.injected[fault.name] += 1
        return is_done

    def _ask(self, engine: Engine, shared: str) -> None:
        """One of the things that engines do."""
        world, rng = self._world, self._rng
        held = world.held.get(engine.pid, {})
        if len(held) >= SLOTS or (held and rng.random() < 0.3):
            engine.tell("release", slot=rng.choice(list(held)))
            return
        kind, slot, nbytes = rng.choice(KINDS), world.new_slot(), rng.choice(SIZES)
        line = rng.choice(LINES)
        if kind == "checkpoint":
            hurry = rng.uniform(0.01, 0.5) if rng.random() < 0.2 else None
            path = rng.choice(list(world.tags))
            engine.tell("acquire", slot=slot, path=path, timeout=hurry)
        elif kind == "line":
            engine.tell("acquire_name", slot=slot, name=line)
        elif kind == "publish":
            tag = world.new_tag(line)
            world.published[line].add(tag)
            engine.tell("publish", slot=slot, name=line, tag=tag, nbytes=nbytes)
        elif kind == "shared":
            tag = f"{shared}:{engine.pid}"
            engine.tell("get_or_publish", slot=slot, name=shared, tag=tag, nbytes=nbytes)
        elif kind == "evict":
            engine.tell("evict", which=str(rng.choice([line, *map(str, range(1, 20))])))
        elif kind == "reconnect":
            engine.session = 0
            engine.tell("reconnect")
        else:
            engine.tell(kind)

    # --- judging --------------------------------------------------------------------------

    def _judge(self, excuses: frozenset[str], tags: list[dict[str, str]]) -> None:
        for outcome in self._world.outcomes:
            self._tally.outcomes[f"{outcome.command}: {outcome.kind}"] += 1
            if outcome.kind == "ok":
                self._check_result(outcome, tags)
                continue
            excused = ALWAYS_POSSIBLE | excuses
            if outcome.command == "reconnect":
                excused |= ANY_CONNECTION
            if outcome.arguments.get("timeout"):
                excused |= {"RequestTimeout"}
            if outcome.kind not in excused:
                said = f"{outcome.command} {outcome.arguments}"
                raise Lost(f"{said}: {outcome.kind}: {outcome.sentence}")

    def _check_result(self, outcome: Outcome, tags: list[dict[str, str]]) -> None:
        """Are they the weights that were asked for? (That they are what they say is checked.)"""
        value: Any = outcome.value
        if outcome.command == "reconnect":
            (engine,) = [e for e in self._world.engines if e.pid == value["pid"]]
            engine.session = value["session"]
            return
        if outcome.command == "acquire":
            possible = {each[outcome.arguments["path"]] for each in tags}
        elif outcome.command == "acquire_name":
            possible = self._world.published[outcome.arguments["name"]]
        elif outcome.command == "publish":
            possible = {outcome.arguments["tag"]}
        elif outcome.command == "get_or_publish":
            possible = {value["tag"]}
            if not value["tag"].startswith(outcome.arguments["name"]):
                possible = set()
        else:
            return
        if value["tag"] not in possible:
            raise Lost(f"{outcome.command} {outcome.arguments} got {value}, not one of {possible}")


# --- worlds in processes of their own -----------------------------------------------------------


def run_world(
    context: ForkServerContext, seed: str, rounds: int, engines: int = 6, show: bool = False
) -> Tally:
    """Some rounds with a broker of their own; at the end everything must have come back.

    Raises:
        Lost: with seed, round and faults.
    """
    rng = random.Random(seed)  # noqa: S311 - the same rounds for the same seed
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="wbf-", dir="/tmp") as directory:
        world = World(context, Path(directory), rng, engines)
        campaign = Campaign(world, rng, tally)
        try:
            for number in range(rounds):
                campaign.round()
                if show:
                    print(f"{seed} {number}: {campaign.now}", flush=True)
            campaign.now = "the end"
            world.empty()
            tally.counted.update(world.status()["counters"])
            world.close()
        except (Lost, AssertionError, OSError, EOFError) as error:
            log = world.log.read_text().splitlines()[-40:]
            campaign.told += world.states()
            campaign.told += [f"{pid}: {state}" for pid, state in world.channels().items()]
            world.kill()
            raise Lost(
                f"seed {seed}, round {tally.rounds}, {campaign.now}:\n{error}\n"
                + "".join(traceback.format_exception(error)[-3:])
                + "\n".join(["engines were told:", *campaign.told, "the broker's log:", *log])
            ) from error
    return tally


def _worlds(
    job: int, jobs: int, seed: int, rounds: int, results: Any, show: bool, only: int | None
) -> None:
    context = nursery()
    try:
        for world, start in enumerate(range(0, rounds, ROUNDS_OF_A_WORLD)):
            if world % jobs != job or only not in (None, world):
                continue
            try:
                some = min(ROUNDS_OF_A_WORLD, rounds - start)
                results.put(run_world(context, f"{seed}-{world}", some, show=show))
            except Lost as error:
                results.put(str(error))
    finally:
        results.put(None)


def run(
    seed: int, rounds: int, jobs: int, *, show: bool = False, only: int | None = None
) -> tuple[Tally, list[str]]:
    """All worlds, `jobs` at a time: what was done, and what was lost."""
    results: Any = multiprocessing.get_context("spawn").SimpleQueue()
    workers = [
        multiprocessing.get_context("spawn").Process(
            target=_worlds, args=(job, jobs, seed, rounds, results, show, only)
        )
        for job in range(jobs)
    ]
    for worker in workers:
        worker.start()
    tally, lost, running = Tally(), [], jobs
    while running:
        result = results.get()
        if result is None:
            running -= 1
        elif isinstance(result, Tally):
            tally.add(result)
            print(f"{tally.rounds} rounds", file=sys.stderr, flush=True)
        else:
            lost.append(result)
            print(result, file=sys.stderr, flush=True)
    for worker in workers:
        worker.join()
        if worker.exitcode:
            lost.append(f"{worker.name} ended with {worker.exitcode}: the rest of its worlds")
    return tally, lost


def table(tally: Tally, lost: list[str], seconds: float, seed: int) -> str:
    """What was done, as the documentation shows it."""
    lines = [f"seed {seed}: {tally.rounds} rounds in {seconds:.0f} s", ""]
    lines += [f"{'fault':40} {'injected':>8} {'survived':>8} {'lost':>5}"]
    lines += [f"{name:40} {n:8} {n:8} {0:5}" for name, n in sorted(tally.injected.items())]
    total = sum(tally.injected.values())
    lines += [f"{'all':40} {total:8} {total:8} {len(lost):5}", "", "what engines were told"]
    lines += [f"  {what:38} {n:8}" for what, n in sorted(tally.outcomes.items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--jobs", type=int, default=2, help="worlds at a time (default: 2)")
    parser.add_argument("--world", type=int, help="only this one, e.g. one that lost something")
    parser.add_argument("--show", action="store_true", help="print each round's faults")
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    tally, lost = run(seed, options.rounds, options.jobs, show=options.show, only=options.world)
    print(table(tally, lost, time.monotonic() - began, seed))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
