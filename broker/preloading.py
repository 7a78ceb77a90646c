"""Checkpoints that the broker loads before any engine has asked for them, and keeps."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.errors import BrokerError, InternalError
from broker.logs import log_event

if TYPE_CHECKING:
    from broker.server import Server


@dataclass
class Preload:
    """What became of one checkpoint of `--preload` on one device, for `status`.

    `state`: "loading", "resident" or "failed"; `cause`: why it failed.
    """

    path: str
    device: str
    state: str = "loading"
    set: int | None = None
    cause: str | None = None


def preload(broker: Server, path: str) -> list[Preload]:
    """Load a checkpoint onto every device and pin it. From the loop's thread; returns at once.

    A failure is a line in the log, and stays in `status`: nobody waits.
    """
    preloads = [Preload(path, device) for device in broker.devices]

    def describe() -> tuple[int, wire.Source]:
        with open_checkpoint(path) as checkpoint:
            return os.dup(checkpoint.folder), describe_source(checkpoint)

    def described(result: tuple[int, wire.Source] | BaseException) -> None:
        if isinstance(result, BaseException):
            for each in preloads:
                _failed(broker, each, str(result))
            return
        folder, source = result
        for each in preloads:
            _acquire(broker, each, os.dup(folder), source)
        os.close(folder)

    broker.helpers.submit(("preload", path), describe, described)
    return preloads


def _acquire(broker: Server, preload: Preload, folder: int, source: wire.Source) -> None:
    session = broker.books.open_session()
    ticket = broker.tickets.open(
        "preload",
        session,
        on_reply=lambda body: broker.loop.call_soon_threadsafe(
            lambda: _preloaded(broker, preload, session, body)
        ),
    )
    ticket.source = folder
    request = wire.Acquire("preload", wire.Demand(device=preload.device), source)
    try:
        broker.perform(broker.books.acquire(session, ticket.number, request))
    except BrokerError as error:
        broker.tickets.reply(ticket.number, error)


def _preloaded(
    broker: Server, preload: Preload, session: int, body: msgspec.Struct | BrokerError
) -> None:
    if isinstance(body, wire.Granted):
        preload.state, preload.set = "resident", body.set
        broker.perform(broker.books.pin(ticket=0, request=wire.Pin(str(body.set))))
        log_event("preloaded", path=preload.path, device=preload.device, set=body.set)
    elif isinstance(body, BrokerError):
        _failed(broker, preload, body.sentence)
    over = InternalError("preload is over")
    broker.perform(broker.books.end_session(session, over, closed=True))


def _failed(broker: Server, preload: Preload, cause: str) -> None:
    preload.state, preload.cause = "failed", cause
    broker.books.counters["preloads_failed"] += 1
    log_event(
        "preload-failed",
        level=logging.WARNING,
        path=preload.path,
        device=preload.device,
        cause=cause,
    )
