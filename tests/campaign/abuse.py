"""Peers that misbehave all at once: `python -m tests.campaign.abuse [--seconds N]`.

One says nothing, one sends frames without end, one never reads, one floods. Meanwhile another
client's ping is measured, and the server's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import zmq

from tests.campaign import kernel
from tests.campaign.asking import ask_status
from tests.campaign.engines import nursery
from tests.campaign.world import Lost, World
from tests.support.clock import SCALE
from tests.support.raw import RawDealer, RawSession, percentile
from tests.support.streams import connect_raw, frame, stream

SECONDS = 10.0
PING_SECONDS = 0.1
"""The promise (DESIGN section 1)."""
MAX_GROWTH_BYTES = 768 << 20
"""`stream_bytes`, what arrives before it is noticed, and what the flood has under way. A peer
without end sends gigabytes a second, and a busy machine lets the server run late."""
FLOOD_AHEAD = 500


def say_nothing(directory: Path, seconds: float) -> None:
    """Connected both ways, with a session, silent."""
    with RawSession(directory), RawDealer(directory):
        time.sleep(seconds)


def send_without_end(directory: Path, seconds: float) -> None:
    stream(directory, 1000, seconds)


def never_read(directory: Path, seconds: float) -> None:
    """Ask for the books again and again, and read no answer; begin anew when cut off."""
    asked = frame(b"status", more=True) + frame(b"", more=False)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), connect_raw(directory) as connection:
            while time.monotonic() < until:
                connection.sendall(asked)


def flood(directory: Path, seconds: float) -> None:
    """As many requests as the broker answers, hundreds of them ahead."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.connect(f"ipc://{directory}/default.zmq")
    until, ahead = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        while ahead < FLOOD_AHEAD:
            dealer.send_multipart([b"ping", b""])
            ahead += 1
        while dealer.poll(100 if ahead == FLOOD_AHEAD else 0):
            dealer.recv_multipart()
            ahead -= 1
    dealer.close()
    context.term()


PEERS: tuple[Callable[[Path, float], None], ...] = (
    say_nothing,
    send_without_end,
    never_read,
    flood,
)


@dataclass(frozen=True)
class Result:
    """Pings in seconds, bytes of the server, and what it has counted."""

    pings: list[float]
    before: int
    peak: int
    after: int
    counters: dict[str, int]

    def table(self) -> str:
        p50, p99, worst = (percentile(self.pings, share) * 1e3 for share in (0.5, 0.99, 1.0))
        counted = ", ".join(
            f"{name} {self.counters.get(name, 0)}"
            for name in ("requests", "connections_cut", "connections_refused", "replies_dropped")
        )
        return (
            f"{len(self.pings)} pings: median {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.1f} ms"
            f"\nserver: {self.before >> 20} MiB before, {self.peak >> 20} MiB at most, "
            f"{self.after >> 20} MiB after\ncounted: {counted}"
        )

    def check(self) -> None:
        """Raise `Lost` unless the promise was kept."""
        p99 = percentile(self.pings, 0.99)
        if p99 > PING_SECONDS * SCALE:
            raise Lost(f"ping took {p99} s at the 99th percentile")
        if self.peak - self.before > MAX_GROWTH_BYTES:
            raise Lost(f"the server has grown by {self.peak - self.before} bytes")


def run_abuse(context: ForkServerContext, seconds: float) -> Result:
    """All of `PEERS` for so long, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="wba-", dir="/tmp") as directory:
        world = World(context, Path(directory), random.Random(0), engines=1)  # noqa: S311
        try:
            result = _measure(world, context, seconds)
            world.check()
            world.close()
        except BaseException:
            world.kill()
            raise
    return result


def _measure(world: World, context: ForkServerContext, seconds: float) -> Result:
    server = world.server()
    peers = [
        context.Process(target=peer, args=(world.directory, seconds), daemon=True) for peer in PEERS
    ]
    pings: list[float] = []
    with RawDealer(world.directory) as other:
        other.ping_seconds()
        before = peak = kernel.resident_bytes(server)
        for peer in peers:
            peer.start()
        while any(peer.is_alive() for peer in peers):
            pings.append(other.ping_seconds())
            peak = max(peak, kernel.resident_bytes(server))
            time.sleep(0.002)
        for peer in peers:
            peer.join()
    counters = ask_status(world.directory)["counters"]
    if world.server() != server:
        raise Lost("the server was replaced")
    return Result(pings, before, peak, kernel.resident_bytes(server), counters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    result = run_abuse(nursery(), parser.parse_args().seconds)
    print(result.table())
    result.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
