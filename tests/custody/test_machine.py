"""The books under anything that engines, loaders, devices and death can do, in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from broker import wire
from broker.custody.audit import usage
from broker.custody.records import WeightSet
from broker.custody.states import State
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, OTHER_DEVICE
from tests.custody.world import FILES, SIZES, World

INDEX = st.integers(0, 7)
NUMBERS = st.sampled_from(sorted(FILES))
CONTENTS = st.sampled_from(sorted(SIZES))
DEVICES = st.sampled_from([DEVICE] * 7 + [OTHER_DEVICE])
NAMES = st.sampled_from([None, "m", "m", "n"])
DTYPES = st.sampled_from([None] * 6 + ["bfloat16", "float16"])
GENERATIONS = st.sampled_from([None] * 5 + ["1", "2", "red"])
KEYS = st.sampled_from(
    [
        ("m", "", ""),
        ("m", "", ""),
        ("m", "", "bfloat16"),
        ("m", "blake3:a", "bfloat16"),
        ("m", "blake3:b", ""),
        ("n", "blake3:a", "bfloat16"),
        ("n", "blake3:c", "float16"),
        ("", "blake3:a", "bfloat16"),
        ("", "blake3:a", ""),
        ("", "", ""),
    ]
)
"""Name, checkpoint and dtype of a claim."""


class BooksMachine(RuleBasedStateMachine):
    """Destruction shares a few rules, so that most steps build something up."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.leases = 0

    def engine(self, index: int) -> int:
        return self.world.engines[index % len(self.world.engines)]

    def lease(self) -> str:
        self.leases += 1
        return f"w{self.leases}"

    def writer(self, index: int) -> tuple[int, str, WeightSet]:
        claims = self.world.claims()
        return claims[index % len(claims)]

    @initialize()
    def three_engines(self) -> None:
        for _ in range(3):
            self.world.open()

    # --- engines --------------------------------------------------------------------------

    @rule(who=INDEX, number=NUMBERS)
    def acquires_files(self, who: int, number: int) -> None:
        self.world.acquire(self.engine(who), self.lease(), number, wire.Demand(DEVICE))

    @rule(who=INDEX, number=NUMBERS, name=NAMES)
    def acquires_files_by_name(self, who: int, number: int, name: str | None) -> None:
        self.world.acquire(self.engine(who), self.lease(), number, wire.Demand(DEVICE, name))

    @rule(
        who=INDEX,
        number=st.one_of(st.none(), NUMBERS),
        device=DEVICES,
        name=NAMES,
        dtype=DTYPES,
        generation=GENERATIONS,
        checkpoint=st.one_of(st.none(), CONTENTS),
    )
    def acquires_with_demands(
        self, who: int, number: int | None, device: str, **demand: Any
    ) -> None:
        self.world.acquire(self.engine(who), self.lease(), number, wire.Demand(device, **demand))

    @rule(who=INDEX, name=NAMES.filter(bool), generation=GENERATIONS)
    def acquires_by_name(self, who: int, name: str, generation: str | None) -> None:
        demand = wire.Demand(DEVICE, name, generation=generation)
        self.world.acquire(self.engine(who), self.lease(), None, demand)

    @rule(
        who=INDEX,
        key=KEYS,
        device=DEVICES,
        generation=GENERATIONS,
        willing=st.booleans(),
        fresh=st.sampled_from([False, False, True]),
    )
    def claims(self, who: int, key: tuple[str, str, str], device: str, **options: Any) -> None:
        request = wire.Claim(self.lease(), WeightKey(device, *key), **options)
        self.world.claim(self.engine(who), request)

    @rule(who=INDEX, key=KEYS.filter(lambda key: key[0] and not key[1]), generation=GENERATIONS)
    def publishes(self, who: int, key: tuple[str, str, str], generation: str | None) -> None:
        session, lease = self.engine(who), self.lease()
        request = wire.Claim(
            lease, WeightKey(DEVICE, *key), willing=False, generation=generation, fresh=True
        )
        self.world.claim(session, request)
        if lease in self.world.books.sessions[session].claims:
            self.world.write(session, lease, State.SEALED)

    @rule(key=KEYS)
    def all_claim(self, key: tuple[str, str, str]) -> None:
        for session in self.world.engines:
            self.world.claim(session, wire.Claim(self.lease(), WeightKey(DEVICE, *key)))

    @rule(number=NUMBERS, name=NAMES)
    def all_acquire(self, number: int, name: str | None) -> None:
        for session in self.world.engines:
            self.world.acquire(session, self.lease(), number, wire.Demand(DEVICE, name))

    @rule(who=INDEX, key=KEYS)
    def ships_a_loader(self, who: int, key: tuple[str, str, str]) -> None:
        request = wire.Load(self.lease(), WeightKey(DEVICE, *key), "build", 10.0)
        self.world.load(self.engine(who), request)

    @precondition(lambda self: self.world.books.sets)
    @rule(who=INDEX, which=INDEX)
    def comes_back_to_a_set(self, who: int, which: int) -> None:
        ids = sorted(self.world.books.sets)
        demand = wire.Demand(DEVICE, set=ids[which % len(ids)])
        self.world.acquire(self.engine(who), self.lease(), None, demand)

    @rule(who=INDEX, name=st.sampled_from(["", "m", "n"]))
    def watches(self, who: int, name: str) -> None:
        if self.engine(who) not in self.world.watched:
            self.world.watch(self.engine(who), name)

    @precondition(lambda self: self.world.leases)
    @rule(which=INDEX)
    def releases(self, which: int) -> None:
        leases = sorted(self.world.leases)
        self.world.release(*leases[which % len(leases)])

    @rule(who=INDEX, number=INDEX, what=st.sampled_from(["cancel", "release", "acquire"]))
    def uses_an_id_again(self, who: int, number: int, what: str) -> None:
        session = self.engine(who)
        known = self.world.books.sessions[session]
        ids = [*known.leases, *known.claims, *known.waiting, "w0"]
        lease = ids[number % len(ids)]
        if what == "cancel":
            self.world.cancel(session, lease)
        elif what == "release":
            self.world.release(session, lease)
        else:
            self.world.acquire(session, lease, 1, wire.Demand(DEVICE))

    # --- writers and the device -----------------------------------------------------------

    @precondition(lambda self: self.world.claims())
    @rule(which=INDEX)
    def writer_goes_on(self, which: int) -> None:
        self.world.next_step(*self.writer(which))

    @precondition(lambda self: self.world.claims())
    @rule(which=INDEX, until=st.sampled_from([State.WRITING, State.SEALING, State.SEALED]))
    def writer_gets_far(self, which: int, until: State) -> None:
        session, claim, _ = self.writer(which)
        self.world.write(session, claim, until)

    @precondition(lambda self: self.world.claims())
    @rule(which=INDEX, content=CONTENTS, step=st.sampled_from(["resolve", "reserve", "seal"]))
    def writer_does_anything(self, which: int, content: str, step: str) -> None:
        """Whenever it likes; an engine also says whatever it likes."""
        session, claim, record = self.writer(which)
        loader = self.world.loaders.get(session)
        number = (loader.number if loader else None) or 1
        content = loader.content(record.key) if loader else content
        if step == "reserve":
            self.world.reserve(session, claim, content)
        elif step == "seal":
            self.world.seal(session, claim, content, number)
        else:
            self.world.resolve(session, claim, content, number)

    @precondition(lambda self: self.world.claims())
    @rule(which=INDEX)
    def writer_reports(self, which: int) -> None:
        session, claim, _ = self.writer(which)
        assert self.world.report(session, claim)

    @precondition(lambda self: self.world.device_work)
    @rule(which=INDEX)
    def device_has_done_it(self, which: int) -> None:
        self.world.device_done(which % len(self.world.device_work))

    # --- trouble --------------------------------------------------------------------------

    @precondition(lambda self: self.world.claims())
    @rule(which=INDEX, how=st.sampled_from(["abandons", "dies", "is cancelled"]))
    def writer_gives_up(self, which: int, how: str) -> None:
        session, claim, _ = self.writer(which)
        if how == "abandons":
            assert self.world.abandon(session, claim)
        elif how == "dies":
            self.world.kill(session)
            self.world.open()
        else:
            self.world.cancel(session, claim)

    @rule(which=INDEX)
    def process_dies(self, which: int) -> None:
        processes = [*self.world.engines, *self.world.loaders]
        self.world.kill(processes[which % len(processes)])
        self.world.open()

    @precondition(lambda self: self.world.device_work)
    @rule(which=INDEX)
    def device_could_not(self, which: int) -> None:
        self.world.device_failed(which % len(self.world.device_work))

    @precondition(lambda self: self.world.books.sets)
    @rule()
    def server_is_replaced(self) -> None:
        self.world.replace_server()

    @rule(which=INDEX, name=st.sampled_from([None, None, None, "m", "blake3:a"]))
    def operator_evicts(self, which: int, name: str | None) -> None:
        ids = sorted(self.world.books.sets) or [0]
        self.world.evict(name or str(ids[which % len(ids)]))

    @precondition(lambda self: self.world.books.sets)
    @rule(which=INDEX, pinned=st.booleans())
    def operator_pins_or_unpins(self, which: int, pinned: bool) -> None:
        ids = sorted(self.world.books.sets)
        self.world.pin(str(ids[which % len(ids)]), pinned=pinned)

    # --- the end --------------------------------------------------------------------------

    def teardown(self) -> None:
        """Nobody waits for ever, and nothing stays when all are gone."""
        world = self.world
        world.settle()
        assert not world.asked, f"never answered: {world.asked}"
        for session in [*world.engines, *world.loaders]:
            world.kill(session)
        assert not world.books.sessions
        for set_id in list(world.books.sets):
            world.evict(str(set_id))
        assert not world.slabs
        for device in (DEVICE, OTHER_DEVICE):
            assert usage(world.books, device)["free"] == 1000
        assert not world.books.files()
        assert not world.books.lines()


TestBooks = BooksMachine.TestCase
# Half as many runs as of an ordinary property: each has 50 steps.
TestBooks.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=50)
