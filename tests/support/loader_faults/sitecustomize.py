"""Makes loader processes misbehave on order, without a line of it in the product.

A test's broker runs with this folder on PYTHONPATH, and so do the loaders it starts: Python imports
a `sitecustomize` before anything else. Only a loader looks at the order, a file with one word
(tests/support/processes.py, `LoaderFault`).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

TYPE_CHECKING = False  # typing would cost every process of every test its import
if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer


def stop(data: Buffer = b"") -> Buffer:
    signal.raise_signal(signal.SIGSTOP)  # of this thread, so that it does not go on
    return data


def die(data: Buffer) -> Buffer:
    os.write(2, b"DyingLoader: these are its last words\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return data


def find_the_device_full(data: Buffer) -> Buffer:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def find_no_memory(data: Buffer) -> Buffer:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def forget(data: Buffer) -> Buffer:
    return bytes(len(memoryview(data)))


def at_first_write(fault: Callable[[Buffer], Buffer]) -> None:
    """Do `fault` to what the loader first writes to its slab, then go on as ever."""
    pwrite = os.pwrite

    def faulty(descriptor: int, data: Buffer, offset: int) -> int:
        os.pwrite = pwrite
        return pwrite(descriptor, fault(data), offset)

    os.pwrite = faulty


def at_first_bytes(number: int) -> None:
    """Have the first read of tensors fail as a broken disk has it; headers are read otherwise."""

    def faulty(descriptor: int, buffers: object, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    os.preadv = faulty  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], object]] = {
    "stops at start": stop,
    "stops while writing": lambda: at_first_write(stop),
    "dies while writing": lambda: at_first_write(die),
    "finds the device full": lambda: at_first_write(find_the_device_full),
    "finds no memory": lambda: at_first_write(find_no_memory),
    "finds the disk broken": lambda: at_first_bytes(errno.EIO),
    "finds the file server gone": lambda: at_first_bytes(errno.ESTALE),
    "writes zeros": lambda: at_first_write(forget),
}

if "broker.loader" in sys.orig_argv:
    order = Path(os.environ["WEIGHT_BROKER_TEST_LOADER"])
    if order.exists():
        FAULTS[order.read_text()]()
