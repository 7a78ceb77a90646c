"""A client that maps nothing: for status, evict and shutdown, on any machine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.model_config import config_of
from broker.closing import Closeable
from broker.device_names import uuid_of
from broker.errors import BadRequest, BrokerLost, RequestTimeout, StaleEpoch
from broker.quantization import check_ipc_quant_support, quantization_config_in
from engine_client.arguments import broker_of, check_name, check_text, directory_of, path_of
from engine_client.deadline import Deadline
from engine_client.progress import shown
from engine_client.session import Session, connect

ANSWER_SECONDS = 10.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.02


class Operator:
    """What anybody may ask of a broker, mapping or not. A call blocks up to `timeout` seconds."""

    _session: Session

    def status(self, timeout: float | None = ANSWER_SECONDS) -> dict[str, Any]:
        """Everything on the broker's books, as `weight-broker status --json` prints it."""
        report = self._session.call("status", None, wire.StatusReport, deadline=Deadline(timeout))
        return wire.as_plain(report)

    def ping(self, timeout: float | None = ANSWER_SECONDS) -> wire.Pong:
        """Ask whether the broker's loop turns."""
        return self._session.call("ping", None, wire.Pong, deadline=Deadline(timeout))

    def evict(self, weights: str, timeout: float | None = ANSWER_SECONDS) -> wire.Evicted:
        """Have the broker forget sets (by id, name or identity) as soon as nobody leases them.

        Raises:
            NotFound: no such set.
            BadRequest: it is the id of one and the name of another.
        """
        check_name(weights, "evict: the set")
        message = wire.Evict(weights)
        return self._session.call("evict", message, wire.Evicted, deadline=Deadline(timeout))

    def pin(self, weights: str, timeout: float | None = ANSWER_SECONDS) -> wire.Pinned:
        """Have the broker keep sets (by id, name or identity) although nobody leases them.

        Whatever memory is needed or generation comes; `evict` ends it.

        Raises:
            NotFound: no such set.
            BadRequest: it is the id of one and the name of another.
        """
        check_name(weights, "pin: the set")
        message = wire.Pin(weights)
        return self._session.call("pin", message, wire.Pinned, deadline=Deadline(timeout))

    def unpin(self, weights: str, timeout: float | None = ANSWER_SECONDS) -> wire.Pinned:
        """The opposite of `pin`: a superseded set that nobody leases is freed now.

        Raises:
            NotFound: no such set.
            BadRequest: it is the id of one and the name of another.
        """
        check_name(weights, "unpin: the set")
        message = wire.Unpin(weights)
        return self._session.call("unpin", message, wire.Pinned, deadline=Deadline(timeout))

    def upgrade(self, timeout: float | None = ANSWER_SECONDS) -> None:
        """Replace the broker's server by the version installed now, without a lease lost.

        Returns when the new one answers. Loads under way start again; claims of engines that
        publish are discarded.
        """
        deadline = Deadline(timeout)
        before = self._restarts(deadline)
        while True:
            # The new server must not be asked what the old one had no time to answer.
            with contextlib.suppress(StaleEpoch):
                self._session.call(
                    "upgrade", wire.Upgrade(), wire.Done, deadline=deadline, is_repeated=False
                )
                break
            if self._restarts(deadline) != before:
                return  # if not, only the connection was lost, and perhaps the request with it
        while self._restarts(deadline) == before:
            time.sleep(POLL_SECONDS)

    def _restarts(self, deadline: Deadline) -> int:
        """How often the broker's server has been replaced."""
        restarts: int = self.status(deadline.remaining())["broker"]["restarts"]
        return restarts

    def shutdown(self, *, force: bool = False, timeout: float | None = ANSWER_SECONDS) -> None:
        """Stop the broker in order.

        Raises:
            Busy: leases are held and `force` is false.
        """
        message = wire.Shutdown(force)
        # It may be gone before its answer is here, which then says the same.
        with contextlib.suppress(BrokerLost):
            self._session.call("shutdown", message, wire.Done, deadline=Deadline(timeout))


class Observer(Operator, Closeable):
    """A session without a device. Also a context manager.

    Args:
        name, directory: as `broker` and `directory` of `EngineClient`.

    Raises:
        BrokerNotFound: nobody listens; the sentence lists every path tried.
        UsageError: an argument is of a type that cannot be used.
    """

    def __init__(
        self, name: str | None = None, directory: str | os.PathLike[str] | None = None
    ) -> None:
        self._session = connect(broker_of(name), directory_of(directory), platform=wire.NO_PLATFORM)
        self._lost = threading.Event()
        self._session.on_lost(self._lost.set)

    def publish_checkpoint(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        generation: str | None = None,
        device: str | None = None,
    ) -> wire.Granted:
        """Have a checkpoint loaded, if need be, as the newest generation of a name. Blocks.

        What the grant describes is resident when this returns; no lease on it is kept.

        Args:
            generation: a label; None: the next number, or the one that this content has already.
            device: UUID, or "simulated"; None: the only one the broker serves.

        Raises:
            BadRequest: several devices are served, and none was named.
            Mismatch: the label is another content's, or this content has another label.
            UsageError: an argument is of a type that cannot be used.
            NotFound, LoadFailed, UnsupportedQuantForIPCError, OverBudget, BrokerLost: as `acquire`.
        """
        path_of(path, "publish: the checkpoint")
        check_name(name, "publish: the name")
        check_text(generation, "publish: generation")
        check_text(device, "publish: device")
        served = self._session.devices
        if device is None and len(served) != 1:
            raise BadRequest(f"this broker serves {', '.join(served)}: say on which with --device")
        demand = wire.Demand(
            device=served[0] if device is None else uuid_of(device),
            name=name,
            generation=generation,
        )
        with open_checkpoint(path) as opened:
            config = config_of(opened)
            check_ipc_quant_support(quantization_config_in(config or {}), where="engine")
            with shown(None, name) as show:
                granted: wire.Granted = self._session.call(
                    "acquire",
                    wire.Acquire("publish", demand, describe_source(opened)),
                    wire.Granted,
                    on_progress=show,
                    deliver=("source", opened.folder),
                )
            self._session.call("release", wire.Release("publish"), wire.Done)
            return granted

    @property
    def session(self) -> int:
        """This session's id, as `status` has it."""
        return self._session.number

    @property
    def served_devices(self) -> list[str]:
        """The UUIDs of the devices that the broker serves."""
        return list(self._session.devices)

    def wait_until_lost(self, timeout: float = STOP_SECONDS) -> None:
        """Return when the broker has ended.

        Raises:
            RequestTimeout: it has not within `timeout` seconds.
        """
        if not self._lost.wait(Deadline(timeout).remaining()):
            raise RequestTimeout(
                f"the broker did not end within {timeout} s", stage="stopping", seconds=timeout
            )

    def close(self) -> None:
        """End the session. Idempotent."""
        self._session.close()
