"""What a process of another user says and hears: for tests that run as root.

`python -m tests.support.other_user UID GID GROUPS COMMAND DIRECTORY …` imports everything, becomes
that user for good, does the command, and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker import wire
from broker.errors import BrokerError
from broker.packets import receive_packet
from broker.weights import Manifest, TensorGroup, WeightKey
from tests.support.streams import connect_raw, frame

if TYPE_CHECKING:
    from engine_client import EngineClient

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]


def as_user(
    command: str, directory: Path, *arguments: str, uid: int = NOBODY, groups: Sequence[int] = ()
) -> dict[str, Any]:
    """Do a command as another user; `{"ok": …}` or `{"error": class, "sentence": …}`."""
    listed = ",".join(map(str, groups))
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "tests.support.other_user"),
            *(str(uid), str(NOBODY), listed, command, str(directory), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def raw_session(directory: Path) -> str:
    """The first packet on the session socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(directory / "default.session"))
        packet, _descriptors, _cut = receive_packet(connection, wire.MAX_SESSION_PACKET_BYTES)
        message = wire.decode_to_engine(packet)
        said = message.payload if isinstance(message, wire.Refused) else "welcome"
        return f"{type(message).__name__}: {said}"


def raw_ping(directory: Path) -> str:
    """Whether a ping by hand is answered, or its connection ended."""
    try:
        with connect_raw(directory) as connection:
            connection.sendall(frame(b"ping", more=True) + frame(b"", more=False))
            said = b""
            while b"loop_age_ms" not in said:
                received = connection.recv(4096)
                if not received:
                    return "ended"
                said += received
            return "answered"
    except (ConnectionResetError, BrokenPipeError):
        return "ended"


def use(directory: Path, checkpoint: str) -> dict[str, str]:
    """What an engine of this user can do, operation by operation."""
    from engine_client import Checkpoint, EngineClient

    with EngineClient("simulated", directory=directory) as client:
        tries: dict[str, Callable[[], object]] = {
            "acquire": lambda: client.acquire(Checkpoint(checkpoint), timeout=20).release(),
            "acquire by name": lambda: client.acquire("m", timeout=20).release(),
            "publish": lambda: publish(client),
            "load": lambda: client.get_or_load("code", dict, timeout=20),
            "status": client.status,
            "shutdown": lambda: client.shutdown(force=True),
            "upgrade": client.upgrade,
        }
        said = {}
        for name, attempt in tries.items():
            try:
                attempt()
                said[name] = "done"
            except BrokerError as error:
                said[name] = f"{type(error).__name__}: {error.sentence}"
        return said


def publish(client: EngineClient) -> None:
    """A tiny set, without torch."""
    from engine_client.claim import HeldClaim
    from engine_client.deadline import Deadline

    session = client._session
    key = WeightKey(device="SIM-0", name="published by another user")
    session.ask("claim", wire.Claim("p", key))
    claim = HeldClaim(session, "p")
    described = Manifest(4, [TensorGroup("float32", [1], [1], "tensor", ["t"], [0])])
    with claim.reserve(described, "float32") as (slab, _nbytes):
        os.pwrite(slab, b"four", 0)
    claim.seal(keep=True, deadline=Deadline(10))


def main(arguments: list[str]) -> None:
    uid, gid, groups, command, directory, *rest = arguments
    if command == "use":
        import engine_client.claim
        import engine_client.client  # noqa: F401 - the other user may not be able to read them
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setgid(int(gid))
    os.setuid(int(uid))
    commands: dict[str, Callable[..., object]] = {
        "raw_session": raw_session,
        "raw_ping": raw_ping,
        "use": use,
    }
    try:
        answer: dict[str, Any] = {"ok": commands[command](Path(directory), *rest)}
    except (BrokerError, OSError) as error:
        sentence = error.sentence if isinstance(error, BrokerError) else str(error)
        answer = {"error": type(error).__name__, "sentence": sentence}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
