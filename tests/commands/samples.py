"""States of a broker as `status` tells them, made up: an idle one, and a busy node."""

from __future__ import annotations

from typing import Any

NOW = 1_800_000_000.0
GPUS = ("GPU-3f2a61c0-93d5-4a1e", "GPU-b81d0c77-1a2b-4c3d")
GIB = 1 << 30


def idle() -> dict[str, Any]:
    """A broker that has just started, on the simulated device."""
    return {
        "broker": {
            "name": "default",
            "version": "0.1.0",
            "pid": 4123,
            "keeper_pid": 4120,
            "restarts": 0,
            "epoch": "0123456789abcdef",
            "protocol": 1,
            "platform": "simulated",
            "simulated": True,
            "now": NOW,
            "started": NOW - 5,
            "server_started": NOW - 5,
            "slowest_turn_ms": 0.5,
            "requests_waiting": 0,
            "connections": 1,
            "loads_queued": 0,
            "troubles": [],
            "preloads": [],
            "left_off": {"preloads": 0, "sets": 0, "sessions": 0},
        },
        "devices": {"SIM-0": device("simulated device (host memory)", 8 * GIB, 4 * GIB)},
        "sets": [],
        "sessions": [],
        "counters": {"requests": 2, "server_restarts": 0},
    }


def busy() -> dict[str, Any]:
    """Two GPUs; a generation that does not go, a load that is stuck, engines that wait, a death."""
    report = idle()
    report["broker"] |= {
        "name": "node",
        "platform": "cuda",
        "simulated": False,
        "started": NOW - 100_000,
        "server_started": NOW - 900,
        "restarts": 2,
        "loads_queued": 1,
        "preloads": [
            {
                "path": "/models/missing",
                "device": GPUS[1],
                "state": "failed",
                "set": None,
                "cause": "/models/missing/model.safetensors is truncated",
            }
        ],
        "troubles": [
            {
                "time": NOW - 60,
                "event": "session-ended",
                "session": 9,
                "pid": 77,
                "how": "died",
                "label": "vllm-d",
                "leases": 1,
                "cause": "the engine is gone: its process has ended",
            }
        ],
    }
    report["devices"] = {
        GPUS[0]: device("NVIDIA H200", 139 * GIB, 120 * GIB, leased=96 * GIB, idle=16 * GIB),
        GPUS[1]: device("NVIDIA H200", 139 * GIB, 120 * GIB, reserved=60 * GIB, leased=1),
    }
    report["sets"] = [
        resident(2, {"prod": "1"}, leases=[(5, "a", NOW - 7200)], state="draining", newest=[]),
        resident(3, {"prod": "2"}, leases=[(6, "b", NOW - 3600), (7, "c", None)], pinned=True),
        resident(4, {}, path="/models/" + "long-" * 20 + "name", sealed=None, used=None),
        writing(8, stage="reading", done=48 * GIB, total=60 * GIB, rate=2.5e9, left=5.2),
        writing(9, stage="", done=0, total=0, rate=None, left=None, quiet=45.0, waiting=2),
    ]
    report["sessions"] = [
        session(5, 1201, "python3", "vllm-a", leases=1, requests=120),
        session(6, 1202, "python3", "vllm-b", leases=1, requests=12_000),
        session(7, 1203, "python3", "vllm-c", leases=1, lag=12.5),
        session(10, 1310, "python3", "trainer", waiting=2, wait=45.0),
        session(11, 1400, "loader", "", loader=True),
        session(12, 1401, "loader", "", loader=True),
    ]
    report["counters"] = {"loads_failed": 1, "loads_started": 7, "leases_reclaimed": 1}
    return report


def device(name: str, total: int, limit: int, **used: int) -> dict[str, Any]:
    use = {"reserved": 0, "leased": 0, "idle": 0, **used}
    return {**use, "free": limit - sum(use.values()), "limit": limit, "name": name, "total": total}


def resident(
    number: int,
    names: dict[str, str],
    *,
    leases: list[tuple[int, str, float | None]] | None = None,
    state: str = "sealed",
    path: str | None = "/models/prod",
    pinned: bool = False,
    newest: list[str] | None = None,
    sealed: float | None = NOW - 8000,
    used: float | None = NOW - 12,
) -> dict[str, Any]:
    return {
        "id": number,
        "state": state,
        "names": names,
        "names_left_off": 0,
        "newest": list(names) if newest is None else newest,
        "key": key("blake3:1f3a", "bfloat16"),
        "path": path,
        "nbytes": 16 * GIB,
        "tensors": 291,
        "leases": [
            {"session": session, "lease": lease, "since": since}
            for session, lease, since in leases or []
        ],
        "leases_left_off": 0,
        "waiting": 0,
        "writer": None,
        "pinned": pinned,
        "superseded": state == "draining",
        "begun": None,
        "sealed": sealed,
        "used": used,
        "progress": None,
    }


def writing(
    number: int,
    *,
    stage: str,
    done: int,
    total: int,
    rate: float | None,
    left: float | None,
    quiet: float = 0.2,
    waiting: int = 1,
) -> dict[str, Any]:
    return {
        **resident(number, {}, state="writing", path=f"/models/{number}", sealed=None, used=None),
        "key": key("", ""),
        "nbytes": total,
        "tensors": 0,
        "waiting": waiting,
        "writer": number + 3,
        "begun": NOW - 60,
        "progress": {
            "stage": stage,
            "done": done,
            "total": total,
            "rate": rate,
            "seconds_left": left,
            "quiet_seconds": quiet,
        },
    }


def key(checkpoint: str, dtype: str) -> dict[str, Any]:
    return {
        "device": GPUS[0],
        "name": "",
        "checkpoint": checkpoint,
        "dtype": dtype,
        "layout": {},
        "format": "hf",
        "quantization": "",
    }


def session(
    number: int,
    pid: int,
    command: str,
    label: str,
    *,
    loader: bool = False,
    leases: int = 0,
    waiting: int = 0,
    wait: float | None = None,
    requests: int = 3,
    lag: float = 0.0,
) -> dict[str, Any]:
    return {
        "id": number,
        "pid": pid,
        "uid": 1000,
        "command": command,
        "label": label,
        "loader": loader,
        "since": NOW - 4000,
        "leases": leases,
        "waiting": waiting,
        "waiting_seconds": wait,
        "requests": requests,
        "lag_seconds": lag,
    }
