"""A broker as its user sees it: a keeper in this process, and the servers it starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from broker.closing import Closeable
from broker.config import BrokerConfig
from broker.errors import UsageError
from broker.journal.recording import keeper_journal
from broker.keeper import Keeper
from broker.limits import raise_descriptor_limit
from broker.link import METRICS
from broker.platform import check_ipc_platform_support
from broker.rundir import (
    DIRECTORY_VARIABLE,
    BrokerPaths,
    broker_directory,
)


class Broker(Closeable):
    """A broker, from its platform check to its last socket. Also a context manager, which closes
    it.

    Everything that can be refused is refused here, before `run`: platform, name, directory, a
    second broker of the same name. Nothing is left behind then. From here on it has the name, and
    engines can connect, until `run` has returned or it is closed.

    Raises:
        UnsupportedPlatformForIPCError: no device here can share memory between processes.
        Busy: a broker of this name is running; the sentence names its pid.
        Busy: so is a listener at the port for metrics.
        BadRequest: the directory is not safe, the name, a path or an address is not usable; or this
            process may have too few descriptors.
        NotFound, LoadFailed: a checkpoint to preload is not there.
    """

    def __init__(self, config: BrokerConfig) -> None:
        raise_descriptor_limit()
        report = check_ipc_platform_support(where="broker", device=config.device)
        preload = [os.fspath(path) for path in config.preload]
        _look_at(preload)
        self._paths = paths = _paths(config)
        self._journal_limit = config.journal_limit
        options = {**asdict(config), "directory": str(paths.directory), "preload": preload}
        served = json.dumps(options).encode()
        self._is_running = self._is_closed = False
        with ExitStack() as unused:
            metrics = unused.enter_context(_listen(config.metrics)) if config.metrics else None
            self._keeper = Keeper(paths, served, config.limits.restart_seconds)
            unused.callback(self._keeper.close)
            if metrics is not None:
                self._keeper.keep("listener", METRICS, b"", metrics.detach())
            for uuid, canary in report.canaries.items():
                record = f"{canary.nbytes} {canary.seed}".encode()
                self._keeper.keep("canary", uuid, record, os.dup(canary.descriptor))
            unused.pop_all()

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT begin an orderly stop. Only from the main thread."""
        self._keeper.stop_on_signals()

    def run(self, on_ready: Callable[[str], None] | None = None) -> int:
        """Serve until stopped; the exit code: 0 in order, else that of a server that never came up.
        It is closed then, and serves no more.

        Args:
            on_ready: called once with a line for a person, when `ping` is answered.

        Raises:
            UsageError: it is closed.
        """
        if self._is_closed or self._is_running:
            raise UsageError("this Broker has run or is closed: make another one to serve again")
        self._is_running = True
        try:
            with closing(keeper_journal(self._paths, self._journal_limit)):
                return self._keeper.run(on_ready)
        finally:
            self._is_running = False
            self.close()

    def close(self) -> None:
        """Give the name back and remove the sockets of a broker that is not to run. Idempotent.

        The lock's file stays, empty, as it does after `run`.

        Raises:
            UsageError: another thread is in `run`.
        """
        if self._is_running:
            raise UsageError(
                "this Broker is running: `weight-broker shutdown` or a signal stops it, and `run` "
                "closes it"
            )
        self._is_closed = True
        self._keeper.close()


def _look_at(paths: Sequence[str]) -> None:
    """Raise unless these checkpoints are there."""
    if paths:
        from broker.checkpoints.files import open_checkpoint  # imported by few starts

        for path in paths:
            open_checkpoint(path).close()


def _listen(address: str) -> socket.socket:
    from broker.metrics.address import listen  # imported by few starts

    return listen(address)


def _paths(config: BrokerConfig) -> BrokerPaths:
    given = config.directory
    environ = None if given is None else {DIRECTORY_VARIABLE: str(Path(given).absolute())}
    directory = broker_directory(environ, group=config.group)
    return BrokerPaths(directory, config.name, config.group)
