"""A status always fits into one reply, shows first what matters, and counts what it leaves off."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker import dispatch, reporting, wire
from broker.custody.records import WeightSet, line_of
from broker.custody.states import State
from broker.dispatch import Dispatcher
from broker.preloading import Preload
from broker.reporting import SHOWN_LEASES, SHOWN_NAMES, Room, status_report
from broker.sessions import PeerIdentity
from broker.times import Times
from broker.weights import WeightKey
from tests.custody.desk import DEVICE, OTHER_DEVICE, Desk
from tests.support.status_schema import check_status

CROWD = 2500
STAMP = wire.FileStamp("model.safetensors", 1, 2, 3, 4, 5, "digest")


class CrowdedBroker(SimpleNamespace):
    """What a status is made of, with as many sets and sessions as a test wants."""

    def __init__(self) -> None:
        desk = Desk()
        properties = SimpleNamespace(name="simulated", total_bytes=1 << 30)
        super().__init__(
            desk=desk,
            books=desk.books,
            config=SimpleNamespace(name="default"),
            restarts=0,
            epoch="epoch",
            platform="simulated",
            first_started=time.time(),
            started=time.time(),
            loop=SimpleNamespace(slowest_turn=0.001),
            connections=[],
            loading=SimpleNamespace(queued=0),
            troubles=SimpleNamespace(latest=list),
            devices={
                name: SimpleNamespace(properties=properties) for name in (DEVICE, OTHER_DEVICE)
            },
            preloads=[],
            times=Times(desk.books.sets),
            peers={},
            conversation=SimpleNamespace(connections=[], counters={}),
            tickets=cast(Any, Waits()),
            dispatcher=SimpleNamespace(lag=lambda _session: 0.0),
        )

    def connect(self, label: str = "") -> int:
        session: int = self.desk.engine()
        identity = PeerIdentity(4_000_000 + session, 1000, "python3", None)
        self.peers[session] = SimpleNamespace(identity=identity, label=label, since=time.time())
        return session

    def hold(self, name: str, **changes: Any) -> WeightSet:
        """A set that is simply there: a thousand loads would take their time."""
        number = 1000 + len(self.books.sets)
        key = WeightKey(DEVICE, name, f"blake3:{number:064}", "bfloat16", {}, "hf", "")
        record = WeightSet(number, key, state=State.SEALED, nbytes=1 << 30, **changes)
        record.generations[line_of(key, name)] = "1"
        self.books.sets[number] = record
        return record

    def report(self) -> dict[str, Any]:
        """As it travels: within the limit, and as documented."""
        encoded = wire.encode(status_report(cast(Any, self)))
        assert len(encoded) <= wire.MAX_FRAME_BYTES
        plain = wire.as_plain(wire.decode_reply(wire.StatusReport, encoded))
        check_status(plain)
        return plain


class Waits:
    """Requests under way: of one session, one that waits."""

    def __init__(self) -> None:
        self.waiting: dict[int, float] = {}

    def __len__(self) -> int:
        return 1

    def waits(self) -> dict[int, float]:
        return self.waiting

    def asked(self, _session: int) -> int:
        return 12


@pytest.fixture
def broker() -> CrowdedBroker:
    return CrowdedBroker()


def test_a_thousand_sessions_and_many_sets(broker: CrowdedBroker) -> None:
    """A thousand engines and a hundred sets are all shown."""
    for number in range(1000):
        session = broker.connect(f"engine-{number}")
        broker.books.sessions[session].leases["w"] = 1
    for number in range(100):
        broker.hold(f"model-{number}")
    report = broker.report()
    assert (len(report["sessions"]), len(report["sets"])) == (1000, 100)
    assert report["broker"]["left_off"] == {"preloads": 0, "sets": 0, "sessions": 0}


def test_what_does_not_fit_is_counted(broker: CrowdedBroker) -> None:
    """Some thousand of each: what is shown and what is left off are all there are."""
    for number in range(CROWD):
        broker.connect("engine " + "x" * 200)
        broker.hold(f"{number}" + "n" * 200)
    report = broker.report()
    left = report["broker"]["left_off"]
    for what in ("sets", "sessions"):
        assert left[what] > 0
        assert len(report[what]) > 100
        assert len(report[what]) + left[what] == CROWD
        assert [e["id"] for e in report[what]] == sorted(e["id"] for e in report[what])


def test_what_matters_is_shown(broker: CrowdedBroker) -> None:
    """A set in progress, one that is leased, and a session that waits or holds are not left off."""
    engine, waiting = broker.connect("holds"), broker.connect("waits")
    loader = broker.desk.start(wire.Source("/m", None, [STAMP], "shape"), engine, name="loading")
    leased = broker.hold("leased", leases={(engine, "w")})
    broker.books.sessions[engine].leases["w"] = leased.id
    broker.books.sessions[waiting].waiting["x"] = 1
    for number in range(CROWD):
        broker.connect("x" * 200)
        broker.hold(f"{number}" + "n" * 200)
    report = broker.report()
    assert {leased.id, loader.set} <= {entry["id"] for entry in report["sets"]}
    assert {engine, waiting} <= {entry["id"] for entry in report["sessions"]}


def test_a_set_that_says_too_much(broker: CrowdedBroker) -> None:
    """Of a set's leases and names so many are shown, and its path is cut."""
    leases = {(number, "lease") for number in range(5000)}
    source = wire.Source("/" + "p" * 16_000, None, [STAMP], "shape")
    record = broker.hold("m", leases=leases, source=source)
    for number in range(256):
        record.generations[line_of(record.key, f"{number}" + "n" * 250)] = "1"
    (entry,) = broker.report()["sets"]
    assert len(entry["leases"]) + entry["leases_left_off"] == 5000
    assert (len(entry["leases"]), len(entry["names"])) == (SHOWN_LEASES, SHOWN_NAMES)
    assert entry["names_left_off"] == 257 - SHOWN_NAMES
    assert len(entry["path"]) < 600


def test_preloads(broker: CrowdedBroker) -> None:
    """What became of each checkpoint of --preload; very many of them are counted."""
    broker.preloads = [
        Preload("/models/a", DEVICE, "resident", 3),
        Preload("/models/b", DEVICE, "failed", None, "it is truncated"),
        *(Preload("/models/" + "x" * 4000, DEVICE) for _ in range(1000)),
    ]
    shown = broker.report()["broker"]
    assert [entry["state"] for entry in shown["preloads"][:3]] == ["resident", "failed", "loading"]
    assert shown["preloads"][1]["cause"] == "it is truncated"
    assert len(shown["preloads"]) + shown["left_off"]["preloads"] == 1002


def test_progress(broker: CrowdedBroker) -> None:
    """A load's progress has its pace once two reports have come; a resident set has none."""
    loader = broker.desk.start(wire.Source("/m", None, [STAMP], "shape"))
    broker.times.note("load-started", {"set": loader.set})
    (entry,) = broker.report()["sets"]
    assert (entry["progress"]["stage"], entry["progress"]["rate"]) == ("", None)
    broker.desk.reserve(loader.session, 300)
    broker.desk.created(loader.set)
    for done in (10, 40):
        broker.desk.report(loader.session, done)
        broker.times.progressed(loader.set, "copying", done)
    (entry,) = broker.report()["sets"]
    progress = entry["progress"]
    assert (progress["stage"], progress["done"], progress["total"]) == ("copying", 40, 100)
    assert progress["rate"] > 0
    assert progress["seconds_left"] == pytest.approx(60 / progress["rate"])


def test_who_waits(broker: CrowdedBroker) -> None:
    """A session that waits has its oldest request's age, and all it has ever asked."""
    session = broker.connect("waits")
    broker.books.sessions[session].waiting["x"] = 1
    broker.tickets.waiting[session] = 3.5
    (entry,) = broker.report()["sessions"]
    assert (entry["waiting"], entry["waiting_seconds"], entry["requests"]) == (1, 3.5, 12)


def test_a_load_that_is_over_has_no_time_left(broker: CrowdedBroker) -> None:
    """Nothing is left of what is done, also when a writer says more than there is."""
    loader = broker.desk.start(wire.Source("/m", None, [STAMP], "shape"))
    broker.times.note("load-started", {"set": loader.set})
    for done in (10, 400):
        broker.desk.report(loader.session, done)
        broker.times.progressed(loader.set, "copying", done)
    (entry,) = broker.report()["sets"]
    assert entry["progress"]["seconds_left"] is None


def test_room() -> None:
    """An entry that is too large does not keep out smaller ones behind it, up to a point."""
    room = Room(1000)
    small, large = {"x": "small"}, {"x": "l" * 2000}
    assert room.fill([large, small, large, small], 500) == [small, small]
    endless = iter([large] * 100 + [small])
    assert Room(1000).fill(endless, 500) == []
    assert next(endless) == large
    assert reporting.MISFITS < 100


def test_one_for_all_who_ask_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once as long as nothing else is handled, and anew in the next turn."""
    made = iter(range(10))
    monkeypatch.setattr(
        dispatch, "status_report", lambda _broker: wire.Event("status", {"made": next(made)})
    )
    broker: Any = SimpleNamespace(loop=SimpleNamespace(turn_began=1.0))
    dispatcher = Dispatcher(broker)
    first = dispatcher._status()
    assert dispatcher._status() is first
    broker.loop.turn_began = 2.0
    assert dispatcher._status().payload != first.payload
