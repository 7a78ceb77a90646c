"""Every open of a file in a folder, as the kernel reports it: inotify(7), whoever opens it.

The kernel reports two equal events as one if nothing came between them. So closing is watched too:
only opens of one file that overlap in time can be counted as one, and none is ever missed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType

_IN_OPEN = 0x20
_IN_CLOSE = 0x18
_IN_Q_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")
_library = ctypes.CDLL(None, use_errno=True)


class Opens:
    """Context manager. `weight_files` are the opens of safetensors files since it was entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1
        self.weight_files: list[str] = []

    def __enter__(self) -> Opens:
        self._descriptor = _library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = _library.inotify_add_watch(
            self._descriptor, os.fsencode(self._folder), ctypes.c_uint32(_IN_OPEN | _IN_CLOSE)
        )
        if self._descriptor < 0 or watch < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {self._folder}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.weight_files = [name for name in self._read() if name.endswith(".safetensors")]
        os.close(self._descriptor)

    def _read(self) -> list[str]:
        names: list[str] = []
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return names
            at = 0
            while at < len(data):
                _watch, mask, _cookie, length = _EVENT.unpack_from(data, at)
                if mask & _IN_Q_OVERFLOW:
                    raise OSError("more files were opened than the kernel could report")
                at += _EVENT.size
                if mask & _IN_OPEN:
                    names.append(data[at : at + length].rstrip(b"\0").decode())
                at += length
