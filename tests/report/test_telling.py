"""What becomes of servers, sets and engines, told from events."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.journal.reading import Entry
from broker.report.page import render
from broker.report.story import End, Span, Story
from broker.report.telling import tell


class Writer:
    """Writes a journal, one event a second."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __call__(self, event: str, **facts: Any) -> float:
        when = 1000.0 + len(self.entries)
        self.entries.append(Entry(when, event, facts))
        return when

    def story(self, **options: Any) -> Story:
        return tell(self.entries, **options)


def begun(epoch: str = "e1", pid: int = 10) -> Writer:
    """A journal with a server in it."""
    write = Writer()
    write("serving", name="default", device="SIM-0", pid=pid, epoch=epoch)
    return write


def with_engine(write: Writer, session: int = 1, pid: int = 77) -> None:
    write("session-opened", session=session, pid=pid, uid=0, command="vllm")


def with_set(write: Writer, number: int = 1, session: int = 90) -> None:
    write("load-started", set=number, session=session, path="/m")
    write("set-sealed", set=number, checkpoint="c", nbytes=512)


# --- weight sets and engines --------------------------------------------------------------------


def test_a_load_and_a_lease() -> None:
    """From load to lease to free: each moment is where the journal has it."""
    write = begun()
    with_engine(write)
    with_set(write)
    granted = write("lease-granted", session=1, set=1, how="loaded")
    write("set-named", set=1, name="m", generation="4")
    ended = write("lease-ended", set=1, session=1)
    freed = write("set-freed", set=1, nbytes=512)
    story = write.story()
    (record,) = story.sets
    assert (record.start, record.sealed, record.end) == (1002.0, 1003.0, freed)
    assert (record.names, record.origin, record.nbytes) == ({"m": "4"}, "/m", 512)
    assert (record.how, record.leased) == (End.FREED, [Span(granted, ended)])
    (engine,) = story.engines
    assert engine.leases == {1: [Span(granted, ended)]}
    assert (engine.pid, engine.command, engine.end, engine.how) == (77, "vllm", None, End.NOT_YET)


def test_two_leases_on_one_set() -> None:
    """A set is leased until the last lease has ended, and so is an engine's own share of it."""
    write = begun()
    with_engine(write)
    with_set(write)
    first = write("lease-granted", session=1, set=1, how="loaded")
    write("lease-granted", session=1, set=1, how="resident")
    write("lease-ended", set=1, session=1)
    last = write("lease-ended", set=1, session=1)
    story = write.story()
    assert story.sets[0].leased == [Span(first, last)]
    assert story.engines[0].leases == {1: [Span(first, last)]}


def test_a_load_that_fails() -> None:
    """It is a trouble with its cause, and the set has ended."""
    write = begun()
    write("load-started", set=1, session=2, path="/m")
    failed = write("set-failed", set=1, cause="cut short")
    story = write.story()
    assert (story.sets[0].how, story.sets[0].end, story.sets[0].sealed) == (
        End.FAILED,
        failed,
        None,
    )
    (trouble,) = story.troubles
    assert (trouble.time, trouble.cause) == (failed, "cut short")


def test_death_and_farewell() -> None:
    """An engine that died is a trouble, one that closed its session is none; its leases end too."""
    write = begun()
    with_set(write)
    for session in (1, 2):
        with_engine(write, session, 70 + session)
        write("lease-granted", session=session, set=1, how="resident")
    write("lease-ended", set=1, session=1)
    write("session-ended", session=1, how="closed", cause="closed", leases=0)
    write("lease-ended", set=1, session=2)
    died = write("session-ended", session=2, how="died", cause="gone", leases=1)
    story = write.story()
    assert [engine.how for engine in story.engines] == [End.ORDERLY, End.DIED]
    assert all(span.end for engine in story.engines for span in engine.leases[1])
    (trouble,) = story.troubles
    assert (trouble.time, trouble.what) == (died, "engine 72 (vllm) died, holding 1 lease")


def test_commands_are_no_engines() -> None:
    """A session that ended in order and never held a lease is none that anybody looks for."""
    write = begun()
    with_engine(write, 1, 71)
    with_engine(write, 2, 72)
    write("session-ended", session=1, how="closed", cause="closed", leases=0)
    write("session-ended", session=2, how="died", cause="gone", leases=0)
    (engine,) = write.story().engines
    assert (engine.pid, engine.how) == (72, End.DIED)


def test_loaders_are_no_engines() -> None:
    """A loader's session is told by its set's bar alone."""
    write = begun()
    write("load-started", set=1, session=2, path="/m")
    write("loader-started", session=2, set=1, pid=5)
    write("session-opened", session=2, pid=5, uid=0, command="loader")
    write("session-ended", session=2, how="died", cause="killed", leases=0)
    story = write.story()
    assert (story.engines, story.troubles) == ([], [])


def test_superseded_while_leased() -> None:
    """An old generation is unwanted from then on, and freed with its last lease."""
    write = begun()
    with_engine(write)
    with_set(write)
    write("lease-granted", session=1, set=1, how="loaded")
    with_set(write, 2)
    superseded = write("set-superseded", set=1, by=2, name="m")
    write("lease-ended", set=1, session=1)
    freed = write("set-freed", set=1, nbytes=512)
    old, new = write.story().sets
    assert (old.unwanted, old.end, old.cause) == (superseded, freed, "superseded by set 2")
    assert (new.unwanted, new.end) == (None, None)


def test_superseded_and_wanted_again() -> None:
    """A set that drains and is leased anew is resident like any other."""
    write = begun()
    with_engine(write)
    with_set(write)
    write("lease-granted", session=1, set=1, how="loaded")
    write("lease-ended", set=1, session=1)
    write("lease-granted", session=1, set=1, how="resident")
    assert write.story().sets[0].unwanted is None


def test_evicted() -> None:
    """A set that nobody leases ends at once, also one whose load is under way."""
    write = begun()
    with_set(write)
    evicted = write("set-evicted", set=1, cause="memory is needed", nbytes=512)
    write("load-started", set=2, session=4, path="/n")
    write("set-evicted", set=2, cause="evict", leases=0)
    failed = write("set-failed", set=2, cause="evicted while it was being written")
    story = write.story()
    assert [record.end for record in story.sets] == [evicted, failed]
    assert [record.how for record in story.sets] == [End.FREED, End.FAILED]
    assert len(story.evictions) == 2


def test_a_claim_that_is_inherited() -> None:
    """The set of the writer that was lost ends, its heir's begins: two sets and no third."""
    write = begun()
    write("claim-granted", set=1, session=1, pid=7, name="m")
    write("set-failed", set=1, cause="gone")
    inherited = write("claim-inherited", set=1, by=2, session=3, pid=8)
    first, second = write.story().sets
    assert (first.how, second.start, second.origin) == (
        End.FAILED,
        inherited,
        "published by process 8",
    )


# --- servers ------------------------------------------------------------------------------------


def test_a_server_that_dies() -> None:
    """Sets and engines stay; what was being loaded ends; the next server is another bar."""
    write = begun(pid=10)
    with_engine(write)
    with_set(write)
    write("load-started", set=2, session=9, path="/n")
    died = write("server-died", exit=-9, lived=4.5)
    over = write("taken-over", restarts=1)
    write("serving", name="default", device="SIM-0", pid=11, epoch="e1")
    story = write.story()
    assert [(life.pid, life.how, life.end) for life in story.servers] == [
        (10, End.DIED, died),
        (11, End.NOT_YET, None),
    ]
    assert [record.end for record in story.sets] == [None, over]
    assert (story.engines[0].end, story.restarts) == (None, [over])
    assert story.troubles[0].what == "server 10 died"


def test_a_server_that_crashes() -> None:
    """It closes everything in order before it ends; that it died is what counts. One that dies
    before it serves is another one's death."""
    write = begun(pid=10)
    stopped = write("stopped")
    write("crashed", cause="KeyError(7)")
    write("server-died", exit=1, lived=4.5)
    write("server-died", exit=1, lived=0.1)
    story = write.story()
    assert (story.servers[0].how, story.servers[0].end) == (End.DIED, stopped)
    assert [(trouble.what, trouble.cause) for trouble in story.troubles] == [
        ("a mistake of the broker's (its server ended)", "KeyError(7)"),
        ("server 10 died", "exit code 1 after 4.5 s"),
        ("a server died before it served", "exit code 1 after 0.1 s"),
    ]


def test_an_upgrade() -> None:
    """A server that hands over is replaced, which is no trouble."""
    write = begun()
    write("handing-over")
    stopped = write("stopped")
    write("server-replaced")
    story = write.story()
    assert (story.servers[0].how, story.servers[0].end) == (End.REPLACED, stopped)
    assert story.troubles == []


def test_another_broker() -> None:
    """A new keeper begins anew with all numbers: what was open has ended, and how is not known."""
    write = begun("e1")
    with_engine(write)
    with_set(write)
    write("lease-granted", session=1, set=1, how="loaded")
    again = write("serving", name="default", device="SIM-0", pid=20, epoch="e2")
    with_set(write)
    story = write.story()
    assert [(record.run, record.end) for record in story.sets] == [(0, again), (1, None)]
    assert (story.engines[0].end, story.engines[0].how) == (again, End.UNKNOWN)
    assert story.engines[0].leases[1][0].end == again
    assert story.servers[0].end == again


def test_memory() -> None:
    """Each device has its points in order."""
    write = begun()
    write("memory", device="SIM-0", reserved=1, leased=2, idle=4, free=93, limit=100)
    write("memory", device="SIM-1", reserved=0, leased=0, idle=0, free=9, limit=9)
    memory = write.story().memory
    assert {device: [point.used for point in points] for device, points in memory.items()} == {
        "SIM-0": [7],
        "SIM-1": [0],
    }


# --- what is missing ----------------------------------------------------------------------------


def test_a_journal_without_its_beginning() -> None:
    """What was there already begins with the journal."""
    write = Writer()
    write("lease-ended", set=7, session=3, pid=5)
    ended = write("session-ended", session=4, how="closed", pid=6, leases=0)
    freed = write("set-freed", set=7, nbytes=1)
    story = write.story()
    assert (story.sets[0].start, story.sets[0].sealed, story.sets[0].end) == (1000.0, 1000.0, freed)
    assert (story.engines[0].start, story.engines[0].end) == (1000.0, ended)


def test_only_the_end() -> None:
    """What was over before is left out, what was still there is not."""
    write = begun()
    with_set(write, 1)
    write("set-failed", set=1, cause="x")
    with_set(write, 2)
    story = write.story(until=1105.0, last=100.0)
    assert (story.begin, story.end) == (1005.0, 1105.0)
    assert ([record.number for record in story.sets], story.troubles) == ([2], [])


NUMBERS = st.integers(-1, 4) | st.floats() | st.booleans()
KEYS = [
    *("set", "session", "by", "pid", "uid", "leases", "nbytes", "device", "epoch", "cause", "exit"),
    *("path", "name", "generation", "how", "leased", "idle", "reserved", "limit", "command"),
]
FACTS = st.dictionaries(
    st.sampled_from(KEYS),
    NUMBERS | st.text(max_size=5) | st.none() | st.lists(NUMBERS, max_size=2),
)
EVENTS = [
    *("serving", "taken-over", "stopped", "server-replaced", "server-died", "memory"),
    *("session-opened", "session-ended", "loader-started", "claim-granted", "claim-inherited"),
    *("load-started", "same-content", "set-named", "set-sealed", "set-failed", "set-superseded"),
    *("set-evicted", "set-freed", "lease-granted", "lease-ended", "preload-failed", "other"),
]


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(Entry, st.floats(0, 4e9), st.sampled_from(EVENTS), FACTS), min_size=1, max_size=12
    )
)
def test_any_journal_has_a_page(entries: list[Entry]) -> None:
    """Whatever somebody has put into the file, there is a page."""
    page = render(tell(entries), entries, made=0.0, is_running=False)
    assert page.rstrip().endswith("</html>")
