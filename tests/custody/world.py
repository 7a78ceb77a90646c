"""A model of everything around the books: engines, loaders, a slow device, and what each must see.

It keeps its own account of tickets, leases and slabs from the actions alone, and compares: every
ticket gets one answer, every slab is freed once and never while it is leased, and nobody gets other
weights than it described.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker import wire
from broker.custody import Books, Budget
from broker.custody.actions import (
    Action,
    CreateSlab,
    DropLease,
    FreeSlab,
    FreezeSlab,
    KeepLease,
    KeepSet,
    Notify,
    Reply,
    StartLoader,
    StartShipped,
    StopLoader,
)
from broker.custody.audit import check_invariant
from broker.custody.records import KeptLease, KeptSet, WeightSet
from broker.custody.states import RESIDENT, State
from broker.errors import BrokerError, InternalError, LoadFailed, OverBudget
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, OTHER_DEVICE, everything, source

DEATH = LoadFailed("killed")
SIZES = {"blake3:a": 400, "blake3:b": 400, "blake3:c": 450, "blake3:d": 1100, "blake3:e": 300}
DTYPES = {"blake3:a": "bfloat16", "blake3:b": "bfloat16", "blake3:c": "float16"}
DTYPES |= {"blake3:d": "int8", "blake3:e": "float32"}
FILES = {
    1: ("blake3:a", "shape-ab"),
    2: ("blake3:a", "shape-ab"),
    3: ("blake3:a", "shape-ab"),
    4: ("blake3:b", "shape-ab"),
    5: ("blake3:b", "shape-ab"),
    6: ("blake3:c", "shape-c"),
    7: ("blake3:d", "shape-d"),
    8: ("blake3:e", "shape-c"),
    9: ("blake3:a", "shape-c"),
}
"""Number: the content's identity and the fingerprint. a and b are fine-tunes of equal headers; d
does not fit."""
CONVERTED = {8: (6, "float32"), 9: (6, "bfloat16")}
"""Numbers that are no files of their own: the inode, and the dtype it is converted to. The second
turns out to be what others have stored."""


def numbered(number: int) -> wire.Source:
    inode, dtype = CONVERTED.get(number, (number, None))
    return source(inode, FILES[number][1], dtype)


@dataclass
class Asked:
    """A request without an answer yet."""

    session: int | None
    demand: wire.Demand | None = None
    content: str | None = None
    lease: str = ""


@dataclass
class Loader:
    action: StartLoader | StartShipped
    resolved: bool = False

    @property
    def number(self) -> int | None:
        if isinstance(self.action, StartShipped):
            return None
        return next(n for n in FILES if numbered(n).identity == self.action.source.identity)

    def content(self, key: WeightKey) -> str:
        if self.number is not None:
            return FILES[self.number][0]
        return key.checkpoint or "blake3:a"


def empty_books() -> Books:
    budgets = {DEVICE: Budget(1000, 10), OTHER_DEVICE: Budget(1000, 10)}
    return Books(budgets, "epoch", keeping=True)


@dataclass
class World:
    """Books with two devices of 1,000 bytes, and the world's own account of them."""

    books: Books = field(default_factory=empty_books)
    restarts: int = 0
    tickets: int = 0
    asked: dict[int, Asked] = field(default_factory=dict)
    engines: list[int] = field(default_factory=list)
    watched: dict[int, str] = field(default_factory=dict)
    loaders: dict[int, Loader] = field(default_factory=dict)
    leases: dict[tuple[int, str], int] = field(default_factory=dict)
    device_work: list[CreateSlab | FreezeSlab] = field(default_factory=list)
    slabs: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    immutable: set[int] = field(default_factory=set)
    """Sets whose slab the device has frozen."""
    kept_sets: dict[int, KeptSet] = field(default_factory=dict)
    kept_leases: dict[tuple[int, str], KeptLease] = field(default_factory=dict)
    """What the keeper has for a successor of this server."""

    # --- events ---------------------------------------------------------------------------

    def perform(self, event: Callable[[], list[Action]]) -> bool:
        """One event and its consequences. False if it was refused, which must change nothing."""
        before = everything(self.books)
        try:
            actions = event()
        except BrokerError:
            assert everything(self.books) == before, "a refused event changed the books"
            return False
        check_invariant(self.books)
        for action in actions:
            self._carry_out(action)
        self._check_one_copy()
        return True

    def request(self, asked: Asked, event: Callable[[int], list[Action]]) -> bool:
        """An event that somebody waits for the answer of."""
        self.tickets += 1
        ticket = self.tickets
        self.asked[ticket] = asked
        accepted = self.perform(lambda: event(ticket))
        if not accepted:
            del self.asked[ticket]
        return accepted

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply(ticket, body):
                self._answered(ticket, body)
            case StartLoader(session=session) | StartShipped(session=session):
                assert session not in self.loaders
                self.loaders[session] = Loader(action)
            case Notify(session, event):
                assert self.watched[session] in ("", event.detail["name"])
            case StopLoader(session):
                assert session in self.loaders, f"session {session} is no living loader"
            case CreateSlab(set_id):
                assert set_id not in self.slabs | self.freed, f"a second slab for set {set_id}"
                self.slabs.add(set_id)
                self.device_work.append(action)
            case FreezeSlab(set_id):
                assert set_id in self.slabs
                self.device_work.append(action)
            case FreeSlab(set_id):
                assert set_id in self.slabs, f"set {set_id} freed without a slab, or twice"
                assert set_id not in self.leases.values(), f"set {set_id} freed under a lease"
                self.slabs.remove(set_id)
                self.freed.add(set_id)
                self.kept_sets.pop(set_id, None)
            case KeepSet(kept):
                assert kept.id in self.slabs & self.immutable
                self.kept_sets[kept.id] = kept
            case KeepLease(lease):
                assert lease.set in self.kept_sets
                self.kept_leases[lease.session, lease.lease] = lease
            case DropLease(session, name):
                self.kept_leases.pop((session, name), None)

    def _answered(self, ticket: int, body: object) -> None:
        assert ticket <= self.tickets
        asked = self.asked.pop(ticket, None)
        assert asked is not None, f"ticket {ticket} was answered twice, or nobody is there"
        if isinstance(body, wire.Granted):
            self._granted(asked, body)
        if isinstance(body, wire.Sealed) and body.granted is not None:
            assert body.granted.set == body.set
            self._granted(asked, body.granted)

    def _granted(self, asked: Asked, grant: wire.Granted) -> None:
        assert asked.session is not None
        assert grant.set in self.slabs & self.immutable, "a lease on a set that is not sealed"
        assert self.books.sets[grant.set].state in RESIDENT
        self.leases[asked.session, grant.lease] = grant.set
        assert asked.content in (None, grant.key.checkpoint), "the wrong weights"
        if asked.demand is None:
            return
        assert asked.demand.set in (None, grant.set)
        for name in ("device", "name", "checkpoint", "dtype", "generation"):
            wanted = getattr(asked.demand, name)
            found = grant.generation if name == "generation" else getattr(grant.key, name)
            assert wanted in (None, found), f"{name}: {found!r} for {wanted!r}"

    def _check_one_copy(self) -> None:
        """What loaders have read is there once."""
        contents = [
            (record.key.device, record.key.checkpoint)
            for record in self.books.sets.values()
            if record.loaded_by_broker and record.state in RESIDENT
        ]
        assert len(contents) == len(set(contents)), f"more than one copy: {contents}"

    # --- what engines do ------------------------------------------------------------------

    def open(self) -> None:
        self.engines.append(self.books.open_session())

    def acquire(self, session: int, lease: str, number: int | None, demand: wire.Demand) -> None:
        given = None if number is None else numbered(number)
        content = None if number is None else FILES[number][0]
        request = wire.Acquire(lease, demand, given)
        self.request(
            Asked(session, demand, content, lease),
            lambda ticket: self.books.acquire(session, ticket, request),
        )

    def claim(self, session: int, request: wire.Claim) -> None:
        key = request.key
        demand = wire.Demand(
            key.device, key.name or None, key.checkpoint or None, key.dtype or None
        )
        self.request(
            Asked(session, demand, None, request.lease),
            lambda ticket: self.books.claim(session, ticket, request),
        )

    def load(self, session: int, request: wire.Load) -> None:
        key = request.key
        demand = wire.Demand(key.device, key.name or None, key.checkpoint or None)
        self.request(
            Asked(session, demand, None, request.lease),
            lambda ticket: self.books.load(session, ticket, request),
        )

    def watch(self, session: int, name: str) -> None:
        self.watched[session] = name
        request = wire.Watch(name)
        assert self.request(
            Asked(session), lambda ticket: self.books.watch(session, ticket, request)
        )

    def release(self, session: int, lease: str) -> None:
        held = self.leases.pop((session, lease), None)
        request = wire.Release(lease)
        accepted = self.request(
            Asked(session), lambda ticket: self.books.release(session, ticket, request)
        )
        assert accepted == (held is not None)

    def cancel(self, session: int, lease: str) -> None:
        self.leases.pop((session, lease), None)
        request = wire.Cancel(lease)
        assert self.request(
            Asked(session), lambda ticket: self.books.cancel(session, ticket, request)
        )

    def evict(self, what: str) -> None:
        request = wire.Evict(what)
        self.request(Asked(None), lambda ticket: self.books.evict(ticket, request))

    def pin(self, what: str, *, pinned: bool) -> None:
        if pinned:
            self.request(Asked(None), lambda ticket: self.books.pin(ticket, wire.Pin(what)))
        else:
            self.request(Asked(None), lambda ticket: self.books.unpin(ticket, wire.Unpin(what)))

    def kill(self, session: int) -> None:
        """A process dies: nobody is left to answer, its leases are void."""
        self.asked = {n: a for n, a in self.asked.items() if a.session != session}
        self.leases = {key: n for key, n in self.leases.items() if key[0] != session}
        self.loaders.pop(session, None)
        self.watched.pop(session, None)
        if session in self.engines:
            self.engines.remove(session)
        assert self.perform(lambda: self.books.end_session(session, DEATH))

    def replace_server(self) -> None:
        """The server dies; the next one takes over what the keeper has. Nobody is answered any
        more who waited, loaders and what was being written are gone."""
        before = self.books
        self.restarts += 1
        self.books = empty_books()
        self.asked, self.loaders, self.device_work, self.watched = {}, {}, [], {}
        self.freed |= self.slabs - self.kept_sets.keys()
        self.slabs &= self.kept_sets.keys()
        kept = list(self.kept_sets.values()), list(self.kept_leases.values())
        assert self.perform(
            lambda: self.books.restore(kept[0], self.engines, kept[1], restarts=self.restarts)
        )
        resident = {n: record for n, record in before.sets.items() if record.state in RESIDENT}
        assert self.books.sets.keys() == resident.keys()
        for set_id, was in resident.items():
            record = self.books.sets[set_id]
            for name in ("key", "state", "leases", "generations", "pinned", "superseded"):
                assert getattr(record, name) == getattr(was, name), name
        assert self.books.lines() == before.lines()
        assert self.books.files() == {k: n for k, n in before.files().items() if n in resident}

    # --- what writers do ------------------------------------------------------------------

    def claims(self) -> list[tuple[int, str, WeightSet]]:
        return [
            (session.id, claim, self.books.sets[set_id])
            for session in self.books.sessions.values()
            for claim, set_id in session.claims.items()
        ]

    def resolve(self, session: int, claim: str, content: str, number: int) -> bool:
        files = numbered(number).files
        request = wire.Resolve(claim, content, files)
        return self.request(
            Asked(session), lambda ticket: self.books.resolve(session, ticket, request)
        )

    def reserve(self, session: int, claim: str, content: str) -> bool:
        request = wire.Reserve(claim, SIZES[content], 2, DTYPES[content])
        return self.request(
            Asked(session), lambda ticket: self.books.reserve(session, ticket, request)
        )

    def seal(
        self, session: int, claim: str, content: str, number: int | None, *, keep: bool = False
    ) -> bool:
        files = [] if number is None else numbered(number).files
        request = wire.Seal(claim, content, files, keep)
        return self.request(
            Asked(session), lambda ticket: self.books.seal(session, ticket, request)
        )

    def abandon(self, session: int, claim: str) -> bool:
        request = wire.Abandon(claim, "load-failed", "the file is truncated")
        return self.request(
            Asked(session), lambda ticket: self.books.abandon(session, ticket, request)
        )

    def report(self, session: int, claim: str) -> bool:
        request = wire.Report(claim, "copying", 1, 2)
        return self.perform(lambda: self.books.report(session, request))

    def next_step(self, session: int, claim: str, record: WeightSet) -> bool:
        """The writer does what comes next, if it is its turn. False: there is nothing to do."""
        loader = self.loaders.get(session)
        content = loader.content(record.key) if loader else record.key.checkpoint or "blake3:a"
        number = loader.number if loader else None
        if loader and number and not loader.resolved:
            loader.resolved = True
            hash_first = isinstance(loader.action, StartLoader) and loader.action.hash_first
            if hash_first and self.resolve(session, claim, content, number):
                return True
        if record.state is State.CLAIMED:
            return self.reserve(session, claim, content) or self.abandon(session, claim)
        if record.state is State.WRITING:
            return self.seal(session, claim, content, number, keep=loader is None)
        return False

    # --- what the device does -------------------------------------------------------------

    def device_done(self, index: int) -> None:
        work = self.device_work.pop(index)
        if isinstance(work, CreateSlab):
            self.perform(lambda: self.books.slab_created(work.set))
            return
        if work.set in self.slabs:
            self.immutable.add(work.set)
        self.perform(lambda: self.books.slab_frozen(work.set))

    def device_failed(self, index: int) -> None:
        work = self.device_work.pop(index)
        creating = isinstance(work, CreateSlab)
        error = OverBudget("no memory") if creating else InternalError("the driver failed")
        self.perform(lambda: self.books.slab_failed(work.set, error))

    # --- the end --------------------------------------------------------------------------

    def write(self, session: int, claim: str, until: State) -> None:
        """A writer and the device go on until the set is in this state, or given up."""
        set_id = self.books.sessions[session].claims[claim]
        while (record := self.books.sets.get(set_id)) is not None and record.writer == session:
            if record.state is until:
                return
            work = [n for n, action in enumerate(self.device_work) if action.set == set_id]
            if work:
                self.device_done(work[0])
            else:
                self.next_step(session, claim, record)

    def settle(self) -> None:
        """Everybody does what comes next until nobody has anything to do."""
        for _ in range(1000):
            progress = bool(self.device_work)
            while self.device_work:
                self.device_done(0)
            progress |= any(self.next_step(*claim) for claim in self.claims() if self._holds(claim))
            if not progress:
                return
        raise AssertionError("it never comes to rest")

    def _holds(self, claim: tuple[int, str, WeightSet]) -> bool:
        session, name, record = claim
        held = self.books.sessions.get(session)
        return held is not None and held.claims.get(name) == record.id
