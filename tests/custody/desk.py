"""Books at a desk: short calls, fresh tickets, and what a refusal must leave untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from broker import wire
from broker.custody import Books, Budget
from broker.custody.actions import Action, Log, Reply, StartLoader
from broker.custody.audit import check_invariant
from broker.custody.records import WeightSet
from broker.errors import BrokerError, LoadFailed
from broker.weights import WeightKey

DEVICE = "GPU-0"
OTHER_DEVICE = "GPU-1"
LIMIT = 1000
GRANULARITY = 10
KILLED = LoadFailed("the process was killed")


@dataclass(frozen=True)
class Refused:
    """A `Reply` with an error, comparable: errors themselves are equal only to themselves."""

    ticket: int
    kind: type[BrokerError]
    sentence: str


def stamp(name: str, inode: int) -> wire.FileStamp:
    return wire.FileStamp(name, 1, inode, 100, 10, 10, "header")


def source(inode: int, fingerprint: str = "shape-a", dtype: str | None = None) -> wire.Source:
    """A checkpoint of one file. Equal inode: the same file; equal fingerprint: equal headers.

    `dtype`: what it is to be converted to.
    """
    files = [stamp("model.safetensors", inode)]
    conversion = None if dtype is None else wire.Conversion(dtype)
    return wire.Source(f"/models/{inode}", None, files, fingerprint, conversion)


def comparable(actions: Sequence[Action]) -> list[Action | Refused]:
    """The actions without log lines, errors as `Refused`."""
    return [_comparable(action) for action in actions if not isinstance(action, Log)]


def _comparable(action: Action) -> Action | Refused:
    if isinstance(action, Reply) and isinstance(action.body, BrokerError):
        return Refused(action.ticket, type(action.body), action.body.sentence)
    return action


def everything(books: Books) -> str:
    """All of the books, down to the last counter, to compare."""
    return repr(vars(books))


class Desk:
    """Books with one device of 1,000 bytes, granted by tens, and one like it beside.

    Each call takes a fresh ticket (`desk.ticket` is the last one), checks the invariant, and that a
    refusal has changed nothing. Returns the actions as `comparable`.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        budgets = {name: Budget(limit, GRANULARITY) for name in (DEVICE, OTHER_DEVICE)}
        self.books = Books(budgets, "epoch")
        self.ticket = 0
        self.logged: list[Log] = []

    # --- calls ----------------------------------------------------------------------------

    def call(self, event: Callable[[], list[Action]]) -> list[Action | Refused]:
        before = everything(self.books)
        try:
            actions = event()
        except BrokerError:
            assert everything(self.books) == before
            raise
        check_invariant(self.books)
        self.logged += [action for action in actions if isinstance(action, Log)]
        return comparable(actions)

    def _next(self) -> int:
        self.ticket += 1
        return self.ticket

    def engine(self) -> int:
        return self.books.open_session()

    def acquire(
        self, session: int, lease: str = "w", from_: wire.Source | None = None, **demand: Any
    ) -> list[Action | Refused]:
        demanded = wire.Demand(**{"device": DEVICE, **demand})
        request = wire.Acquire(lease, demanded, from_)
        return self.call(lambda: self.books.acquire(session, self._next(), request))

    def claim(
        self,
        session: int,
        lease: str = "w",
        *,
        willing: bool = True,
        generation: str | None = None,
        **key: Any,
    ) -> list[Action | Refused]:
        request = wire.Claim(
            lease, WeightKey(**{"device": DEVICE, **key}), willing=willing, generation=generation
        )
        return self.call(lambda: self.books.claim(session, self._next(), request))

    def resolve(self, session: int, checkpoint: str, *files: int) -> list[Action | Refused]:
        stamps = [stamp("model.safetensors", inode) for inode in files]
        request = wire.Resolve("load", checkpoint, stamps)
        return self.call(lambda: self.books.resolve(session, self._next(), request))

    def reserve(
        self,
        session: int,
        nbytes: int = 95,
        dtype: str = "bfloat16",
        quantization: str = "",
        claim: str = "load",
    ) -> list[Action | Refused]:
        request = wire.Reserve(claim, nbytes, 3, dtype, quantization)
        return self.call(lambda: self.books.reserve(session, self._next(), request))

    def created(self, set_id: int) -> list[Action | Refused]:
        return self.call(lambda: self.books.slab_created(set_id))

    def seal(
        self, session: int, checkpoint: str = "blake3:a", *files: int, claim: str = "load"
    ) -> list[Action | Refused]:
        stamps = [stamp("model.safetensors", inode) for inode in files]
        request = wire.Seal(claim, checkpoint, stamps)
        return self.call(lambda: self.books.seal(session, self._next(), request))

    def frozen(self, set_id: int) -> list[Action | Refused]:
        return self.call(lambda: self.books.slab_frozen(set_id))

    def failed(self, set_id: int, error: BrokerError) -> list[Action | Refused]:
        return self.call(lambda: self.books.slab_failed(set_id, error))

    def abandon(
        self, session: int, error: BrokerError, claim: str = "load"
    ) -> list[Action | Refused]:
        request = wire.Abandon(claim, error.status, error.to_payload().decode())
        return self.call(lambda: self.books.abandon(session, self._next(), request))

    def report(self, session: int, done: int, claim: str = "load") -> list[Action | Refused]:
        request = wire.Report(claim, "copying", done, 100)
        return self.call(lambda: self.books.report(session, request))

    def release(self, session: int, lease: str = "w") -> list[Action | Refused]:
        return self.call(lambda: self.books.release(session, self._next(), wire.Release(lease)))

    def cancel(self, session: int, lease: str = "w") -> list[Action | Refused]:
        return self.call(lambda: self.books.cancel(session, self._next(), wire.Cancel(lease)))

    def evict(self, what: str | int) -> list[Action | Refused]:
        return self.call(lambda: self.books.evict(self._next(), wire.Evict(str(what))))

    def end(self, session: int, cause: BrokerError = KILLED) -> list[Action | Refused]:
        return self.call(lambda: self.books.end_session(session, cause))

    # --- whole stories --------------------------------------------------------------------

    def start(self, from_: wire.Source, engine: int | None = None, **demand: Any) -> StartLoader:
        """An engine asks for a checkpoint that is not there: its loader."""
        session = self.engine() if engine is None else engine
        (action,) = self.acquire(session, from_=from_, **demand)
        assert isinstance(action, StartLoader)
        return action

    def finish(
        self,
        loader: StartLoader,
        checkpoint: str = "blake3:a",
        nbytes: int = 100,
        dtype: str = "bfloat16",
    ) -> list[Action | Refused]:
        """A loader does all it has to: the last answers."""
        self.reserve(loader.session, nbytes, dtype)
        self.created(loader.set)
        self.seal(loader.session, checkpoint, *(f.inode for f in loader.source.files))
        actions = self.frozen(loader.set)
        self.end(loader.session)
        return actions

    def load(
        self,
        inode: int = 1,
        checkpoint: str = "blake3:a",
        engine: int | None = None,
        *,
        fingerprint: str = "shape-a",
        nbytes: int = 100,
        **demand: Any,
    ) -> int:
        """An engine acquires a checkpoint that is loaded for it, lease "w": the set's id."""
        loader = self.start(source(inode, fingerprint), engine, **demand)
        self.finish(loader, checkpoint, nbytes)
        return loader.set

    def publish(
        self,
        session: int,
        lease: str = "p",
        checkpoint: str = "",
        nbytes: int = 100,
        dtype: str = "bfloat16",
        **key: Any,
    ) -> int:
        """An engine claims a key, writes and seals it: the set's id."""
        self.claim(session, lease, checkpoint=checkpoint, dtype=dtype, **key)
        set_id = self.books.sessions[session].claims[lease]
        self.reserve(session, nbytes, dtype, claim=lease)
        self.created(set_id)
        self.seal(session, checkpoint, claim=lease)
        self.frozen(set_id)
        return set_id

    def set(self, set_id: int) -> WeightSet:
        return self.books.sets[set_id]

    @property
    def free(self) -> int:
        return self.books.budgets[DEVICE].free
