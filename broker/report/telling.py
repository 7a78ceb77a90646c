"""How each event of the journal changes the story."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker.amounts import counted
from broker.journal.reading import Entry
from broker.report.story import (
    End,
    EngineStory,
    MemoryPoint,
    ServerLife,
    SetStory,
    Span,
    Story,
    Trouble,
)


def tell(
    entries: Sequence[Entry], *, until: float | None = None, last: float | None = None
) -> Story:
    """The story that a journal tells.

    A journal that has lost its beginning tells of sets and engines it never saw begin: they begin
    with it.

    Args:
        entries: at least one, oldest first.
        until: when the story ends; None: with the last entry.
        last: only so many seconds of its end; None: all of it.
    """
    times = [entry.time for entry in entries]
    story = Story(min(times), max(*times, until or 0.0))
    teller = _Teller(story)
    for entry in entries:
        teller.take(entry)
    if last is not None:
        story.shorten(story.end - last)
    return story


class _Teller:
    def __init__(self, story: Story) -> None:
        self.story = story
        self._run = 0
        self._epoch: str | None = None
        self._server: ServerLife | None = None
        self._sets: dict[int, SetStory] = {}
        self._engines: dict[int, EngineStory] = {}
        self._loaders: set[int] = set()
        self._tellers: dict[str, Callable[[float, dict[str, Any]], None]] = {
            "serving": self._serving,
            "taken-over": self._taken_over,
            "stopped": self._stopped,
            "server-replaced": self._server_replaced,
            "server-died": self._server_died,
            "keeper-gone": self._keeper_gone,
            "crashed": self._mistake,
            "internal-error": self._mistake,
            "memory": self._memory,
            "session-opened": self._session_opened,
            "session-ended": self._session_ended,
            "loader-started": self._loader_started,
            "claim-granted": self._claim_granted,
            "claim-inherited": self._claim_inherited,
            "load-started": self._load_started,
            "same-content": self._same_content,
            "set-named": self._set_named,
            "set-sealed": self._set_sealed,
            "set-failed": self._set_failed,
            "set-superseded": self._set_unwanted,
            "set-evicted": self._set_evicted,
            "set-freed": self._set_freed,
            "lease-granted": self._lease_granted,
            "lease-ended": self._lease_ended,
            "preload-failed": self._preload_failed,
        }

    def take(self, entry: Entry) -> None:
        """Go on with one event; one that cannot be understood is left out."""
        teller = self._tellers.get(entry.event)
        if teller is not None:
            try:
                teller(entry.time, entry.facts)
            except (KeyError, TypeError, ValueError, OverflowError):
                return  # written by another version, or by hand

    def _trouble(self, when: float, what: str, cause: object = "") -> None:
        self.story.troubles.append(Trouble(when, what, str(cause or "")))

    # --- servers --------------------------------------------------------------------------

    def _serving(self, when: float, facts: dict[str, Any]) -> None:
        if facts["epoch"] != self._epoch:
            self._end_run(when)
            self._epoch = facts["epoch"]
        self._end_server(when, End.UNKNOWN)
        self.story.name = str(facts.get("name", ""))
        self.story.devices = str(facts.get("device", "")).split(",")
        self._server = ServerLife(when, pid=facts["pid"], run=self._run)
        self.story.servers.append(self._server)

    def _end_run(self, when: float) -> None:
        """A new keeper: nothing of what an earlier one held is left."""
        if self._epoch is not None:
            self._run += 1
        self._end_server(when, End.UNKNOWN)
        for record in list(self._sets.values()):
            self._end_set(record, when, End.UNKNOWN)
        for engine in list(self._engines.values()):
            self._end_engine(engine, when, End.UNKNOWN)
        self._loaders.clear()

    def _end_server(self, when: float, how: End, cause: str = "") -> None:
        if self._server is not None and self._server.end is None:
            self._server.end, self._server.how, self._server.cause = when, how, cause

    def _tells_of_the_last(self, how: End, when: float, cause: str = "") -> bool:
        """The keeper tells of a server's end; whether it is that of the last one that served."""
        life = self._server
        if life is None or life.how not in (End.NOT_YET, End.ORDERLY):
            return False  # one that never served: the keeper has told of the last one already
        # It may have said itself that it ended, but not why.
        life.end, life.how, life.cause = life.end or when, how, cause
        return True

    def _taken_over(self, when: float, _facts: dict[str, Any]) -> None:
        self.story.restarts.append(when)
        for record in [record for record in self._sets.values() if record.sealed is None]:
            self._end_set(record, when, End.FAILED, "the server ended before it was sealed")
        self._loaders.clear()

    def _stopped(self, when: float, _facts: dict[str, Any]) -> None:
        self._end_server(when, End.ORDERLY)

    def _server_replaced(self, when: float, _facts: dict[str, Any]) -> None:
        self._tells_of_the_last(End.REPLACED, when)

    def _server_died(self, when: float, facts: dict[str, Any]) -> None:
        cause = f"exit code {facts.get('exit')} after {facts.get('lived')} s"
        if self._tells_of_the_last(End.DIED, when, cause) and self._server is not None:
            self._trouble(when, f"server {self._server.pid} died", cause)
        else:
            self._trouble(when, "a server died before it served", cause)

    def _keeper_gone(self, when: float, _facts: dict[str, Any]) -> None:
        self._trouble(when, "the keeper died", "nobody can attach to what it held any more")

    def _mistake(self, when: float, facts: dict[str, Any]) -> None:
        what = f"a mistake of the broker's ({facts.get('operation', 'its server ended')})"
        self._trouble(when, what, facts.get("cause"))

    def _memory(self, when: float, facts: dict[str, Any]) -> None:
        names = ("leased", "idle", "reserved", "limit")
        point = MemoryPoint(when, *(int(facts[name]) for name in names))
        self.story.memory.setdefault(str(facts["device"]), []).append(point)

    # --- engines --------------------------------------------------------------------------

    def _loader_started(self, _when: float, facts: dict[str, Any]) -> None:
        self._loaders.add(facts["session"])

    def _session_opened(self, when: float, facts: dict[str, Any]) -> None:
        if facts["session"] not in self._loaders:
            self._engine(facts["session"], when, facts)

    def _engine(self, session: int, when: float, facts: dict[str, Any]) -> EngineStory:
        if session not in self._engines:
            engine = EngineStory(when, session=session, run=self._run)
            engine.pid, engine.uid = int(facts.get("pid", 0)), int(facts.get("uid", 0))
            engine.command = str(facts.get("command") or "")
            self._engines[session] = engine
            self.story.engines.append(engine)
        return self._engines[session]

    def _session_ended(self, when: float, facts: dict[str, Any]) -> None:
        session = facts["session"]
        if session in self._loaders:
            self._loaders.discard(session)
            return
        engine = self._engine(session, self.story.begin, facts)
        held = int(facts.get("leases", 0))
        how = End.DIED if facts.get("how") == "died" else End.ORDERLY
        engine.label = str(facts.get("label") or "")
        engine.held = held
        self._end_engine(engine, when, how, str(facts.get("cause", "")))
        if how is End.DIED:
            who = f"engine {engine.pid} ({engine.label or engine.command or 'unknown'})"
            self._trouble(when, f"{who} died, holding {counted(held, 'lease')}", facts.get("cause"))

    def _end_engine(self, engine: EngineStory, when: float, how: End, cause: str = "") -> None:
        for set_number in list(engine.holding):
            engine.holding[set_number] = 1
            self._give_back(engine, set_number, when)
        engine.end, engine.how, engine.cause = when, how, cause
        self._engines.pop(engine.session, None)
        was_seen_whole = engine.start > self.story.begin
        if how is End.ORDERLY and was_seen_whole and not engine.leases:
            self.story.engines.remove(engine)  # a command, mostly: it held nothing

    # --- leases ---------------------------------------------------------------------------

    def _lease_granted(self, when: float, facts: dict[str, Any]) -> None:
        engine = self._engine(facts["session"], self.story.begin, facts)
        record = self._resident(facts["set"])
        if not engine.holding.get(record.number):
            engine.leases.setdefault(record.number, []).append(Span(when))
        engine.holding[record.number] = engine.holding.get(record.number, 0) + 1
        if not record.holders:
            record.leased.append(Span(when))
            record.unwanted = None
        record.holders += 1

    def _lease_ended(self, when: float, facts: dict[str, Any]) -> None:
        record = self._resident(facts["set"])
        record.holders = max(0, record.holders - 1)
        if not record.holders and record.leased:
            record.leased[-1].end = when
        engine = self._engines.get(facts["session"])
        if engine is not None:
            self._give_back(engine, record.number, when)

    def _give_back(self, engine: EngineStory, set_number: int, when: float) -> None:
        left = engine.holding.get(set_number, 0) - 1
        if left > 0:
            engine.holding[set_number] = left
            return
        if engine.holding.pop(set_number, None) is not None:
            engine.leases[set_number][-1].end = when

    # --- weight sets ----------------------------------------------------------------------

    def _set(self, number: int, when: float) -> SetStory:
        if number not in self._sets:
            record = SetStory(when, number=int(number), run=self._run)
            self._sets[number] = record
            self.story.sets.append(record)
        return self._sets[number]

    def _resident(self, number: int) -> SetStory:
        """A set that is on the books by now; the journal may have lost how it came there."""
        is_known = number in self._sets
        record = self._set(number, self.story.begin)
        if not is_known:
            record.sealed = self.story.begin
        return record

    def _load_started(self, when: float, facts: dict[str, Any]) -> None:
        record = self._set(facts["set"], when)
        record.origin = str(facts.get("path") or facts.get("code") or "")

    def _claim_granted(self, when: float, facts: dict[str, Any]) -> None:
        record = self._set(facts["set"], when)
        record.origin = f"published by process {facts.get('pid', '?')}"

    def _claim_inherited(self, when: float, facts: dict[str, Any]) -> None:
        successor = self._set(facts["by"], when)
        successor.origin = f"published by process {facts.get('pid', '?')}"

    def _set_named(self, _when: float, facts: dict[str, Any]) -> None:
        name, label = str(facts["name"]), str(facts.get("generation", ""))
        self._resident(facts["set"]).names[name] = label

    def _set_sealed(self, when: float, facts: dict[str, Any]) -> None:
        record = self._set(facts["set"], when)
        record.sealed = when
        record.nbytes = int(facts.get("nbytes", 0))

    def _same_content(self, when: float, facts: dict[str, Any]) -> None:
        record = self._set(facts["set"], when)
        self._end_set(record, when, End.SHARED, f"the same as set {facts.get('resident')}")

    def _set_failed(self, when: float, facts: dict[str, Any]) -> None:
        record = self._set(facts["set"], when)
        cause = str(facts.get("cause", ""))
        self._end_set(record, when, End.FAILED, cause)
        self._trouble(when, f"set {record.number} was not completed", cause)

    def _set_evicted(self, when: float, facts: dict[str, Any]) -> None:
        self.story.evictions.append(when)
        self._set_unwanted(when, facts)

    def _set_unwanted(self, when: float, facts: dict[str, Any]) -> None:
        record = self._resident(facts["set"])
        by = facts.get("by")
        cause = f"superseded by set {by}" if by is not None else f"evicted: {facts.get('cause')}"
        if record.sealed is None:
            return  # it was in progress: its failure follows
        if record.holders:
            record.unwanted, record.cause = when, cause
        else:
            self._end_set(record, when, End.FREED, cause)

    def _set_freed(self, when: float, facts: dict[str, Any]) -> None:
        record = self._resident(facts["set"])
        self._end_set(record, when, End.FREED, record.cause)

    def _end_set(self, record: SetStory, when: float, how: End, cause: str = "") -> None:
        if record.holders and record.leased:
            record.leased[-1].end = when
        record.holders = 0
        record.end, record.how, record.cause = when, how, cause
        self._sets.pop(record.number, None)

    def _preload_failed(self, when: float, facts: dict[str, Any]) -> None:
        self._trouble(when, f"{facts.get('path')} was not preloaded", facts.get("cause"))
