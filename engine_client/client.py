"""`EngineClient`: what an engine uses. Imports no torch; tensors do that when first asked for."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from broker import wire
from broker.checkpoints.describe import describe_source
from broker.checkpoints.files import open_checkpoint
from broker.checkpoints.model_config import config_of
from broker.closing import Closeable
from broker.device_names import AUTO, uuid_of
from broker.errors import BadRequest, BrokerError, NotFound, RequestTimeout, UsageError
from broker.quantization import check_ipc_quant_support, quantization_config_in
from broker.weights import WeightKey
from engine_client.arguments import (
    broker_of,
    check_function,
    check_layout,
    check_name,
    check_progress,
    check_text,
    checked_key,
    device_name,
    directory_of,
    said_of,
)
from engine_client.checkpoint import Checkpoint
from engine_client.deadline import Deadline
from engine_client.delivery import check_granted
from engine_client.devices import check_platform, choose_device
from engine_client.dtypes import dtype_name
from engine_client.lease import Lease, attach
from engine_client.observer import Operator
from engine_client.progress import Show, shown
from engine_client.publisher import Publisher
from engine_client.session import Session, connect
from engine_client.shielded import shielded
from engine_client.stage import Stage
from engine_client.watching import Watch, Watches
from engine_client.weight_set import WeightSet

if TYPE_CHECKING:
    from engine_client.arguments import DeviceName
    from engine_client.dtypes import Dtype
    from engine_client.swapping import PrivateWeights

CANCEL_SECONDS = 2.0
"""How long a call whose time ran out waits for the broker to confirm that nothing is left."""


class EngineClient(Operator, Publisher, Closeable):
    """One engine's connection to the broker of its node.

    Usable from several threads. A forked child must make its own. Closing (or leaving the `with`
    block) gives back every lease without live tensors; tensors that still live stay readable. A
    client that is dropped closes with the last of its weights, tensors and watches.

    Args:
        device: "cuda:N" as torch numbers them, torch's own, or a UUID; "cuda" or None: the first
            GPU that this process sees and the broker serves; "simulated" for the demonstration
            device.
        broker: the broker's name (`weight-broker serve --name`); None: $WEIGHT_BROKER_NAME, else
            "default".
        directory: where its sockets are; None: $WEIGHT_BROKER_DIR or the documented defaults.
        label: what `weight-broker status` shows for this engine; None: the program's name.
        timeout: seconds for connecting; not for loads.

    Raises:
        UsageError: this process may not open enough files (RLIMIT_NOFILE), or an argument is of a
            type that cannot be used.
        UnsupportedPlatformForIPCError: before any socket is opened; or, after that, the broker does
            not serve the device.
        BrokerNotFound: nobody listens; the sentence lists every path tried.
        ProtocolMismatch: the broker serves another platform or speaks another protocol.
    """

    def __init__(
        self,
        device: DeviceName | None = None,
        *,
        broker: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        label: str | None = None,
        timeout: float | None = 10.0,
    ) -> None:
        wanted = AUTO if device is None else device_name(device)
        check_text(label, "label")
        name, where = broker_of(broker), directory_of(directory)
        platform = check_platform(wanted, name, where).platform
        self._session: Session = connect(
            name,
            where,
            platform=platform,
            label=_program() if label is None else label,
            timeout=timeout,
        )
        try:
            self._device = choose_device(wanted, platform, self._session.devices)
        except BaseException:
            self._session.close()
            raise
        self._watches = Watches(self._session)
        self._leases = itertools.count(1)
        # Not a WeakSet: it runs code of Python's when one dies, which an interrupt would cut short.
        self._weights: set[weakref.ref[WeightSet]] = set()

    @property
    def epoch(self) -> str:
        """Changes with every start of the broker."""
        return self._session.epoch

    @property
    def device_uuid(self) -> str:
        """UUID of the device whose weights this client maps."""
        return self._device.properties.uuid

    @property
    def is_connected(self) -> bool:
        """False once the broker is lost or the client closed."""
        return self._session.is_usable

    @overload
    def acquire(
        self,
        weights: Checkpoint | WeightKey | str,
        *,
        dtype: Dtype | None = None,
        layout: Mapping[str, int] | None = None,
        format: str | None = None,
        quantization: str | None = None,
        generation: str | None = None,
        timeout: float | None = None,
        copy: Literal[False] = False,
        progress: Callable[[wire.Progress], None] | None = None,
    ) -> WeightSet: ...

    @overload
    def acquire(
        self,
        weights: Checkpoint | WeightKey | str,
        *,
        dtype: Dtype | None = None,
        layout: Mapping[str, int] | None = None,
        format: str | None = None,
        quantization: str | None = None,
        generation: str | None = None,
        timeout: float | None = None,
        copy: Literal[True],
        progress: Callable[[wire.Progress], None] | None = None,
    ) -> PrivateWeights: ...

    def acquire(
        self,
        weights: Checkpoint | WeightKey | str,
        *,
        dtype: Dtype | None = None,
        layout: Mapping[str, int] | None = None,
        format: str | None = None,  # noqa: A002 - the key's own word
        quantization: str | None = None,
        generation: str | None = None,
        timeout: float | None = None,
        copy: bool = False,
        progress: Callable[[wire.Progress], None] | None = None,
    ) -> WeightSet | PrivateWeights:
        """Map weights; load them first, once per node, if they are not resident. Blocks.

        Args:
            weights: a checkpoint, a set's whole key, or the name of a line (its newest generation).
            dtype, layout, format, quantization: demanded of the set; None leaves it open, or to the
                key, which must not say otherwise.
            generation: the label of the generation demanded.
            timeout: seconds for everything, and a moment (2 s at most) to withdraw the request from
                a broker that is slow to confirm it; None: as long as it takes and the broker lives.
            copy: give private, writable tensors and hold no lease afterwards: for an engine that
                must write to its weights.
            progress: called in this thread with the load's progress, at most 4 times a second;
                None: a line on the terminal, if standard error is one.

        Returns:
            A lease's tensors, valid until released (and, tensor by tensor, as long as it lives);
            with `copy` a dict of the engine's own.

        Raises:
            NotFound, LoadFailed, UnsupportedQuantForIPCError: the checkpoint cannot be served.
            Cancelled: somebody has evicted the weights while they were loaded; ask again.
            Mismatch: what is resident differs from what is demanded; `differing` names the fields.
            OverBudget: it does not fit.
            RequestTimeout: names the stage; the request is withdrawn and no lease is left.
            BrokerLost, UsageError.
        """
        deadline = Deadline(timeout)
        for what, text in (
            ("format", format),
            ("quantization", quantization),
            ("generation", generation),
        ):
            check_text(text, what)
        check_layout(layout)
        check_progress(progress)
        demand = wire.Demand(
            device=self._device.properties.uuid,
            dtype=None if dtype is None else dtype_name(dtype),
            layout=None if layout is None else dict(layout),
            format=format,
            quantization=quantization,
            generation=generation,
        )
        held = self._acquire_described(weights, demand, deadline, progress)
        if not copy:
            return held
        try:
            return held.copy()
        finally:
            held.let_go()

    def _acquire_described(
        self,
        weights: Checkpoint | WeightKey | str,
        demand: wire.Demand,
        deadline: Deadline,
        progress: Callable[[wire.Progress], None] | None,
    ) -> WeightSet:
        if isinstance(weights, Checkpoint):
            return self._acquire_checkpoint(weights, demand, deadline, progress)
        if isinstance(weights, WeightKey):
            demand = _demand_of(checked_key(weights), demand)
        elif isinstance(weights, str):
            if _is_path(weights):
                raise BadRequest(f"{weights!r} is no name; a folder is acquire(Checkpoint(path))")
            demand = msgspec.structs.replace(demand, name=weights)
        else:
            raise BadRequest(
                "acquire takes a Checkpoint(path), a WeightKey or a name, "
                f"not {type(weights).__name__}"
            )
        what = demand.name or demand.checkpoint or "weights"
        acquire = partial(self._acquire, demand, None, None, deadline)
        try:
            with shown(progress, what) as show:
                return shielded(acquire, deadline, show)
        except NotFound as error:
            if isinstance(weights, str) and os.path.exists(weights):  # noqa: PTH110 - whatever the name
                raise NotFound(
                    f"{error.sentence}; the checkpoint in {weights!r} is "
                    f"acquire(Checkpoint({weights!r}))",
                    **error.fields,
                ) from error
            raise

    def _acquire_checkpoint(
        self,
        checkpoint: Checkpoint,
        demand: wire.Demand,
        deadline: Deadline,
        progress: Callable[[wire.Progress], None] | None,
    ) -> WeightSet:
        demand = msgspec.structs.replace(demand, name=checkpoint.name)
        name = Path(os.fsdecode(checkpoint.path)).name
        with shown(progress, name) as show:
            return shielded(
                partial(self._acquire_opened, checkpoint, demand, deadline), deadline, show
            )

    def _acquire_opened(
        self, checkpoint: Checkpoint, demand: wire.Demand, deadline: Deadline, show: Show
    ) -> WeightSet:
        with open_checkpoint(checkpoint.path) as opened:
            config = config_of(opened)
            check_ipc_quant_support(quantization_config_in(config or {}), where="engine")
            source = describe_source(opened, checkpoint.conversion)
            return self._acquire(demand, source, opened.folder, deadline, show)

    def _acquire(
        self,
        demand: wire.Demand,
        source: wire.Source | None,
        folder: int | None,
        deadline: Deadline,
        progress: Callable[[wire.Progress], None],
    ) -> WeightSet:
        lease = str(next(self._leases))
        waiting = Stage("the weights", progress)
        try:
            granted = self._session.call(
                "acquire",
                wire.Acquire(lease, demand, source),
                wire.Granted,
                deadline=deadline,
                stage=waiting,
                on_progress=waiting.on_progress,
                deliver=None if folder is None else ("source", folder),
            )
            check_granted(granted, lease, demand)
            return self._hold(attach(self._session, self._device, granted, deadline))
        except BaseException:
            self._withdraw(lease)
            raise

    def _hold(self, lease: Lease) -> WeightSet:
        weights = WeightSet(lease, self._acquire_newest, self._device.ordinal)
        self._weights.add(weakref.ref(weights, self._weights.discard))
        return weights

    def _acquire_newest(self, key: WeightKey, generation: str | None) -> WeightSet:
        return self.acquire(msgspec.structs.replace(key, checkpoint=""), generation=generation)

    def _withdraw(self, lease: str) -> None:
        """Whatever the broker has made of the request, it holds no lease afterwards."""
        if self._session.is_usable:
            deadline = Deadline(CANCEL_SECONDS)
            cancel = wire.Cancel(lease)
            try:
                self._session.call("cancel", cancel, wire.Done, deadline=deadline)
            except RequestTimeout:
                # Not waited for any more, but said until a server has heard it: the one that was
                # asked may have died.
                self._session.notify("cancel", cancel)
            except BrokerError:
                return  # a broker that is gone holds no lease

    def resident_bytes(self, device: str | None = None) -> int:
        """Bytes that the broker holds on a device: in use there, as weights that are shared.

        Everything on its books, whoever maps it; not the few MiB of the device's canary. Blocks for
        one answer of the broker.

        Args:
            device: a UUID, or "simulated"; None: the client's own.

        Raises:
            BadRequest: the broker does not serve it.
            UsageError: it is no text.
            RequestTimeout, BrokerLost.
        """
        check_text(device, "resident_bytes: device")
        uuid = self._device.properties.uuid if device is None else uuid_of(device)
        books = self.status()["devices"]
        if uuid not in books:
            raise BadRequest(
                f"the broker does not serve device {uuid}; it serves {', '.join(books)}"
            )
        held: int = books[uuid]["limit"] - books[uuid]["free"]
        return held

    def key_of(self, entry: Mapping[str, Any]) -> WeightKey:
        """The key of a set as `status` lists it.

        Raises:
            UsageError: it is no such entry.
        """
        try:
            return msgspec.convert(entry["key"], WeightKey)
        except (TypeError, LookupError, msgspec.ValidationError) as error:
            raise UsageError(
                f"key_of takes one of status()['sets'], not {said_of(entry)}"
            ) from error

    def watch(self, name: str) -> Watch:
        """Events of a name from now on: newer generations, evictions, the broker's end.

        To follow a name without a gap, watch it first and acquire it then.

        Args:
            name: "" for all names.

        Raises:
            Busy: this client watches too many names. BrokerLost.
        """
        check_name(name, "the name to watch")
        return self._watches.open(name)

    def on_broker_lost(self, callback: Callable[[], None]) -> None:
        """Call back once when the broker is gone, from another thread, at once if it is already.

        Mapped weights stay valid; nothing new can be acquired through this client. Not called for
        a client that was closed or dropped.
        """
        check_function(callback, "what on_broker_lost calls", "takes no arguments")
        self._session.on_lost(callback)

    def close(self) -> None:
        """Give back what has no live tensors, end the session and every watch. Idempotent.

        Safe in a signal's handler, whatever that has interrupted. Weights that a thread is about to
        make tensors of, or to put to sleep or wake, stay mapped until they are dropped. In a forked
        child it does nothing: session and leases are the parent's.
        """
        if self._session.is_inherited:
            return
        for reference in list(self._weights):
            weights = reference()
            if weights is not None:
                weights.release_unused()
        self._watches.end()
        self._session.close()


def _program() -> str:
    """The program's name, printable: a file's name may hold line breaks, and bytes of no text."""
    name = os.fsencode(Path(sys.argv[0]).name).decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def _is_path(name: str) -> bool:
    """Whether a name, which may have slashes ("team/prod"), looks like a folder's path."""
    return name.startswith(("/", "./", "../", "~")) or ("/" in name and Path(name).is_dir())


def _demand_of(key: WeightKey, demand: wire.Demand) -> wire.Demand:
    """A whole key demands every field it gives; "" leaves name, checkpoint and dtype open."""
    if key.device and key.device != demand.device:
        raise BadRequest(f"the key is for device {key.device}, this client is on {demand.device}")
    for field in ("dtype", "layout", "format", "quantization"):
        said, wanted = getattr(key, field), getattr(demand, field)
        if wanted is not None and wanted != said and (said or field != "dtype"):
            raise UsageError(
                f"acquire: the key says {field} {said!r} and the argument {wanted!r}; give it once"
            )
    return wire.Demand(
        device=demand.device,
        name=key.name or None,
        checkpoint=key.checkpoint or None,
        dtype=key.dtype or demand.dtype,
        layout=dict(key.layout),
        format=key.format,
        quantization=key.quantization,
        generation=demand.generation,
    )
