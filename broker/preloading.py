"""Checkpoints that the broker loads before any engine has asked for them, and keeps."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.errors import BrokerError, InternalError
from broker.logs import log_event

if TYPE_CHECKING:
    from broker.server import Server


def preload(broker: Server, path: str) -> None:
    """Load a checkpoint onto every device and pin it. From the loop's thread; returns at once.

    A failure is a line in the log: nobody waits.
    """

    def describe() -> tuple[int, wire.Source]:
        with open_checkpoint(path) as checkpoint:
            return os.dup(checkpoint.folder), describe_source(checkpoint)

    def described(result: tuple[int, wire.Source] | BaseException) -> None:
        if isinstance(result, BaseException):
            _failed(broker, path, str(result))
            return
        folder, source = result
        for device in broker.devices:
            _acquire(broker, path, os.dup(folder), wire.Demand(device=device), source)
        os.close(folder)

    broker.helpers.submit(("preload", path), describe, described)


def _acquire(
    broker: Server, path: str, folder: int, demand: wire.Demand, source: wire.Source
) -> None:
    session = broker.books.open_session()
    ticket = broker.tickets.open(
        "preload",
        session,
        on_reply=lambda body: broker.loop.call_soon_threadsafe(
            lambda: _preloaded(broker, path, session, body)
        ),
    )
    ticket.source = folder
    request = wire.Acquire("preload", demand, source)
    try:
        broker.perform(broker.books.acquire(session, ticket.number, request))
    except BrokerError as error:
        broker.tickets.reply(ticket.number, error)


def _preloaded(broker: Server, path: str, session: int, body: msgspec.Struct | BrokerError) -> None:
    if isinstance(body, wire.Granted):
        broker.perform(broker.books.pin(ticket=0, request=wire.Pin(str(body.set))))
        log_event("preloaded", path=path, set=body.set)
    elif isinstance(body, BrokerError):
        _failed(broker, path, body.sentence)
    broker.perform(broker.books.end_session(session, InternalError("preload is over")))


def _failed(broker: Server, path: str, cause: str) -> None:
    broker.books.counters["preloads_failed"] += 1
    log_event("preload-failed", level=logging.ERROR, path=path, cause=cause)
