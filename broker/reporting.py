"""What `status` says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from broker import wire
from broker.custody.audit import snapshot

if TYPE_CHECKING:
    from broker.server import Server


def status_report(broker: Server) -> wire.StatusReport:
    """Everything on the books at this moment, and the counters of docs/reliability.md."""
    books = snapshot(broker.books)
    facts = {
        "name": broker.config.name,
        "pid": os.getpid(),
        "keeper_pid": os.getppid(),
        "restarts": broker.restarts,
        "epoch": broker.epoch,
        "protocol": wire.PROTOCOL,
        "platform": broker.platform,
        "simulated": broker.platform == "simulated",
        "started": broker.started,
        "slowest_turn_ms": round(broker.loop.slowest_turn * 1000, 3),
        "requests_waiting": len(broker.tickets) - 1,
        "connections": len(broker.conversation.connections),
        "loads_queued": broker.loading.queued,
    }
    return wire.StatusReport(
        broker=facts,
        devices=books["devices"],
        sets=books["sets"],
        sessions=_sessions(broker),
        counters={**books["counters"], **broker.conversation.counters},
    )


def _sessions(broker: Server) -> list[dict[str, Any]]:
    records = broker.books.sessions
    return [
        {
            "id": session,
            "pid": peer.identity.pid,
            "uid": peer.identity.uid,
            "command": peer.identity.command,
            "label": peer.label,
            "loader": records[session].is_loader,
            "leases": len(records[session].leases),
            "waiting": len(records[session].waiting),
        }
        for session, peer in broker.peers.items()
    ]
