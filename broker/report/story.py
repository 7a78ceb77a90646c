"""What became of a broker's servers, weight sets, engines and memory. Plain data; times are seconds
since 1970."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class End(Enum):
    """How something ended, as far as the journal says."""

    NOT_YET = "goes on"
    ORDERLY = "ended in order"
    DIED = "died"
    REPLACED = "was replaced"
    FAILED = "failed"
    FREED = "was freed"
    SHARED = "was resident already"
    UNKNOWN = "end not recorded"


@dataclass
class Span:
    """A time; `end` is None while it goes on."""

    start: float
    end: float | None = None

    def reaches(self, when: float) -> bool:
        """Whether it was still there at this moment, or began later."""
        return self.end is None or self.end >= when


@dataclass
class ServerLife(Span):
    """One server process."""

    pid: int = 0
    run: int = 0
    how: End = End.NOT_YET
    cause: str = ""


@dataclass
class SetStory(Span):
    """One weight set, from its claim or load to its end."""

    number: int = 0
    run: int = 0
    origin: str = ""
    """Path, code or process it comes from."""
    names: dict[str, str] = field(default_factory=dict)
    """Name → generation."""
    nbytes: int = 0
    sealed: float | None = None
    unwanted: float | None = None
    """When it was superseded or evicted while engines still leased it."""
    how: End = End.NOT_YET
    cause: str = ""
    leased: list[Span] = field(default_factory=list)
    """When any engine leased it."""
    holders: int = 0


@dataclass
class EngineStory(Span):
    """One process with a session."""

    session: int = 0
    run: int = 0
    pid: int = 0
    uid: int = 0
    command: str = ""
    label: str = ""
    how: End = End.NOT_YET
    cause: str = ""
    held: int = 0
    """Leases that its end took away."""
    leases: dict[int, list[Span]] = field(default_factory=dict)
    """By the set's number: when it was leased."""
    holding: dict[int, int] = field(default_factory=dict)


@dataclass
class MemoryPoint:
    """What a device's memory is used for, in bytes, from `time` on."""

    time: float
    leased: int
    idle: int
    reserved: int
    limit: int

    @property
    def used(self) -> int:
        return self.leased + self.idle + self.reserved


@dataclass
class Trouble:
    """Something a person on call wants to know of."""

    time: float
    what: str
    cause: str


@dataclass
class Story:
    """A broker's life from `begin` to `end`.

    A run is the life of one keeper: numbers of sets and sessions begin anew with each.
    """

    begin: float
    end: float
    name: str = ""
    devices: list[str] = field(default_factory=list)
    servers: list[ServerLife] = field(default_factory=list)
    sets: list[SetStory] = field(default_factory=list)
    engines: list[EngineStory] = field(default_factory=list)
    memory: dict[str, list[MemoryPoint]] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    evictions: list[float] = field(default_factory=list)

    def shorten(self, begin: float) -> None:
        """Forget what was over before `begin`."""
        self.begin = max(self.begin, begin)
        self.servers = [each for each in self.servers if each.reaches(self.begin)]
        self.sets = [each for each in self.sets if each.reaches(self.begin)]
        self.engines = [each for each in self.engines if each.reaches(self.begin)]
        self.troubles = [each for each in self.troubles if each.time >= self.begin]
        self.restarts = [when for when in self.restarts if when >= self.begin]
        self.evictions = [when for when in self.evictions if when >= self.begin]
