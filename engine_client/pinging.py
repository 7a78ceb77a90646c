"""Asking whether a broker answers, without a session: nothing of it is on its books or in its log.

For probes, which ask every few seconds for as long as the broker lives.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import zmq

from broker import wire
from broker.credentials import trusted_group
from broker.errors import InternalError, RequestTimeout, from_payload
from broker.rundir import broker_not_found, find_brokers
from engine_client.arguments import broker_of, directory_of
from engine_client.deadline import Deadline
from engine_client.room import PING_DESCRIPTORS, check_room

ANSWER_SECONDS = 5.0


def ping_broker(
    name: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = ANSWER_SECONDS,
) -> wire.Pong:
    """Ask a broker whether its loop turns. Blocks up to `timeout` seconds.

    Args:
        name, directory: as `broker` and `directory` of `EngineClient`.

    Raises:
        BrokerNotFound: nobody listens; the sentence lists every path tried.
        RequestTimeout: somebody listens and does not answer.
        BadRequest: a directory is not private, or the name is not one.
        UsageError: this process may not open enough files (RLIMIT_NOFILE), or an argument is of a
            type that cannot be used.
    """
    tried = []
    check_room(PING_DESCRIPTORS, "a ping")
    broker, where = broker_of(name), directory_of(directory)
    for paths in find_brokers(broker, where, group=trusted_group()):
        if _is_listened_to(paths.zmq):
            return _ping(paths.zmq, timeout)
        tried.append((paths.zmq, "nobody listens there any more"))
    raise broker_not_found(broker, tried, where)


def _is_listened_to(path: Path) -> bool:
    """ZeroMQ would wait for ever at a path where nobody listens; a plain socket is told at once."""
    with socket.socket(socket.AF_UNIX) as plain:
        try:
            plain.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _ping(path: Path, timeout: float) -> wire.Pong:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"ipc://{path}")
        dealer.send_multipart([b"ping", b""])
        left = Deadline(timeout).remaining()
        if not dealer.poll(None if left is None else int(left * 1000)):
            raise RequestTimeout(
                f"the broker at {path} did not answer within {timeout:g} s; its keeper replaces a "
                "server that has died, and its log says what happened",
                stage="ping",
                seconds=timeout,
            )
        return _pong(dealer.recv_multipart())


def _pong(frames: list[bytes]) -> wire.Pong:
    if len(frames) != 2:
        raise InternalError(f"the broker answered ping with {len(frames)} frames")
    status, payload = frames
    if status != wire.OK.encode():
        raise from_payload(status.decode("ascii", "replace"), payload)
    pong: wire.Pong = wire.decode_reply(wire.Pong, payload)
    return pong
