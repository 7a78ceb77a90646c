"""Filling a slab on a GPU through a small ring of pinned host memory."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Sequence
from ctypes import byref, c_void_p

from broker.devices.base import (
    PIECE_BYTES,
    DeviceError,
    Mapping,
    Segment,
    SlabWriter,
    StagingBuffer,
)
from broker.devices.driver import Driver
from broker.devices.driver_abi import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING


class RingWriter(SlabWriter):
    """See `SlabWriter`. Owns the mapping it is given once it is made, and closes it.

    The ring is pinned once (pinning costs seconds per gigabyte) and all copies run on one stream
    of its own: the copy engine takes them one after the other anyway. A buffer goes back to the
    ring at once and is waited for by whoever takes it next, so reading, hashing and copying overlap
    as far as the ring is long. No buffer may be in use when `close` is called.
    """

    def __init__(self, driver: Driver, ordinal: int, mapping: Mapping, buffers: int) -> None:
        self._driver = driver
        self._device = driver.label(ordinal)
        self._mapping = mapping
        self._lock = threading.Lock()
        self._open = True
        self._free: queue.SimpleQueue[_PinnedBuffer] = queue.SimpleQueue()
        self._context = driver.open_context(ordinal)
        try:
            with self._context.current(), contextlib.ExitStack() as undo:
                self._stream = self._make_stream(undo)
                self._make_ring(undo, buffers)
                self._undo = undo.pop_all()
        except BaseException:
            self._context.close()
            raise

    def _make_stream(self, undo: contextlib.ExitStack) -> c_void_p:
        stream = c_void_p()
        self._call("create_stream", byref(stream), STREAM_NON_BLOCKING)
        undo.callback(self._call, "destroy_stream", stream)
        return stream

    def _make_ring(self, undo: contextlib.ExitStack, buffers: int) -> None:
        memory = c_void_p()
        self._call("pin", byref(memory), buffers * PIECE_BYTES, 0)
        undo.callback(self._call, "unpin", memory)
        for index in range(buffers):
            event = c_void_p()
            self._call("create_event", byref(event), EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)
            undo.callback(self._call, "destroy_event", event)
            buffer = _PinnedBuffer((memory.value or 0) + index * PIECE_BYTES, event)
            undo.callback(buffer.view.release)
            self._free.put(buffer)

    def buffer(self) -> StagingBuffer:
        """See `SlabWriter.buffer`. Also blocks until the buffer's last copy has left it.

        Raises:
            DeviceError: that copy failed; the buffer is back in the ring.
        """
        buffer = self._free.get()
        if buffer.copying:
            try:
                with self._context.current():
                    self._call("synchronise_event", buffer.event)
            except BaseException:
                self._free.put(buffer)
                raise
            buffer.copying = False
        return buffer

    def submit(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        assert isinstance(buffer, _PinnedBuffer)  # noqa: S101 - our own ring
        try:
            if segments:
                self._check(segments)
                with self._context.current():
                    self._copy(buffer, segments)
        finally:
            self._free.put(buffer)

    def _check(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            inside = (
                min(segment.start, segment.nbytes, segment.offset) >= 0
                and segment.start + segment.nbytes <= PIECE_BYTES
                and segment.offset + segment.nbytes <= self._mapping.nbytes
            )
            if not inside:
                raise DeviceError(
                    f"write on {self._device}: {segment} is not inside a buffer of {PIECE_BYTES} "
                    f"and a slab of {self._mapping.nbytes} bytes"
                )

    def _copy(self, buffer: _PinnedBuffer, segments: Sequence[Segment]) -> None:
        # Set first: after a failure some of the copies may be under way all the same.
        buffer.copying = True
        try:
            for segment in filter(_has_bytes, segments):
                target = self._mapping.address + segment.offset
                source = buffer.address + segment.start
                self._call("copy_in", target, source, segment.nbytes, self._stream)
        finally:
            self._call("record_event", buffer.event, self._stream)

    def close(self) -> None:
        """See `SlabWriter.close`. Gives everything back, also when waiting fails.

        Raises:
            DeviceError: not every byte has arrived, or the slab could not be unmapped.
        """
        with self._lock, contextlib.ExitStack() as afterwards:
            if not self._open:
                return
            self._open = False
            afterwards.callback(self._mapping.close)
            afterwards.callback(self._context.close)
            with self._context.current(), self._undo:
                self._call("synchronise_stream", self._stream)

    def _call(self, operation: str, *arguments: object) -> None:
        self._driver.call(operation, *arguments, device=self._device)


def _has_bytes(segment: Segment) -> bool:
    return segment.nbytes > 0


class _PinnedBuffer(StagingBuffer):
    """A piece of the ring, and the event that says when its last copy has left it."""

    def __init__(self, address: int, event: c_void_p) -> None:
        self.address = address
        self.event = event
        self.copying = False
        piece = (ctypes.c_ubyte * PIECE_BYTES).from_address(address)
        self.view = memoryview(piece).cast("B")
